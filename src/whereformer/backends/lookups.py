"""What forms say about pairs of tokens as lookups: a bucket for each offset, and an entry for each bucket."""

import math
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from whereformer.backends.kernel import BY_KEY, BY_QUERY, SHARED, VALUES
from whereformer.forms import AxisBias, BucketBias, BucketValues, OffsetBias, Scores
from whereformer.grid import Grid
from whereformer.index import Buckets, Mapping

Form = BucketBias | OffsetBias | AxisBias | BucketValues
"""What can be looked up."""

KEPT = 64
"""How many maps are kept."""


class Lookup(NamedTuple):
    """A lookup as the header has it.

    Args:
        kind: of the header's four.
        by_table: 1 if the entries are a table that q or k reads.
        absolute: 1 if the map has the buckets of the keys' places, not of offsets.
        mirrored: 1 if offsets are key − query.
        prefix: the bucket of pairs with a prefix token; −1: they get nothing.
        at: the map, int32, contiguous.
        entries: contiguous: a table [1 or h, d, buckets], scores [b, h, tokens, buckets] or
            [1 or h, buckets], or values [1 or h, buckets, d].
    """

    kind: int
    by_table: int
    absolute: int
    mirrored: int
    prefix: int
    at: Tensor
    entries: Tensor

    @property
    def fields(self) -> tuple[int, ...]:
        """In the order of `kernel.FIELDS`."""
        return (self.kind, self.by_table, self.absolute, self.mirrored, self.prefix)


def grids(form: Form) -> tuple[Grid, Grid] | None:
    """The grids of queries and keys between which a form takes offsets; None if it takes none."""
    match form:
        case BucketBias(buckets=buckets, side="key"):
            return buckets.keys, buckets.queries
        case BucketBias(buckets=buckets) | BucketValues(buckets=buckets):
            return buckets.queries, buckets.keys
        case OffsetBias():
            return form.queries, form.keys
        case AxisBias():
            return None


def count(form: object) -> int:
    """How many lookups a form makes, at most."""
    return 2 if isinstance(form, AxisBias) else int(isinstance(form, Form))


def of(form: Form, q: Tensor, k: Tensor, dtype: torch.dtype, *, turned: bool) -> Iterator[Lookup]:
    """A form as lookups.

    Args:
        q, k: what attention got: [b, h, tokens, d].
        dtype: of the entries.
        turned: whether the kernel gets others, so that it cannot read tables by them.
    """
    match form:
        case BucketBias(scores, buckets, side):
            reader, kind, mirrored = (q, BY_QUERY, 0) if side == "query" else (k, BY_KEY, 1)
            at, prefix = _buckets(buckets, like=q)
            if isinstance(scores, Scores) and scores.reader is reader and not turned:
                yield Lookup(kind, 1, 0, mirrored, prefix, at, scores.table.to(dtype).contiguous())
                return
            scores = form.made().to(dtype)
            if all(isinstance(n, int) and n == 1 for n in (*scores.shape[:-3], scores.shape[-2])):
                kind, scores = SHARED, scores.flatten(0, -2)
            else:
                scores = scores.expand(*reader.shape[:-1], -1)
            yield Lookup(kind, 0, 0, mirrored, prefix, at, scores.contiguous())
        case OffsetBias(table, queries, keys):
            entries = table.flatten(1).to(dtype).contiguous()
            yield Lookup(SHARED, 0, 0, 0, -1, _map(None, queries, keys, q), entries)
        case AxisBias(rows, columns, keys):
            y, x = torch.meshgrid(*(torch.arange(n, device=q.device) for n in keys.size), indexing="ij")
            for at, scores in ((y, rows), (x, columns)):
                entries = scores.to(dtype).expand(*q.shape[:-1], -1).contiguous()
                yield Lookup(BY_QUERY, 0, 1, 0, -1, at.int().contiguous(), entries)
        case BucketValues(table, buckets):
            at, prefix = _buckets(buckets, like=q)
            yield Lookup(VALUES, 0, 0, 0, prefix, at, table.to(dtype).contiguous())


def _buckets(buckets: Buckets, like: Tensor) -> tuple[Tensor, int]:
    """The map, and the bucket of pairs with a prefix token."""
    mapping, queries, keys = buckets.mapping, buckets.queries, buckets.keys
    return _map(mapping, queries, keys, like), mapping.count if queries.prefix or keys.prefix else -1


def _map(mapping: Mapping | None, queries: Grid, keys: Grid, like: Tensor) -> Tensor:
    """The bucket of every offset, int32; without a mapping each offset is a bucket of its own.

    Plain tensors of plain calls are kept for the next; graphs and tensors that only pretend make their own.
    """
    if torch.compiler.is_compiling() or type(like) is not Tensor or not isinstance(mapping, Hashable):
        return _made(mapping, queries, keys, like.device)
    return _kept(mapping, queries, keys, like.device)


@lru_cache(KEPT)
@torch.inference_mode(False)  # or it could not be used in training afterwards
def _kept(mapping: Mapping | None, queries: Grid, keys: Grid, device: torch.device) -> Tensor:
    return _made(mapping, queries, keys, device)


def _made(mapping: Mapping | None, queries: Grid, keys: Grid, device: torch.device) -> Tensor:
    if mapping is None:
        sizes = [n + m - 1 for n, m in zip(queries.size, keys.size, strict=True)]
        return torch.arange(math.prod(sizes), dtype=torch.int32, device=device).reshape(sizes)
    return mapping(*queries.span(keys, device).unbind(-1)).int().contiguous()
