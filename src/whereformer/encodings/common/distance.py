"""Biases that are a function of how far apart query and key are."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from whereformer.errors import check_one_of
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid

Distance = Literal["euclidean", "manhattan", "raster"]
"""√(dy² + dx²); |dy| + |dx|; or |i − j|, patches being numbered row by row, as in a text."""


def check_distance(what: str, distance: str) -> None:
    """Raise unless `distance`, asked for by `what`, is one of `Distance`."""
    check_one_of(f"{what}: distance", distance, get_args(Distance))


def by_distance(
    function: Callable[[Tensor], Tensor], distance: Distance, queries: Grid, keys: Grid, q: Tensor
) -> OffsetBias | DenseBias:
    """The bias that is a function of the distance: from float32 [...] (float64 if q is) to [h, ...]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if distance == "raster":
        queries, keys = queries.as_row(q.device), keys.as_row(q.device)
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
