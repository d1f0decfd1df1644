"""What the content-dependent relative encodings share: tables indexed by offsets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import check_count, check_one_of
from whereformer.forms import AxisBias, BucketBias, Scores, Side
from whereformer.grid import Grid
from whereformer.index import Buckets, Clip, Separable
from whereformer.kept import kept, watched
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


def read(reader: Tensor, table: Tensor, buckets: Buckets, side: Side = "query") -> BucketBias:
    """reader · table, a table [..., buckets, d] of offsets alone; 0 for pairs with a prefix token."""
    extra = buckets.count - buckets.mapping.count
    table = table.mT if table.ndim == 3 else table.mT[None]
    return BucketBias(Scores(reader, table, extra=extra), buckets, side)


def read_too(vector: Tensor, bias: BucketBias) -> BucketBias:
    """What a vector [1 or h, d] reads of the table that `bias` reads: the same for all queries."""
    assert isinstance(bias.scores, Scores)
    table = bias.scores.scaled
    return BucketBias((vector.to(table.dtype)[:, None] @ table)[None], bias.buckets, bias.side)


def along_row(queries: Grid, keys: Grid) -> Buckets:
    """Every offset on two grids of one row: 2 n − 1 buckets for the longer one's n patches."""
    return Buckets(Separable(None, Exact(max(queries.width, keys.width))), queries, keys)


def key_minus_query(query: Tensor, key: Tensor, queries: int, keys: int) -> Tensor:
    return key - query + max(queries, keys) - 1


def query_minus_key(query: Tensor, key: Tensor, queries: int, keys: int) -> Tensor:
    return query - key + max(queries, keys) - 1


def per_axis(
    q: Tensor,
    tables: Sequence[Tensor],
    queries: Grid,
    keys: Grid,
    place: Place = key_minus_query,
    vector: Tensor | None = None,
) -> tuple[AxisBias | BucketBias, ...]:
    """bias_ij = q_i·rows[place(y_i, y_j)] + q_i·columns[place(x_i, x_j)]; 0 for pairs with a prefix token.

    Scores come before they are placed, so that no table of pairs is made. On one grid an offset says the place;
    on grids of two sizes, or with patches that are missing, each query's scores are placed by themselves.

    Args:
        q: [b, h, tokens, d]: what reads both tables.
        tables: [1 or h, places, d] or [places, d], for rows and for columns.
        place: at which row of a table an offset is; where it is negative or too large, the first or last. On axes
            of one length it is a function of the offset.
        vector: [1 or h, d], if each q_i is to read with it added.
    """
    if queries.regular and keys.regular and queries.size == keys.size:
        rows, columns = (_by_offset(t, n, place) for t, n in zip(tables, queries.size, strict=True))
        by_row = Buckets(Separable(Exact(queries.height), None), queries, keys)
        by_column = Buckets(Separable(None, Exact(queries.width)), queries, keys)
        found = read(q, rows, by_row), read(q, columns, by_column)
        return found if vector is None else (*found, *(read_too(vector, bias) for bias in found))
    for grid in (queries, keys):
        grid.check_whole()
    if vector is not None:
        q = q + vector.to(q.dtype)[:, None]
    at = queries.coords(q.device)
    found = []
    for axis, table in enumerate(tables):
        n, m = queries.size[axis], keys.size[axis]
        index = place(at[..., axis, None], torch.arange(m, device=q.device), n, m)
        index = index.clamp(0, table.shape[-2] - 1).unsqueeze(-3)
        scores = q[..., queries.prefix :, :] @ table.to(q.dtype).mT
        *axes, places = torch.broadcast_shapes(scores.shape, (*index.shape[:-1], 1))
        placed = scores.expand(*axes, places).gather(-1, index.expand(*axes, -1))
        found.append(F.pad(placed, (0, 0, queries.prefix, 0)))
    return (AxisBias(found[0], found[1], keys),)


def _by_offset(table: Tensor, patches: int, place: Place) -> Tensor:
    """Rows of a table at all offsets, query − key, on an axis: [..., 2 patches − 1, d]."""
    rows, device = table.shape[-2], table.device
    make = partial(_rows_by_offset, patches, place, rows, device)
    own = not isinstance(place, FunctionType) or place.__closure__  # of an encoding, which is not to be kept
    at = make() if own or device.type != "cpu" else kept((make.func, *make.args), make, lambda _: rows)
    return table if at is None else table.index_select(-2, at)


def _rows_by_offset(patches: int, place: Place, rows: int, device: torch.device) -> Tensor | None:
    """The row of each offset, or None if these are all rows in order."""
    offset = torch.arange(1 - patches, patches, device=device)
    at = place(offset.clamp(min=0), (-offset).clamp(min=0), patches, patches).clamp(0, rows - 1)
    in_order = device.type == "cpu" and not watched() and torch.equal(at, torch.arange(rows))
    return None if in_order else at


def near(within: Callable[..., Tensor], queries: Grid, keys: Grid, device: torch.device | None = None) -> Tensor:
    """A mask for attention: pairs of patches whose offsets are `within`, and all pairs with a prefix token.

    Returns:
        [queries.tokens, keys.tokens], bool; from `Points` [b or 1, 1, queries.tokens, keys.tokens].
    """
    patches = within(*torch.broadcast_tensors(*queries.offsets(keys, device)))
    allowed = F.pad(queries.flatten(keys, patches), (keys.prefix, 0, queries.prefix, 0), value=True)
    return allowed if allowed.ndim == 2 else allowed.unsqueeze(-3)
