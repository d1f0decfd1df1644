"""The kernel's interface once more: csrc/whereformer.h pair by pair, in plain torch that autograd can follow."""

import itertools
import math

import torch
from torch import Tensor

from whereformer.backends.kernel import BY_KEY, BY_QUERY, FIELDS, SHARED, VALUES, Arguments

Place = tuple[int, ...] | None


def places(size: tuple[int, ...]) -> list[Place]:
    """(frame, row, column) of each token of a grid (prefix, frames, height, width); None for prefix tokens."""
    prefix, *patches = size
    return [None] * prefix + list(itertools.product(*map(range, patches)))


def attention(a: Arguments) -> Tensor:
    return outputs(a)[0]


def outputs(a: Arguments) -> tuple[Tensor, Tensor]:
    """The output, and log2 of the sum of powers: +inf where nothing is allowed."""
    ours, theirs = places(tuple(a.queries)), places(tuple(a.keys))
    assert (len(ours), len(theirs)) == (a.q.shape[-2], a.k.shape[-2])
    q, k = a.q, a.k
    if a.turns:
        q, k = turn(q, *a.turns[:2], half=a.half), turn(k, *a.turns[2:], half=a.half)
    logits = a.head_dim**-0.5 * (q @ k.mT)
    values = []
    for n, (at, entries) in enumerate(zip(a.maps, a.entries, strict=True)):
        fields = dict(zip(FIELDS, a.lookups[n * len(FIELDS) : (n + 1) * len(FIELDS)], strict=True))
        kind = fields["kind"]
        index = torch.tensor([[bucket(fields, at, i, j, a) for j in theirs] for i in ours])
        heard, index = index >= 0, index.clamp(min=0)
        if kind == VALUES:
            values.append(torch.where(heard[..., None], entries[:, index], 0))  # [h, i, j, d]
            continue
        if fields["by_table"]:
            assert kind in (BY_QUERY, BY_KEY)
            entries = (a.q if kind == BY_QUERY else a.k) @ entries
        if kind == SHARED:
            term = entries[:, index]
        else:
            index = index if kind == BY_QUERY else index.mT
            term = entries.gather(-1, index.expand(*entries.shape[:2], -1, -1))
            term = term if kind == BY_QUERY else term.mT
        logits = logits + torch.where(heard, term, 0)
    if a.added is not None:
        logits = logits + a.added
    idle = torch.zeros_like(logits[..., :1], dtype=torch.bool)
    if a.allowed is not None:
        logits = logits.masked_fill(~a.allowed, -torch.inf)
        idle = ~a.allowed.any(-1, keepdim=True)
    weights = logits.masked_fill(idle, 0).softmax(-1).masked_fill(idle, 0)
    out = weights @ a.v + sum((weights[..., None, :] @ value).squeeze(-2) for value in values)
    return out, (logits.logsumexp(-1) / math.log(2)).masked_fill(idle.squeeze(-1), torch.inf)


def bucket(fields: dict[str, int], at: Tensor, i: Place, j: Place, a: Arguments) -> int:
    if i is None or j is None:
        return fields["prefix"]
    if fields["absolute"]:
        return int(at.reshape(*a.keys[1:])[j])
    of, by, subtracted = (j, i, a.queries) if fields["mirrored"] else (i, j, a.keys)
    offset = tuple(o - b + n - 1 for o, b, n in zip(of, by, subtracted[1:], strict=True))
    sizes = [n + m - 1 for n, m in zip(a.queries[1:], a.keys[1:], strict=True)]
    return int(at.reshape(sizes)[offset])


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, half: bool) -> Tensor:
    patches, pairs = cos.shape[-2:]
    rows = []
    for n in range(x.shape[-2]):
        row = list(x[:, :, n].unbind(-1))
        for c in range(pairs):
            if n < (prefix := x.shape[-2] - patches):
                break
            first, second = (c, c + pairs) if half else (2 * c, 2 * c + 1)
            one, two, by, across = row[first], row[second], cos[:, :, n - prefix, c], sin[:, :, n - prefix, c]
            row[first], row[second] = one * by - two * across, one * across + two * by
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def run(
    name: str,
    a: Arguments,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor | None, ...] = (),
    gradients_of_entries: tuple[Tensor, ...] = (),
) -> None:
    """In place of `kernel._run`: fills the same memory."""
    exact = a._replace(**{n: getattr(a, n).detach().double().requires_grad_() for n in "qkv"})
    exact = exact._replace(entries=[e.detach().double().requires_grad_() for e in a.entries])
    with torch.enable_grad():
        found, sums = outputs(exact)
    if name == "whereformer_forward":
        out.detach().copy_(found.detach())
        if lse.numel():
            lse.copy_(sums.detach())
        return
    grad_out, *grads = gradients
    sources = [exact.q, exact.k, exact.v, *exact.entries]
    for to, gradient in zip(
        [*grads, *gradients_of_entries], torch.autograd.grad(found, sources, grad_out.double()), strict=True
    ):
        if to.numel():
            to.copy_(gradient)
