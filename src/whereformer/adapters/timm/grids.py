"""Where queries and keys are, in attentions that are not on the whole of their map."""

from typing import Any

import torch

from whereformer.grid import Grid, Points


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


def pooled(fine: Grid, size: tuple[int, int], stride: tuple[int, int], device: torch.device) -> Grid:
    """Tokens made of every so many rows and columns of a grid, as patches of it: those in their middles.

    Args:
        size: how many tokens there are along each axis.
        stride: from one to the next. In the middle between two patches, the first of them is taken.
    """
    return placed(
        fine, *(s * torch.arange(n, device=device) + (s - 1) // 2 for n, s in zip(size, stride, strict=True))
    )


def placed(fine: Grid, rows: torch.Tensor, columns: torch.Tensor) -> Grid:
    """The tokens at these rows and columns of a grid; the grid itself if these are all."""
    if (len(rows), len(columns)) == fine.size:
        return fine
    at = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
    limit = torch.tensor(fine.size, device=at.device) - 1
    return Points(fine.height, fine.width, fine.prefix, at=at.minimum(limit)[None])


def device_of(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
