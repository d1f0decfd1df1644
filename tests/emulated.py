"""The kernel's interface once more: csrc/whereformer.h pair by pair, in plain torch that autograd can follow."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whereformer.backends.kernel import BY_BUCKET, BY_KEY, BY_QUERY, FIELDS, SHARED, VALUES, Arguments

Place = tuple[int, ...] | None


def attention(a: Arguments) -> Tensor:
    return mixed(a, weights(a, logits(a)))


def logits(a: Arguments, sign: int = -1) -> Tensor:
    """Without the mask. `sign`: of what turns subtract, 1 for a bound of what all terms may add up to."""
    q, k = a.q, a.k
    if a.turns:
        q, k = turn(q, *a.turns[:2], half=a.half, sign=sign), turn(k, *a.turns[2:], half=a.half, sign=sign)
    found = a.head_dim**-0.5 * (q @ k.mT)
    for fields, index, entries in _lookups(a):
        kind = fields["kind"]
        if kind == VALUES:
            continue
        if fields["by_table"]:
            assert kind in (BY_QUERY, BY_KEY)
            entries = (a.q if kind == BY_QUERY else a.k) @ (
                entries.mT if fields["by_table"] == BY_BUCKET else entries
            )
        heard, at = index >= 0, index.clamp(min=0)
        if kind == SHARED:
            term = entries[:, at]
        else:
            at = at if kind == BY_QUERY else at.mT
            term = entries.gather(-1, at.expand(*entries.shape[:2], -1, -1))
            term = term if kind == BY_QUERY else term.mT
        found = found + torch.where(heard, term, 0)
    return found


def weights(a: Arguments, logits: Tensor) -> Tensor:
    if a.added is not None:
        logits = logits + a.added
    if a.allowed is None:
        return logits.softmax(-1)
    idle = ~a.allowed.any(-1, keepdim=True)
    return logits.masked_fill(~a.allowed, -torch.inf).masked_fill(idle, 0).softmax(-1).masked_fill(idle, 0)


def mixed(a: Arguments, weights: Tensor) -> Tensor:
    out = weights @ a.v
    for fields, index, entries in _lookups(a):
        if fields["kind"] == VALUES:
            values = torch.where(index[..., None] >= 0, entries[:, index.clamp(min=0)], 0)  # [h, i, j, d]
            out = out + (weights[..., None, :] @ values).squeeze(-2)
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, half: bool, sign: int) -> Tensor:
    prefix, pairs = x.shape[-2] - cos.shape[-2], cos.shape[-1]
    features = list(x[..., prefix:, :].unbind(-1))
    for c in range(pairs):
        first, second = (c, c + pairs) if half else (2 * c, 2 * c + 1)
        one, two = features[first], features[second]
        features[first] = one * cos[..., c] + sign * two * sin[..., c]
        features[second] = one * sin[..., c] + two * cos[..., c]
    return torch.cat([x[..., :prefix, :], torch.stack(features, -1)], -2)


def _lookups(a: Arguments) -> list[tuple[dict[str, int], Tensor, Tensor]]:
    """The fields of each, the bucket of each pair of tokens, −1 for none, and the entries."""
    ours, theirs = _places(a.queries), _places(a.keys)
    assert (len(ours), len(theirs)) == (a.q.shape[-2], a.k.shape[-2])
    found = []
    for n, (at, entries) in enumerate(zip(a.maps, a.entries, strict=True)):
        fields = dict(zip(FIELDS, a.lookups[n * len(FIELDS) : (n + 1) * len(FIELDS)], strict=True))
        numbers = at.flatten().tolist()
        sizes = [q + k - 1 for q, k in zip(a.queries[1:], a.keys[1:], strict=True)]

        def bucket(i: Place, j: Place, fields: dict = fields, numbers: list = numbers, sizes: list = sizes) -> int:
            if i is None or j is None:
                return fields["prefix"]
            if fields["absolute"]:
                return numbers[_number(j, a.keys[1:])]
            of, by, subtracted = (j, i, a.queries) if fields["mirrored"] else (i, j, a.keys)
            offset = [o - b + n - 1 for o, b, n in zip(of, by, subtracted[1:], strict=True)]
            return numbers[_number(offset, sizes)]

        is_table = fields["by_table"] or fields["kind"] == VALUES
        scaled = entries * a.scales[n] if a.scales and is_table else entries
        found.append((fields, torch.tensor([[bucket(i, j) for j in theirs] for i in ours]), scaled))
    return found


def _places(grid: Sequence[int]) -> list[Place]:
    """(frame, row, column) of each token of a grid (prefix, frames, height, width); None for prefix tokens."""
    prefix, *patches = grid
    return [None] * prefix + list(itertools.product(*map(range, patches)))


def _number(place: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for at, size in zip(place, sizes, strict=True):
        number = number * size + at
    return number


# ---------------------------------------------------------------------------------------------------------------
# How far a computation in float32 may be off.

EXP = 8
"""Roundings in 2^x and in what is done to a logit before it and to a weight after it."""


def bounds(a: Arguments, grad_out: Tensor, unit: float) -> dict[str, Tensor]:
    """Of the output and of every gradient, in float64.

    A sum of n terms, in any order, has n roundings u of at most the sum of their magnitudes; as they fall to both
    sides, it is off by √n of them (Higham and Mary 2019). So a logit, sums over d features within sums over d
    features and lookups, is off by δ = √(2 d + lookups + EXP) u |logit|, |.| standing for the same expression with
    every term's magnitude, and a weight by a share of 2 max δ + √(n + EXP) u, n keys being summed. What is linear
    in the weights inherits that share, and adds its own sums:

        |out|  = A |v|,   |dP| = |dO| |v|ᵀ,   |dS| = A (|dP| + Σ_j A |dP|)

    and gradients are those of Σ |logits| |dS| and of Σ |out| |dO|, over all queries and images. Where q, k and v
    are bfloat16, the output is rounded to it before the backward pass reads it (in |dS|), and so is every gradient
    at the end: by `unit` each. (In float32 the largest error of all numbers in the tests is 0.15 of its bound.)
    """
    u = torch.finfo(torch.float32).eps / 2
    whole = lambda x: x.detach().double().abs().requires_grad_()  # noqa: E731
    m = a._replace(
        **{n: whole(getattr(a, n)) for n in "qkv"},
        entries=[whole(e) for e in a.entries],
        turns=[t.double().abs() for t in a.turns],
    )
    exact = in_float64(a)
    with torch.no_grad():
        share = weights(exact, logits(exact))
    scores = logits(m, sign=1)
    largest = scores.detach() + (0 if a.added is None else a.added.double().abs().nan_to_num(0, 0, 0))
    largest = largest if a.allowed is None else largest.masked_fill(~a.allowed, 0)
    features, tokens = a.q.shape[-1], a.q.shape[-2] + a.k.shape[-2]
    delta = math.sqrt(2 * features + len(a.maps) + EXP) * u * largest.amax(-1, keepdim=True)
    off = 2 * delta + math.sqrt(tokens + EXP) * u  # [b, h, i, 1]

    sources = {n: getattr(m, n) for n in "qkv"} | {f"entries {n}": e for n, e in enumerate(m.entries)}
    gradients = lambda y, by, of: torch.autograd.grad(  # noqa: E731
        y, by, of, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    share.requires_grad_()
    out, d_out = mixed(m, share), grad_out.double().abs()
    (d_share,) = gradients(out, [share], d_out)
    d_scores = (share * (d_share + (share * d_share).sum(-1, keepdim=True))).detach()
    images = a.q.shape[0]
    more = 2 * off + math.sqrt(images * tokens + 2 * features + a.v.shape[-1] + EXP) * u + 3 * unit
    of_values = gradients(out, list(sources.values()), d_out * more)
    of_logits = gradients(scores, list(sources.values()), d_scores * more)
    found = {"out": (off + unit) * out.detach()}
    return found | {n: x + y for n, x, y in zip(sources, of_values, of_logits, strict=True)}


def in_float64(a: Arguments) -> Arguments:
    """Leaves for autograd."""
    leaf = lambda x: x.detach().double().requires_grad_()  # noqa: E731
    return a._replace(
        **{n: leaf(getattr(a, n)) for n in "qkv"},
        entries=[leaf(e) for e in a.entries],
        turns=[t.double() for t in a.turns],
        added=None if a.added is None else a.added.double(),
    )
