"""What absolute encodings share: sinusoids, tables along an axis, and how all of them are added."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.resample import resample_line, without_autocast


def add(x: Tensor, grid: Grid, rows: Tensor) -> Tensor:
    """Tokens with `rows`, [patches, dim] or one such for each image, added to the patches alone."""
    grid.check(x.shape[1], "x")
    return torch.cat([x[:, : grid.prefix], x[:, grid.prefix :] + rows.to(x.dtype)], 1)


def waves(position: Tensor, count: int, temperature: float) -> Tensor:
    """(sin ω_k p, cos ω_k p), ω_k = T^(−k / count): [..., count, 2], float32 or float64 as positions are."""
    exact = position if position.dtype == torch.float64 else position.float()
    exponents = torch.arange(count, device=position.device, dtype=exact.dtype) / count
    angles = exact[..., None] / temperature**exponents
    return torch.stack([angles.sin(), angles.cos()], -1)


Longer = Literal["refuse", "interpolate"]
"""What becomes of an axis with more patches than its table has rows."""


def first_rows(
    table: Tensor, length: int, longer: Longer, what: str, instead: str = ", or longer='interpolate'"
) -> Tensor:
    """The first `length` rows of a table [n, channels]; for a longer axis, all its rows stretched, or an error."""
    if longer == "refuse" and length > table.shape[0]:
        raise InputError(
            f"{what}: a table of {table.shape[0]} rows, but {length} patches along an axis,"
            f" expected fewer{instead}"
        )
    if longer == "refuse":
        return table[:length]
    longest: Any = torch.sym_max(length, table.shape[0])  # no branch on it: any length can be exported
    return resample_line(table, longest)[:length]


def spread(*tables: Tensor) -> list[Tensor]:
    """Tables [n, channels], one for each axis in turn, as images [*size, channels] that vary along their axis."""
    size = [table.shape[0] for table in tables]
    images = []
    for axis, table in enumerate(tables):
        shape = [1] * len(size)
        shape[axis] = size[axis]
        images.append(table.reshape(*shape, -1).expand(*size, -1))
    return images


def sized(
    grid: Grid, device: torch.device | None, offset: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(p + 1 + offset) / (size + 10⁻⁶) along each axis, at 1 for the last patch: [patches, axes]."""
    places = (grid.coords(device) + 1).to(dtype) + offset
    return torch.stack([p / (n + 1e-6) for p, n in zip(places.unbind(-1), grid.size, strict=True)], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b in float32, or in the dtype of `x` if that is wider, under autocast too."""
    with without_autocast(x.device):
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
