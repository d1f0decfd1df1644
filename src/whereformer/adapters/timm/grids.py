"""Where queries and keys are, in attentions that are not on the whole of their map."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whereformer.grid import Grid, Points

Stride = tuple[int, int]


def window(module: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Attention within windows of the module's `window_size`, as it is now."""
    size = module.window_size
    one = Grid(size, size) if isinstance(size, int) else Grid(*size)
    return one, one


def resolution(module: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Attention on the grid, or window, that the module was built for."""
    size = module.resolution
    one = Grid(size, size) if isinstance(size, int) else Grid(*size)
    return one, one


def between(module: nn.Module, grid: Grid, queries: Stride, keys: Stride) -> tuple[Grid, Grid]:
    """Queries and keys that stand for every so many rows and columns of a grid, the last ones cut short or not.

    The coarser lie among the finer, each in the middle of those it stands for; between two middles, in the first.
    """
    one, other = (_every(grid, stride) for stride in (queries, keys))
    if queries == keys:
        return one, one
    if queries < keys:
        return one, pooled(one, other.size, tuple(k // q for q, k in zip(queries, keys, strict=True)), module)
    return pooled(other, one.size, tuple(q // k for q, k in zip(queries, keys, strict=True)), module), other


def pooled(fine: Grid, size: Sequence[int], stride: Sequence[int], module: nn.Module) -> Grid:
    """So many tokens, one for each `stride` rows and columns of a grid, as patches of it: the middle ones."""
    device = next(module.parameters()).device
    return placed(
        fine, *(s * torch.arange(n, device=device) + (s - 1) // 2 for n, s in zip(size, stride, strict=True))
    )


def placed(fine: Grid, rows: Tensor, columns: Tensor) -> Grid:
    """The tokens at these rows and columns of a grid."""
    at = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
    last = torch.tensor(fine.size, device=at.device) - 1
    return Points(fine.height, fine.width, fine.prefix, at=at.minimum(last)[None])


def _every(grid: Grid, stride: Stride) -> Grid:
    return (
        grid if stride == (1, 1) else Grid(-(-grid.height // stride[0]), -(-grid.width // stride[1]), grid.prefix)
    )
