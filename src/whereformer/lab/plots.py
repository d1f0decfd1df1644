"""The figures of a comparison."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whereformer.adapters import load_checkpoint
from whereformer.encoding import PositionEncoding
from whereformer.forms import BucketValues
from whereformer.grid import Grid
from whereformer.lab.canvas import canvas, colours, deviation, saved
from whereformer.lab.data import Data, Share
from whereformer.lab.experiment import Experiment
from whereformer.lab.pool import Task
from whereformer.lab.record import Run
from whereformer.lab.trainee import build

IMAGES = 16  # test images that a mean bias is taken over


def draw(experiment: Experiment, out: Path, data: Data, runs: Mapping[Task, Run]) -> dict[str, Path]:
    """Draws all figures there are to draw: caption -> PNG file."""
    figures = {
        "Test accuracy after each epoch: mean over seeds, and one standard deviation to each side.": (
            out / "figures" / "accuracy_by_epoch.png",
            by_epoch(experiment, runs),
        ),
        "Test accuracy of the final weights on images scaled to other sizes, with patches of the size trained on: "
        "mean over seeds, and one standard deviation to each side. The dashed line marks the grid trained on.": (
            out / "figures" / "accuracy_by_grid.png",
            by_grid(experiment, runs),
        ),
    }
    seed = experiment.seeds[0]
    for encoding in experiment.encodings:
        run = runs[encoding, seed]
        model = trained(experiment, encoding, data, run)
        if (similarities := position_similarities(model)) is not None:
            figures[
                f"{encoding}, seed {seed}: cosine similarity of the position of each patch (one small map each,"
                " placed where the patch is) with the positions of all patches."
            ] = (run.folder / "figures" / "position_similarity.png", draw_similarities(similarities))
        if maps := bias_maps(model, next(data.test(experiment.image_size, Share()))[0][:IMAGES]):
            figures[
                f"{encoding}, seed {seed}: what each layer learned for each offset (query minus key, in patches)."
                f" Bias on the logits: mean over {IMAGES} test images, heads and pairs of patches."
                " Value rows: mean norm."
            ] = (run.folder / "figures" / "offset_maps.png", draw_maps(maps))
    return {caption: saved(*figure) for caption, figure in figures.items()}


def by_epoch(experiment: Experiment, runs: Mapping[Task, Run]) -> Any:
    with canvas(figsize=(7.5, 4.2)) as figure:
        axes = figure.subplots()
        epochs = np.arange(1, experiment.epochs + 1)
        for encoding, colour in zip(experiment.encodings, colours(len(experiment.encodings)), strict=True):
            curves = np.array([[line["accuracy"] for line in runs[encoding, s].log()] for s in experiment.seeds])
            middle, sd = curves.mean(0), deviation(curves)
            axes.plot(
                epochs, middle, color=colour, label=encoding, lw=1.6, marker="o" if len(epochs) == 1 else None
            )
            axes.fill_between(epochs, middle - sd, np.minimum(middle + sd, 100), color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="epoch", ylabel="test accuracy (%)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
        return figure


def by_grid(experiment: Experiment, runs: Mapping[Task, Run]) -> Any:
    with canvas(figsize=(7.5, 4.2)) as figure:
        axes = figure.subplots()
        sides = [size // experiment.patch_size for size in experiment.sizes]
        for encoding, colour in zip(experiment.encodings, colours(len(experiment.encodings)), strict=True):
            results = [runs[encoding, seed].result() or {} for seed in experiment.seeds]
            curves = np.array([[r["accuracy_by_size"][str(size)] for size in experiment.sizes] for r in results])
            axes.errorbar(
                sides,
                curves.mean(0),
                deviation(curves),
                color=colour,
                label=encoding,
                lw=1.6,
                marker="o",
                ms=4,
                capsize=2,
            )
        axes.axvline(experiment.image_size // experiment.patch_size, color="#888", ls="--", lw=1, zorder=0)
        axes.set(xlabel="patches along each side of the image", ylabel="test accuracy (%)", xticks=sides)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
        return figure


def trained(experiment: Experiment, encoding: str, data: Data, run: Run) -> nn.Module:
    """The model with the last weights of a finished run."""
    model = build(experiment, encoding, experiment.seeds[0], data)
    return load_checkpoint(model, run.folder / "last.safetensors").eval()


@torch.no_grad()
def position_similarities(model: Any) -> Tensor | None:
    """Cosine similarities [height, width, height, width] of what is added to the patches before the first block.

    None if that says nothing about places: nothing is added, or the same to all patches.
    """
    grid = model.home_grid
    nothing = torch.zeros(1, grid.tokens, model.embed_dim)
    added = nothing
    for encoding in model.encodings:
        added = encoding.tokens(added, grid)
    rows = added[0, grid.prefix :]
    if torch.equal(rows, rows[:1].expand_as(rows)):
        return None
    rows = F.normalize(rows, dim=-1)
    return (rows @ rows.mT).view(grid.height, grid.width, grid.height, grid.width)


def draw_similarities(similarities: Tensor) -> Any:
    height, width = similarities.shape[:2]
    side = min(1.1, 8 / max(height, width))
    with canvas(figsize=(side * width + 1.2, side * height + 0.6)) as figure:
        panels = figure.subplots(height, width, squeeze=False, sharex=True, sharey=True)
        image = None
        for y in range(height):
            for x in range(width):
                axes = panels[y, x]
                image = axes.imshow(similarities[y, x].numpy(), vmin=-1, vmax=1, cmap="viridis")
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
        figure.supxlabel("column of the patch")
        figure.supylabel("row of the patch")
        figure.colorbar(image, ax=panels, label="cosine similarity", shrink=0.8)
        return figure


@torch.no_grad()
def bias_maps(model: Any, images: Tensor) -> dict[str, list[Tensor]]:
    """What each layer says about each offset: title -> one map [2 height - 1, 2 width - 1] per layer.

    Biases are averaged as the images' tokens make them; value terms, which are rows of features, show as norms.
    """
    grid = model.home_grid
    maps: dict[str, list[Tensor]] = {}
    layers = [
        [_Listener(module) for module in block.modules() if isinstance(module, PositionEncoding)]
        for block in model.blocks
    ]
    try:
        model(images)
    finally:
        for listener in itertools.chain(*layers):
            listener.stop()
    for layer in layers:
        for title in dict.fromkeys(title for listener in layer for title in listener.said):
            dense = sum(listener.said[title] for listener in layer if title in listener.said)
            maps.setdefault(title, []).append(by_offset(torch.as_tensor(dense), grid))
    return maps


class _Listener:
    """Notes what an encoding says in attention: one [queries, keys] tensor each for biases and values."""

    def __init__(self, encoding: PositionEncoding) -> None:
        self.encoding = encoding
        self.said: dict[str, Tensor] = {}
        biases, values = encoding.biases, encoding.values

        def heard_biases(q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Sequence[Any]:
            terms = tuple(biases(q, k, queries, keys))
            for term in terms:
                self._add("bias on the logits", term.dense().expand(*q.shape[:3], k.shape[2]).mean((0, 1)))
            return terms

        def heard_values(v: Tensor, queries: Grid, keys: Grid) -> Sequence[Any]:
            terms = tuple(values(v, queries, keys))
            for term in terms:
                if isinstance(term, BucketValues):
                    self._add(
                        "norm of the value row", term.table.norm(dim=-1).mean(0)[term.buckets.dense(v.device)]
                    )
            return terms

        encoding.biases, encoding.values = heard_biases, heard_values

    def _add(self, title: str, dense: Tensor) -> None:
        self.said[title] = self.said.get(title, torch.zeros_like(dense)) + dense

    def stop(self) -> None:
        del self.encoding.biases, self.encoding.values


def by_offset(dense: Tensor, grid: Grid) -> Tensor:
    """Means of [tokens, tokens] over the pairs of patches with one offset: [2 height - 1, 2 width - 1].

    >>> by_offset(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), Grid(1, 2)).tolist()
    [[2.0, 3.0, 3.0]]
    """
    dy, dx = grid.offsets(grid)
    rows, columns = 2 * grid.height - 1, 2 * grid.width - 1
    place = ((dy + grid.height - 1) * columns + dx + grid.width - 1).flatten()
    values = dense[grid.prefix :, grid.prefix :].flatten()
    total = torch.zeros(rows * columns, dtype=values.dtype).index_add_(0, place, values)
    return (total / torch.bincount(place, minlength=rows * columns)).view(rows, columns)


def draw_maps(maps: Mapping[str, Sequence[Tensor]]) -> Any:
    layers = max(len(row) for row in maps.values())
    with canvas(figsize=(1.6 * layers + 1.4, 1.9 * len(maps) + 0.4)) as figure:
        panels = figure.subplots(len(maps), layers, squeeze=False)
        for axes_row, (title, row) in zip(panels, maps.items(), strict=True):
            top = max(float(values.abs().max()) for values in row) or 1.0
            signed = any(float(values.min()) < 0 for values in row)
            style = (
                {"vmin": -top, "vmax": top, "cmap": "RdBu_r"}
                if signed
                else {"vmin": 0, "vmax": top, "cmap": "magma"}
            )
            image = None
            for layer, (axes, values) in enumerate(zip(axes_row, row, strict=False)):
                height, width = values.shape[0] // 2, values.shape[1] // 2
                edges = (-width - 0.5, width + 0.5, height + 0.5, -height - 0.5)
                image = axes.imshow(values.numpy(), extent=edges, **style)
                axes.set(title=f"layer {layer + 1}", xticks=[-width, 0, width], yticks=[-height, 0, height])
                axes.grid(False)
                axes.spines[["top", "right"]].set_visible(True)
            axes_row[0].set_ylabel("offset in rows")
            figure.colorbar(image, ax=axes_row, label=title, shrink=0.85)
        for axes in panels[-1]:
            axes.set_xlabel("offset in columns")
        return figure
