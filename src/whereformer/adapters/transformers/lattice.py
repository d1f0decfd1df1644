"""Object queries that lie on a lattice over the image.

Among queries the unit of offsets is a cell of the lattice. Towards the feature map it is a patch of the map: each
query is in the middle of its cell, most often between patches, so that what looks up whole offsets cannot serve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whereformer.adapters.behaviours import held
from whereformer.adapters.host import Attention, Block, Fixed, Stage
from whereformer.adapters.transformers.dispatch import dispatched
from whereformer.adapters.transformers.padding import Corners
from whereformer.errors import InputError
from whereformer.grid import Grid, Points
from whereformer.images import Images, Padded


def lattice(queries: Any, count: int) -> Grid:
    """(rows, columns) as a grid of so many object queries."""
    grid = pair_as_grid("queries", queries)
    if grid.tokens != count:
        raise InputError(f"queries={queries!r} are {grid.tokens}, but the model has {count} object queries")
    return grid


def pair_as_grid(name: str, value: Any) -> Grid:
    """(rows, columns), or a grid that says no more than these."""
    pair = value.size if isinstance(value, Grid) else value
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2 or getattr(value, "prefix", 0):
        raise InputError(f"{name}={value!r}, expected (rows, columns)")
    return Grid(*pair)


def decoder_stages(layers: Sequence[Any], dim: int, heads: int, queries: Grid, home: Grid) -> list[Stage]:
    """Of a decoder's layers, the attentions among object queries, and those from them to the feature map.

    In Conditional DETR's cross-attention queries and keys carry places beside what they hold. They have twice as
    many features as values, so that no encoding can speak of both.
    """
    beside = any(hasattr(layer.encoder_attn, "q_pos_sine_proj") for layer in layers)
    width, limits = (2 * dim, {"takes": ("rotations", "biases")}) if beside else (dim, {})
    among, across = (partial(where, queries=queries) for where in (among_queries, to_the_map))
    itself = [dispatched(layer.self_attn, dim, heads, grids=among) for layer in layers]
    the_map = [dispatched(layer.encoder_attn, width, heads, grids=across, **limits) for layer in layers]
    return [_stage(dim, heads, queries, itself), _stage(width, heads, home, the_map)]


def _stage(dim: int, heads: int, home: Grid, attentions: Sequence[Attention]) -> Stage:
    blocks = [Block(attention.module, [attention]) for attention in attentions]
    return Stage(dim, heads, home, blocks, Fixed(home))


def among_queries(attention: nn.Module, grid: Grid, *, queries: Grid) -> tuple[Grid, Grid]:
    return queries, queries


def to_the_map(attention: Any, grid: Grid, *, queries: Grid) -> tuple[Any, Any]:
    """Object queries in the middles of their cells, and patches; image by image for what goes by their sizes."""
    if not isinstance(grid, Corners):
        return over_all_of(queries, grid, next(attention.parameters()).device), grid
    if any(encoding.by_size for encoding in held(attention)):
        images = grid.images()
        if not isinstance(images, Padded):
            return over_all_of(queries, images, grid.mask.device), images
        return Rows(tuple(over_all_of(queries, one, grid.mask.device) for one in images.grids)), images
    return over(queries, grid.whole, *_extents(grid.mask)), grid.whole


def over_all_of(queries: Grid, image: Grid, device: torch.device) -> Points:
    """The cells of a lattice over a whole image."""
    start, size = torch.tensor([[0, 0], image.size], device=device)
    return over(queries, image, start[None], size[None])


def over(queries: Grid, image: Grid, start: Tensor, size: Tensor) -> Points:
    """The middles of the cells of a lattice over a part of an image, in patches of the image.

    Args:
        start, size: [batch or 1, 2], int64: the first patch of the part, and how many it has in each direction.

    >>> over(Grid(1, 2), Grid(3, 4), torch.tensor([[0, 0]]), torch.tensor([[3, 4]])).coords().tolist()
    [[[1.0, 0.5], [1.0, 2.5]]]
    """
    cells = torch.tensor(queries.size, device=start.device)
    middles = (queries.coords(start.device) + 0.5) * size[:, None] / cells - 0.5
    return Points(image.height, image.width, at=start[:, None] + middles)


def _extents(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each image of a mask [batch, height, width] begins, and its size: (rows, columns), [batch, 2] each."""
    lines = [mask.any(2).int(), mask.any(1).int()]  # argmax takes no bool
    first = torch.stack([line.argmax(1) for line in lines], 1)
    behind = torch.stack([line.shape[1] - line.flip(1).argmax(1) for line in lines], 1)
    return first, behind - first


@dataclass(frozen=True)
class Rows(Images):
    """One image in each row of a batch, all of as many tokens."""

    @property
    def tokens(self) -> int:
        return self.grids[0].tokens

    def parts(self, device: torch.device | None = None) -> list[tuple[slice, Tensor]]:
        every = torch.arange(self.tokens, device=device)
        return [(slice(row, row + 1), every) for row in range(len(self.grids))]
