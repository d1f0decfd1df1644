"""What forms say about pairs of tokens as lookups: a bucket for each offset, and an entry for each bucket."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.backends.kernel import BY_BUCKET, BY_FEATURE, BY_KEY, BY_QUERY, SHARED, VALUES
from whereformer.forms import AxisBias, BucketBias, BucketValues, OffsetBias, Scores
from whereformer.grid import Grid
from whereformer.index import Mapping
from whereformer.kept import kept

Form = BucketBias | OffsetBias | AxisBias | BucketValues
"""What can be looked up."""


class Lookup(NamedTuple):
    """A lookup as the header has it.

    Args:
        kind: of the header's four.
        by_table: `kernel.BY_FEATURE` or `BY_BUCKET` if the entries are a table that q or k reads, else 0.
        absolute: 1 if the map has the buckets of the keys' places, not of offsets.
        mirrored: 1 if offsets are key − query.
        prefix: the bucket of pairs with a prefix token; −1: they get nothing.
        at: the map, int32, contiguous.
        entries: contiguous: a table [1 or h, d, buckets] or [1 or h, buckets, d], scores
            [b, h, tokens, buckets] or [1 or h, buckets], or values [1 or h, buckets, d].
        scale: of a table, by which it is multiplied where it is read.
    """

    kind: int
    by_table: int
    absolute: int
    mirrored: int
    prefix: int
    at: Tensor
    entries: Tensor
    scale: float = 1.0

    @property
    def fields(self) -> tuple[int, ...]:
        """In the order of `kernel.FIELDS`."""
        return self[:5]  # type: ignore[return-value]


def grids(form: BucketBias | OffsetBias | BucketValues) -> tuple[Grid, Grid]:
    """The grids of queries and keys between which a form takes offsets."""
    if isinstance(form, OffsetBias):
        return form.queries, form.keys
    buckets = form.buckets
    if isinstance(form, BucketBias) and form.side == "key":
        return buckets.keys, buckets.queries
    return buckets.queries, buckets.keys


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, faster where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


Placed = tuple[Tensor, int]
"""The bucket of every offset, int32, and that of pairs with a prefix token, or -1."""


def of(forms: Sequence[Form], q: Tensor, k: Tensor, dtype: torch.dtype, *, turned: bool) -> list[Lookup]:
    """Forms as lookups.

    Args:
        q, k: what attention got: [b, h, tokens, d].
        dtype: of the entries.
        turned: whether the kernel gets others, so that it cannot read tables by them.
    """
    known: list[tuple[Mapping | None, Grid, Grid, Placed]] = []  # most forms of one attention lie on the same map

    def placed(mapping: Mapping | None, queries: Grid, keys: Grid) -> Placed:
        for its, ours, theirs, found in known:
            if its is mapping and ours is queries and theirs is keys:
                return found
        found = _placed(mapping, queries, keys, q)
        known.append((mapping, queries, keys, found))
        return found

    return [lookup for form in forms for lookup in _of(form, q, k, dtype, turned, placed)]


def _of(
    form: Form,
    q: Tensor,
    k: Tensor,
    dtype: torch.dtype,
    turned: bool,
    placed: Callable[[Mapping | None, Grid, Grid], Placed],
) -> Iterator[Lookup]:
    match form:
        case BucketBias(scores, buckets, side):
            reader, kind, mirrored = (q, BY_QUERY, 0) if side == "query" else (k, BY_KEY, 1)
            at, prefix = placed(buckets.mapping, buckets.queries, buckets.keys)
            if isinstance(scores, Scores) and scores.reader is reader and not turned:
                table, lies = as_dtype(scores.table, dtype), BY_FEATURE
                if (missing := buckets.mapping.count - table.shape[-1]) > 0:  # those whose scores are 0
                    table = F.pad(table, (0, missing))
                if prefix >= table.shape[-1]:
                    prefix = -1
                if not table.is_contiguous() and table.mT.is_contiguous():  # as parameters often lie
                    table, lies = table.mT, BY_BUCKET
                yield Lookup(kind, lies, 0, mirrored, prefix, at, table.contiguous(), scores.scale)
                return
            scores = as_dtype(form.made(), dtype)
            if all(isinstance(n, int) and n == 1 for n in (*scores.shape[:-3], scores.shape[-2])):
                kind, scores = SHARED, scores.flatten(0, -2)
            else:
                scores = scores.expand(*reader.shape[:-1], -1)
            yield Lookup(kind, 0, 0, mirrored, prefix, at, scores.contiguous())
        case OffsetBias(table, queries, keys):
            at, prefix = placed(None, queries, keys)
            yield Lookup(SHARED, 0, 0, 0, prefix, at, as_dtype(table.flatten(1), dtype).contiguous())
        case AxisBias(rows, columns, keys):
            y, x = torch.meshgrid(*(torch.arange(n, device=q.device) for n in keys.size), indexing="ij")
            for at, scores in ((y, rows), (x, columns)):
                entries = scores.to(dtype).expand(*q.shape[:-1], -1).contiguous()
                yield Lookup(BY_QUERY, 0, 1, 0, -1, at.int().contiguous(), entries)
        case BucketValues(table, buckets):
            at, prefix = placed(buckets.mapping, buckets.queries, buckets.keys)
            yield Lookup(VALUES, 0, 0, 0, prefix, at, as_dtype(table, dtype).contiguous())


def _placed(mapping: Mapping | None, queries: Grid, keys: Grid, like: Tensor) -> Placed:
    """Without a mapping each offset is a bucket of its own."""
    device = like.device
    if type(like) is not Tensor or not isinstance(mapping, Hashable):
        return _made(mapping, queries, keys, device)
    key = (_made, mapping, queries, keys, device)
    return kept(key, lambda: _made(mapping, queries, keys, device), lambda made: made[0].numel())


def _made(mapping: Mapping | None, queries: Grid, keys: Grid, device: torch.device) -> Placed:
    if mapping is None:
        sizes = [n + m - 1 for n, m in zip(queries.size, keys.size, strict=True)]
        return torch.arange(math.prod(sizes), dtype=torch.int32, device=device).reshape(sizes), -1
    at = mapping(*queries.span(keys, device).unbind(-1)).int().contiguous()
    return at, mapping.count if queries.prefix or keys.prefix else -1
