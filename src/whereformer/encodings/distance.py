"""Biases that are a function of how far apart query and key are."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from whereformer.errors import InputError
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid, Points

Distance = Literal["euclidean", "manhattan", "raster"]
"""√(dy² + dx²); |dy| + |dx|; or |i − j|, patches being numbered row by row, as in a text."""


def check_distance(what: str, distance: str) -> None:
    """Raise unless `distance`, asked for by `what`, is one of `Distance`."""
    if distance not in get_args(Distance):
        raise InputError(f"{what}: distance={distance!r}, expected one of {list(get_args(Distance))}")


def by_distance(
    function: Callable[[Tensor], Tensor], distance: Distance, queries: Grid, keys: Grid, q: Tensor
) -> OffsetBias | DenseBias:
    """The bias that is a function of the distance: from float32 [...] (float64 if q is) to [h, ...]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if distance == "raster":
        queries, keys = as_sequence(queries, q.device), as_sequence(keys, q.device)
    order = 1 if distance == "manhattan" else 2
    return OffsetBias.of(
        lambda offsets: function(torch.linalg.vector_norm(offsets.to(dtype), order, -1)), queries, keys, q.device
    )


def farthest(distance: Distance, queries: Grid, keys: Grid, like: Tensor) -> Tensor:
    """The largest distance between a patch of one whole grid and one of the other: a number, of `like`'s dtype."""
    if distance == "raster":
        reach = [torch.sym_max(math.prod(queries.size), math.prod(keys.size)) - 1]
    else:
        reach = [torch.sym_max(n, m) - 1 for n, m in zip(queries.size, keys.size, strict=True)]
    if distance == "manhattan":
        return like.new_full((), sum(reach))
    return like.new_full((), sum(r * r for r in reach)).sqrt()


def as_sequence(grid: Grid, device: torch.device | None = None) -> Grid:
    """The same tokens as one row, patches numbered row by row."""
    row = Grid(1, math.prod(grid.size), grid.prefix)
    if not isinstance(grid, Points):
        return row
    number = grid.raster(device)
    return Points(row.height, row.width, row.prefix, at=torch.stack([torch.zeros_like(number), number], -1))
