"""The slow truth: every form and attention itself, pair by pair, in plain loops that autograd can follow."""

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from whereformer import Grid

ROUNDINGS = 512
"""More roundings than lie between input and output of any computation here: sums of < 30 features and tokens."""


def close(got: Tensor, expected: Tensor, roundings: int = ROUNDINGS) -> None:
    """Equal but for so many roundings of the largest number, in the dtype of `expected`."""
    bound = roundings * torch.finfo(expected.dtype).eps * max(1.0, expected.detach().abs().max().item())
    torch.testing.assert_close(got, expected, rtol=0, atol=bound, check_dtype=False)


def same_gradients(
    got: Tensor, expected: Tensor, sources: Mapping[str, Tensor], roundings: int = ROUNDINGS
) -> None:
    """Both outputs are close, and so are the gradients of a random sum of theirs by every source."""
    close(got, expected, roundings)
    weight = torch.randn_like(expected)
    found, wanted = (
        torch.autograd.grad(
            (out * weight).sum(), list(sources.values()), allow_unused=True, materialize_grads=True
        )
        for out in (got, expected)
    )
    for name, f, w in zip(sources, found, wanted, strict=True):
        try:
            close(f, w, roundings)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from error


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def places(grid: Grid) -> list[tuple[int, int] | None]:
    """(y, x) of each token, None for prefix tokens."""
    return [None] * grid.prefix + list(itertools.product(range(grid.height), range(grid.width)))


def dense(queries: int, keys: int, bias: Callable[[int, int], Tensor]) -> Tensor:
    """[b, h, i, j] from bias(i, j), [b, h] each."""
    return torch.stack([torch.stack([bias(i, j) for j in range(keys)], -1) for i in range(queries)], -2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Callable[[int, int], Tensor | float] = lambda i, j: 0.0,
    value: Callable[[int, int], Tensor | float] = lambda i, j: 0.0,
    allowed: Tensor | None = None,
) -> Tensor:
    """z_i = Σ_j a_ij (v_j + value(i, j)), a_ij = softmax_j(q_i·k_j/√d + bias(i, j)) over the allowed j; else 0.

    bias(i, j) is broadcast to [b, h], value(i, j) to [b, h, d].
    """
    shape = (*q.shape[:-1], k.shape[-2])
    allowed = torch.ones(shape, dtype=torch.bool) if allowed is None else allowed.expand(shape)
    rows = []
    for i in range(q.shape[-2]):
        logits = [
            (q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(q.shape[-1]) + bias(i, j) for j in range(k.shape[-2])
        ]
        powers = [logit.exp() * allowed[:, :, i, j] for j, logit in enumerate(logits)]
        total = torch.stack(powers).sum(0)
        total = torch.where(total == 0, 1, total)  # nothing to attend to: all powers are zero
        rows.append(
            torch.stack([(p / total)[..., None] * (v[:, :, j] + value(i, j)) for j, p in enumerate(powers)]).sum(0)
        )
    return torch.stack(rows, -2)


def turn(x: Tensor, angles: Tensor, layout: str, prefix: int) -> Tensor:
    """Pairs of features of every patch turned by angles [h, patches, pairs], one by one."""
    pairs = angles.shape[-1]
    columns = {c: x[..., c].clone() for c in range(x.shape[-1])}
    for c in range(pairs):
        first, second = (c, c + pairs) if layout == "half" else (2 * c, 2 * c + 1)
        for n in range(angles.shape[-2]):
            cos, sin, at = angles[:, n, c].cos(), angles[:, n, c].sin(), prefix + n
            columns[first][..., at] = x[..., at, first] * cos - x[..., at, second] * sin
            columns[second][..., at] = x[..., at, first] * sin + x[..., at, second] * cos
    return torch.stack(list(columns.values()), -1)


def nearest(number: float) -> int:
    """[x]: the nearest whole number, the even one of two."""
    return round(number)


def piecewise(x: float, alpha: float, beta: float, gamma: float) -> int:
    """iRPE, eq. 18; a beta that is not whole is cut towards zero."""
    if abs(x) <= alpha:
        return nearest(x)
    far = nearest(alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha))
    return int(math.copysign(min(beta, far), x))


def clip(x: float, beta: float) -> int:
    """iRPE, eq. 9."""
    return max(-int(beta), min(int(beta), nearest(x)))
