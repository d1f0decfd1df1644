"""What the content-dependent relative encodings share: tables indexed by offsets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import check_count, check_one_of
from whereformer.forms import AxisBias, BucketBias
from whereformer.grid import Grid
from whereformer.index import Buckets, Clip, Separable
from whereformer.resample import resample_line

Offsets = Literal["product", "raster"]
"""(dy, dx), or the offset of two patches' numbers in row-by-row order."""

Place = Callable[[Tensor, Tensor, int, int], Tensor]
"""At which row of a table an offset is: of (query, key, patches of the queries' axis, of the keys')."""


def check_offsets(what: str, offsets: str, clip: int | None) -> None:
    """Raise unless the two options make sense; `what` asks for them."""
    check_one_of(f"{what}: offsets", offsets, get_args(Offsets))
    if clip is not None:
        check_count(f"{what}: clip", clip)


def clipped(offsets: Offsets, clip: int, queries: Grid, keys: Grid) -> Buckets:
    """Buckets of clipped offsets: (2 clip + 1)² of (dy, dx), or 2 clip + 1 of numbers in row-by-row order."""
    if offsets == "product":
        return Buckets(Separable(Clip(clip), Clip(clip)), queries, keys)
    return Buckets(Separable(None, Clip(clip)), queries.as_row(), keys.as_row())


@dataclass(frozen=True)
class Exact:
    """The index of an axis of so many patches on which every offset has a place of its own."""

    patches: int

    @property
    def reach(self) -> int:
        return self.patches - 1

    @property
    def far(self) -> int:
        return self.reach

    def __call__(self, offset: Tensor) -> Tensor:
        return offset


def mirrored(table: Tensor, offsets: int) -> Tensor:
    """A table [..., rows, d] to be read at −offset: its first `offsets` rows the other way round."""
    return torch.cat([table[..., :offsets, :].flip(-2), table[..., offsets:, :]], -2)


def resized(table: Tensor, patches: int) -> Tensor:
    """A table [2 n − 1, d] of the offsets on an axis of n patches, for an axis of another length: linearly."""
    return resample_line(table, 2 * patches - 1)


def fitted(tables: Sequence[Tensor], queries: Grid, keys: Grid) -> list[Tensor]:
    """Tables [2 n − 1, d], one for each axis in turn, resized to the longer of the two grids' axes."""
    sizes = (max(n, m) for n, m in zip(queries.size, keys.size, strict=True))
    return [resized(table, n) for table, n in zip(tables, sizes, strict=True)]


def along_row(scores: Tensor, patches: int, queries: Grid, keys: Grid) -> BucketBias:
    """scores [b, h, i, 2 patches − 1] of every offset on two grids of one row; 0 for pairs with a prefix token."""
    return BucketBias(F.pad(scores, (0, 1)), Buckets(Separable(None, Exact(patches)), queries, keys))


def key_minus_query(query: Tensor, key: Tensor, queries: int, keys: int) -> Tensor:
    return key - query + max(queries, keys) - 1


def query_minus_key(query: Tensor, key: Tensor, queries: int, keys: int) -> Tensor:
    return query - key + max(queries, keys) - 1


def per_axis(
    q: Sequence[Tensor], tables: Sequence[Tensor], queries: Grid, keys: Grid, place: Place = key_minus_query
) -> AxisBias:
    """bias_ij = q_i·rows[place(y_i, y_j)] + q_i·columns[place(x_i, x_j)]; 0 for pairs with a prefix token.

    Scores come before they are placed, so that no table of pairs is made.

    Args:
        q: two of [b, h, tokens, features]: what reads the table of rows, and that of columns.
        tables: [1 or h, places, features] or [places, features], for rows and for columns.
        place: at which row of a table an offset is; where it is negative or too large, the first or last.
    """
    for grid in (queries, keys):
        grid.check_whole()
    at = queries.coords(q[0].device)
    found = []
    for axis, (x, table) in enumerate(zip(q, tables, strict=True)):
        n, m = queries.size[axis], keys.size[axis]
        index = place(at[..., axis, None], torch.arange(m, device=x.device), n, m)
        index = index.clamp(0, table.shape[-2] - 1).unsqueeze(-3)
        scores = x[..., queries.prefix :, :] @ table.to(x.dtype).mT
        *axes, places = torch.broadcast_shapes(scores.shape, (*index.shape[:-1], 1))
        placed = scores.expand(*axes, places).gather(-1, index.expand(*axes, -1))
        found.append(F.pad(placed, (0, 0, queries.prefix, 0)))
    return AxisBias(found[0], found[1], keys)


def near(within: Callable[..., Tensor], queries: Grid, keys: Grid, device: torch.device | None = None) -> Tensor:
    """A mask for attention: pairs of patches whose offsets are `within`, and all pairs with a prefix token.

    Returns:
        [queries.tokens, keys.tokens], bool; from `Points` [b or 1, 1, queries.tokens, keys.tokens].
    """
    patches = within(*torch.broadcast_tensors(*queries.offsets(keys, device)))
    allowed = F.pad(queries.flatten(keys, patches), (keys.prefix, 0, queries.prefix, 0), value=True)
    return allowed if allowed.ndim == 2 else allowed.unsqueeze(-3)
