"""What a detector found, as files and as a row of the paper's Table 6."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whereformer.lab import record
from whereformer.lab.detect import draw
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.evaluate import ROW, Prediction, Scores
from whereformer.lab.detect.tree import Progress

RECALLS = ("AR1", "AR10", "AR100")
SIZES = {
    "pixels": "Small objects are below 32 x 32 pixels, large ones above 96 x 96.",
    "share": "Small objects are below the part of an image that 32 x 32 pixels are of 640 x 480, large ones above"
    " that of 96 x 96.",
}
"""What `areas` means, in words."""


def row(scores: Scores) -> tuple[list[str], list[str]]:
    """Header and line, in %: the iRPE paper's Table 6, and average recall."""
    names = (*ROW, *RECALLS)
    return list(names), [percent(getattr(scores, name)) for name in names]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def spread(count: int, shown: int) -> list[int]:
    """At most so many of `count` places, evenly spread.

    >>> spread(10, 3), spread(2, 3)
    ([0, 3, 6], [0, 1])
    """
    return list(range(0, count, max(1, count // shown))[:shown])


def write_evaluation(
    out: Path, found: Mapping[str, Any], truth: Annotations, rows: Sequence[Prediction], shown: int
) -> None:
    """metrics.json, predictions.json, and sheet.png with some images, evenly spread over the set."""
    record.write(out / "predictions.json", json.dumps(list(rows)))
    draw.write(out / "sheet.png", draw.sheet(draw.panels(truth, rows, spread(len(truth), shown))))
    record.write_json(out / "metrics.json", found)


def write_predictions(
    out: Path, images: Annotations, rows: Sequence[Prediction], least: float, on_image: Progress | None
) -> dict[int, str]:
    """predictions.json, images.json, and a drawing of each image unless there is no `on_image`; in the place of
    those of an earlier call.

    Returns:
        the drawing's name in `out` of each image, by its number.
    """
    numbers = images.to_coco()
    record.write_json(out / "images.json", {name: numbers[name] for name in ("images", "categories")})
    record.write(out / "predictions.json", json.dumps(list(rows)))
    for drawing in out.glob("drawn/[0-9]*-*.png"):
        drawing.unlink()
    if on_image is None:
        return {}
    drawings = {}
    colours = draw.palette(images.names)
    of = {picture.id: [] for picture in images.pictures}
    for one in rows:
        of[one["image_id"]].append(one)
    for index, picture in enumerate(images.pictures):
        name = f"drawn/{picture.id:06d}-{Path(picture.file).stem}.png"
        (panel,) = draw.panels(images, of[picture.id], [index], least)
        draw.write(out / name, draw.alone(panel, colours))
        drawings[picture.id] = name
        on_image(index + 1, len(images))
    return drawings
