"""Calls of the kernel, of random numbers, where it is there; and what they may be off by."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import emulated
from whereformer.backends import kernel
from whereformer.backends.kernel import BY_KEY, BY_QUERY, SHARED, VALUES, Arguments

compiled = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing() or "-")


@dataclass(frozen=True)
class Case:
    """A call of the kernel, of random numbers.

    Args:
        queries, keys: (prefix, frames, height, width).
        lookups: names of `LOOKUPS`, each with its number of buckets.
        pairs: of features that turn.
        mask: a kind of `MASKS`.
        strided: whether q, k and v are parts of one tensor, and the output's gradient is transposed.
    """

    queries: tuple[int, int, int, int] = (1, 1, 3, 4)
    keys: tuple[int, int, int, int] | None = None
    lookups: tuple[tuple[str, int], ...] = ()
    batch: int = 2
    heads: int = 3
    features: int = 8
    value_features: int | None = None
    pairs: int = 0
    half: bool = False
    per_image: bool = False
    mask: str = "none"
    strided: bool = False
    size: float = 1.0


LOOKUPS: dict[str, tuple[int, int, int, int, str]] = {
    "query": (BY_QUERY, 1, 0, 0, "1 d n"),
    "query per head": (BY_QUERY, 1, 0, 0, "h d n"),
    "query by bucket": (BY_QUERY, 2, 0, 0, "1 n d"),
    "query scores": (BY_QUERY, 0, 0, 0, "b h i n"),
    "query mirrored": (BY_QUERY, 1, 0, 1, "1 d n"),
    "key": (BY_KEY, 1, 0, 1, "1 d n"),
    "key per head": (BY_KEY, 1, 0, 1, "h d n"),
    "key by bucket": (BY_KEY, 2, 0, 1, "h n d"),
    "key scores": (BY_KEY, 0, 0, 1, "b h j n"),
    "key not mirrored": (BY_KEY, 1, 0, 0, "1 d n"),
    "places": (BY_QUERY, 0, 1, 0, "b h i n"),
    "places by table": (BY_QUERY, 1, 1, 0, "h d n"),
    "shared": (SHARED, 0, 0, 0, "1 n"),
    "shared per head": (SHARED, 0, 0, 0, "h n"),
    "shared mirrored": (SHARED, 0, 0, 1, "h n"),
    "values": (VALUES, 0, 0, 0, "1 n v"),
    "values per head": (VALUES, 0, 0, 0, "h n v"),
}
"""kind, by_table, absolute, mirrored, and the shape of the entries."""

MASKS = ("none", "boolean", "padding", "additive")


def made(case: Case, dtype: torch.dtype = torch.float32) -> Arguments:
    queries, keys = case.queries, case.keys or case.queries
    there, here = (prefix + math.prod(size) for prefix, *size in (keys, queries))
    values = case.features if case.value_features is None else case.value_features
    sizes = {"b": case.batch, "h": case.heads, "i": here, "j": there, "d": case.features, "v": values, "1": 1}
    fields, maps, entries = [], [], []
    scales = [(1.0, 0.7)[n % 2] for n in range(len(case.lookups))]
    for n, (name, buckets) in enumerate(case.lookups):
        kind, by_table, absolute, mirrored, shape = LOOKUPS[name]
        prefix = buckets - 1 if n % 2 == 0 and buckets > 1 else -1
        patches = keys[1:] if absolute else [i + j - 1 for i, j in zip(queries[1:], keys[1:], strict=True)]
        fields += [kind, by_table, absolute, mirrored, prefix]
        most = max(buckets - (prefix >= 0), 1)  # the bucket of prefix tokens is theirs alone
        maps.append(torch.randint(most, tuple(patches), dtype=torch.int32))
        axes = [buckets if axis == "n" else sizes[axis] for axis in shape.split()]
        entries.append(torch.randn(axes) * (case.features**-0.5 if by_table else 1))
    q, k, v = (
        torch.randn(case.batch, case.heads, tokens, features) * case.size
        for tokens, features in ((here, case.features), (there, case.features), (there, values))
    )
    if case.strided:  # as a projection to all three gives them
        assert queries == keys
        q, k, v = torch.randn(case.batch, here, 3, case.heads, case.features).permute(2, 0, 3, 1, 4)
    turns: list[Tensor] = []
    if case.pairs:
        for tokens, (prefix, *_) in ((here, queries), (there, keys)):
            angles = torch.randn(case.batch if case.per_image else 1, case.heads, tokens - prefix, case.pairs)
            turns += [angles.cos() * 1.1, angles.sin() * 1.1]
    allowed, added = masked(case.mask, case.batch, case.heads, here, there)
    tensors = (x.to(dtype) for x in (q, k, v))
    return Arguments(
        *tensors, queries, keys, case.features, case.half, turns, fields, maps, entries, allowed, added, scales
    )


def masked(kind: str, b: int, h: int, i: int, j: int) -> tuple[Tensor | None, Tensor | None]:
    match kind:
        case "none":
            return None, None
        case "padding":
            allowed = torch.ones(b, 1, 1, j, dtype=torch.bool)
            allowed[-1, ..., j // 2 :] = False
            return allowed.expand(b, h, i, j), None
        case "boolean":
            allowed = torch.rand(b, h, i, j) > 0.4
            allowed[0, 0, i // 2] = False
            return allowed, None
        case "additive":
            allowed = (torch.rand(1, h, i, j) > 0.4).expand(b, h, i, j)
            added = torch.randn(b, 1, i, j).masked_fill(torch.rand(b, 1, i, j) > 0.9, -torch.inf)
            return allowed & (added > -torch.inf), added.expand(b, h, i, j)
    raise AssertionError(kind)


QKV = (("query", 50), ("key", 50), ("values", 50))
CASES: dict[str, Case] = {
    "nothing": Case(),
    "nothing, no prefix": Case((0, 1, 5, 4)),
    "one token": Case((0, 1, 1, 1), lookups=QKV),
    "one prefix token more": Case((1, 1, 1, 1), lookups=QKV),
    "a row": Case((2, 1, 1, 19), lookups=QKV),
    "a column": Case((1, 1, 19, 1), lookups=QKV),
    "odd": Case((1, 1, 17, 23), lookups=QKV, batch=1, heads=2),
    "14 x 14": Case((1, 1, 14, 14), lookups=QKV, batch=1, heads=2, features=64),
    "16 columns": Case((0, 1, 3, 16), lookups=QKV),
    "33 columns": Case((2, 1, 2, 33), lookups=QKV),
    "a single key": Case((1, 1, 3, 4), (0, 1, 1, 1), lookups=QKV),
    "a single prefix key": Case((0, 1, 3, 4), (1, 1, 1, 1), lookups=QKV),
    "two grids": Case((1, 1, 3, 5), (0, 1, 7, 4), lookups=(*QKV, ("shared per head", 9), ("places", 7))),
    "two grids, more prefix": Case((0, 1, 6, 2), (2, 1, 3, 18), lookups=(*QKV, ("shared mirrored", 9))),
    "a video": Case((1, 3, 2, 4), lookups=QKV),
    "two videos": Case((1, 2, 3, 4), (0, 3, 2, 5), lookups=QKV),
    "one bucket": Case(lookups=(("query", 1), ("key", 1), ("values", 1), ("shared", 1))),
    "many buckets": Case((0, 1, 6, 7), lookups=(("query", 300), ("key", 130), ("values", 300), ("shared", 143))),
    "eight of logits": Case(lookups=tuple((name, 5 + n) for n, name in enumerate([*LOOKUPS][:8]))),
    "others, and eight of values": Case(
        lookups=tuple((name, 5 + n) for n, name in enumerate([*LOOKUPS, *["values"] * 6][8:]))
    ),
    "interleaved turns": Case((1, 1, 4, 5), pairs=4),
    "turns of some features, in halves": Case((2, 1, 4, 5), pairs=3, half=True, features=24),
    "turns of each image": Case((1, 1, 3, 6), pairs=4, per_image=True, lookups=QKV),
    "turns on two grids": Case((1, 1, 3, 6), (0, 1, 5, 4), pairs=2, half=True, lookups=QKV),
    "strided": Case((1, 1, 5, 6), strided=True, lookups=QKV, features=16),
    "large logits": Case((1, 1, 4, 6), size=6.0, lookups=QKV),
    **{
        f"head_dim {d}": Case((1, 1, 4, 5), features=d, lookups=QKV, pairs=min(4, d // 2))
        for d in (1, 3, 24, 64, 80, 256)
    },
    "fewer value features": Case((1, 1, 4, 5), features=24, value_features=5, lookups=QKV),
    "more value features": Case((1, 1, 4, 5), features=5, value_features=40, lookups=QKV),
    **{f"lookup: {name}": Case((1, 1, 4, 5), lookups=((name, 11),)) for name in LOOKUPS},
    **{f"mask: {kind}": Case((1, 1, 4, 5), lookups=QKV, mask=kind) for kind in MASKS[1:]},
    **{
        f"mask: {kind}, two grids": Case((1, 1, 4, 5), (0, 1, 2, 17), lookups=QKV, mask=kind) for kind in MASKS[1:]
    },
}


def results(
    a: Arguments, grad_out: Tensor, run: Callable[[Arguments], Tensor] = kernel.attention
) -> dict[str, Tensor]:
    """The output, and the gradients of q, k, v and every lookup's entries."""
    leaves = [x.detach().requires_grad_() for x in (a.q, a.k, a.v, *a.entries)]
    q, k, v, *entries = leaves
    out = run(a._replace(q=q, k=k, v=v, entries=entries))
    gradients = torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
    names = ("q", "k", "v", *(f"entries {n}" for n in range(len(entries))))
    return {"out": out.detach()} | dict(zip(names, gradients, strict=True))


def hold_to_bounds(a: Arguments) -> float:
    """Returns what part of its bound the largest error is."""
    grad_out = torch.randn(*a.q.shape[:-1], a.v.shape[-1]).to(a.q.dtype)
    got, exact = results(a, grad_out), results(emulated.in_float64(a), grad_out, emulated.attention)
    unit = 0.0 if a.q.dtype == torch.float32 else torch.finfo(a.q.dtype).eps / 2
    worst = 0.0
    for what, bound in emulated.bounds(a, grad_out, unit).items():
        assert got[what].shape == exact[what].shape, what
        assert got[what].isfinite().all(), what
        error = (got[what].double() - exact[what]).abs()
        over = (error / bound.clamp(min=torch.finfo(torch.float32).tiny)).max().item()
        assert over <= 1, f"{what} is {over:.3g} times its bound off, {error.max():.3g}"
        worst = max(worst, over)
    return worst
