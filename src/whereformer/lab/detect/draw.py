"""Images with the boxes that are there and those that were predicted, side by side on a sheet."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whereformer.errors import check_count
from whereformer.lab import record
from whereformer.lab.canvas import COLOURS
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.evaluate import Prediction

LEAST = 0.5  # score of a prediction that is shown
INCHES = 2.6  # width of an image on the sheet
ALONE = 1000  # pixels of the longer side of an image that is drawn alone
DPI = 144


@dataclass(frozen=True)
class Mark:
    """A box on an image.

    Args:
        xywh: left, top, width, height in pixels.
        name: of its category.
        score: of a prediction; None for what is there.
        crowd: whether it holds a crowd.
    """

    xywh: tuple[float, float, float, float]
    name: str
    score: float | None = None
    crowd: bool = False


@dataclass(frozen=True)
class Panel:
    """An image, of PIL or an array [height, width, 3], uint8, and its boxes."""

    image: Any
    title: str
    marks: tuple[Mark, ...]


def panels(
    annotations: Annotations,
    predictions: Iterable[Prediction],
    indices: Sequence[int],
    least: float = LEAST,
) -> list[Panel]:
    """The images of some `indices`, with the truth and with predictions whose score is at least `least`."""
    names = {category.id: category.name for category in annotations.categories}
    wanted = {annotations.pictures[index].id: [] for index in indices}
    for one in predictions:
        if one["image_id"] in wanted and one["score"] >= least:
            x, y, w, h = map(float, one["bbox"])
            mark = Mark((x, y, w, h), names[one["category_id"]], float(one["score"]))
            wanted[one["image_id"]].append(mark)
    found = []
    for index in indices:
        picture, boxes = annotations.pictures[index], annotations.of(index)
        image = annotations.tree.image(picture.file, (picture.width, picture.height))
        rows = zip(boxes.xywh.tolist(), boxes.labels.tolist(), boxes.crowd.tolist(), strict=True)
        truth = [Mark((x, y, w, h), annotations.names[label], crowd=crowd) for (x, y, w, h), label, crowd in rows]
        guessed = sorted(wanted[picture.id], key=lambda mark: mark.score)  # the surest on top
        found.append(Panel(image, Path(picture.file).name, (*truth, *guessed)))
    return found


def sheet(shown: Sequence[Panel], columns: int = 4) -> Any:
    """A figure: white dashes around what is there, dots around crowds, and the predictions in a colour for each
    category, with their scores in %."""
    from matplotlib.figure import Figure

    check_count("panels", len(shown))
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    colours = palette(sorted({mark.name for panel in shown for mark in panel.marks}))
    figure = Figure(figsize=(INCHES * columns, (INCHES + 0.2) * rows), dpi=DPI, layout="constrained")
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, shown, strict=False):
        axes.set_title(panel.title, fontsize=7)
        _show(axes, panel, colours)
    for axes in figure.axes:
        axes.set_axis_off()
    return figure


def alone(panel: Panel, colours: Mapping[str, str]) -> Any:
    """A figure of one image and its boxes, without a border; a colour for each name of a category."""
    import numpy as np
    from matplotlib.figure import Figure

    height, width = np.asarray(panel.image).shape[:2]
    scale = ALONE / max(height, width) / DPI
    figure = Figure(figsize=(width * scale, height * scale), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    _show(axes, panel, colours, points=9)
    axes.set_axis_off()
    return figure


def palette(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name; there are ten."""
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _show(axes: Any, panel: Panel, colours: Mapping[str, str], points: float = 5.5) -> None:
    axes.imshow(panel.image)
    limits = axes.get_xlim(), axes.get_ylim()
    for mark in panel.marks:
        _outline(axes, mark, colours, points)
    axes.set(xlim=limits[0], ylim=limits[1])


def _outline(axes: Any, mark: Mark, colours: Mapping[str, str], points: float) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    (x, y, w, h), colour = mark.xywh, colours[mark.name]
    corner = (x - 0.5, y - 0.5)  # pixels are drawn around their centres
    if mark.score is None:
        dashes = (0, (1, 1)) if mark.crowd else (0, (3, 2))
        axes.add_patch(Rectangle(corner, w, h, fill=False, ec="black", lw=1.1, alpha=0.6))
        axes.add_patch(Rectangle(corner, w, h, fill=False, ec="white", lw=0.8, ls=dashes))
    else:
        axes.add_patch(Rectangle(corner, w, h, fill=False, ec=colour, lw=1.4))
        effects = [withStroke(linewidth=2, foreground="white")]
        text = f"{mark.name} {100 * mark.score:.0f}"
        place = max(corner[0], -0.5), max(corner[1], -0.5)
        beside = "bottom" if corner[1] > 0.06 * axes.get_ylim()[0] else "top"  # above the box, if there is room
        axes.text(*place, text, color=colour, fontsize=points, va=beside, clip_on=True, path_effects=effects)


def write(path: Path, figure: Any) -> Path:
    """Writes a figure as a PNG file, at once."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    record.write(path, buffer.getvalue())
    return path
