"""What the promises share: an encoding under test, its inputs, and how far two results may differ."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whereformer import backends
from whereformer.attention import attention
from whereformer.backends.call import Call
from whereformer.catalog import Factory
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import Forms
from whereformer.grid import Grid

DIM, HEADS, BATCH = 24, 3, 2

ROUNDINGS = 512
"""Roundings between input and output of equal computations in another order: sums over features and tokens."""

LOGIT_ROUNDINGS = 4
"""Roundings of a weight for each unit of a logit: two of the logit, which move the weight by twice that."""


@dataclass(frozen=True)
class Subject:
    """An encoding under test, on images or on videos.

    Args:
        factory: builds it.
        frames: of the grids it is tested on; None: images.
    """

    factory: Factory
    frames: int | None

    def grid(self, height: int, width: int, prefix: int = 1) -> Grid:
        return Grid(height, width, prefix, self.frames)

    @property
    def home(self) -> Grid:
        return self.grid(3, 4)

    @property
    def away(self) -> Grid:
        return self.grid(5, 2)

    def make(self, grid: Grid | None = None, heads: int = HEADS) -> PositionEncoding:
        """In float64, not training, its parameters random: tables that start at zero would say nothing."""
        encoding = self.factory(DIM, heads, self.home if grid is None else grid).double().eval()
        with torch.no_grad():
            for seed, parameter in enumerate(encoding.parameters()):
                parameter.copy_(random(*parameter.shape, seed=seed))
        return encoding

    def make_wide(self, grid: Grid) -> PositionEncoding:
        """With all features in one head if it can: what many pairs of features do, a few may not."""
        try:
            return self.make(grid, heads=1)
        except InputError:
            return self.make(grid)

    def twin(self, encoding: PositionEncoding) -> PositionEncoding:
        """A fresh one with the same state."""
        twin = self.factory(encoding.dim, encoding.num_heads, encoding.grid).double().train(encoding.training)
        twin.load_state_dict(encoding.state_dict())
        return twin


class Inputs(NamedTuple):
    x: Tensor
    """Tokens before a block: [batch, tokens, dim]."""
    q: Tensor
    """[batch, heads, tokens, head_dim], not yet scaled; k and v alike."""
    k: Tensor
    v: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        return Inputs(*map(function, self))


def random(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def inputs_on(encoding: PositionEncoding, grid: Grid, keys: Grid | None = None) -> Inputs:
    there = (grid if keys is None else keys).tokens
    heads, features = encoding.num_heads, encoding.head_dim
    shapes = (
        (BATCH, grid.tokens, encoding.dim),
        (BATCH, heads, grid.tokens, features),
        (BATCH, heads, there, features),
        (BATCH, heads, there, features),
    )
    return Inputs(*(random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)))


def masks(
    encoding: PositionEncoding, grid: Grid, keys: Grid | None = None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Kinds of mask: a name, the mask, and which queries are idle [..., queries, 1]."""
    there = (grid if keys is None else keys).tokens
    allowed = torch.ones(BATCH, 1, 1, there, dtype=torch.bool)
    allowed[1, ..., there // 2 :] = False
    yield "boolean padding", allowed, ~allowed.any(-1, keepdim=True)
    allowed = random(BATCH, encoding.num_heads, grid.tokens, there, seed=4) > 0
    allowed[:, 0, -1] = False
    idle = ~allowed.any(-1, keepdim=True)
    yield "boolean with idle queries", allowed, idle
    added = random(*allowed.shape, seed=5)
    yield "additive with idle queries", added.masked_fill(~allowed, -torch.inf), idle


def forms_of(encoding: PositionEncoding, inputs: Inputs, grid: Grid, keys: Grid | None = None) -> Forms:
    _, q, k, v = inputs
    there = grid if keys is None else keys
    return Forms(
        tuple(encoding.rotations(grid, q.device)),
        tuple(encoding.biases(q, k, grid, there)),
        tuple(encoding.values(v, grid, there)),
        None if keys is None else tuple(encoding.rotations(keys, k.device)),
    )


def said_by(encoding: PositionEncoding, inputs: Inputs, grid: Grid) -> dict[str, Tensor]:
    """What it says at each moment."""
    forms = forms_of(encoding, inputs, grid)
    weights = torch.full((*inputs.q.shape[:-1], grid.tokens), 1 / grid.tokens, dtype=inputs.q.dtype)
    said = {"tokens": encoding.tokens(inputs.x, grid)}
    said |= {f"rotations {i} of q": rotate(inputs.q) for i, rotate in enumerate(forms.rotations)}
    said |= {f"biases {i}": bias.dense() for i, bias in enumerate(forms.biases)}
    said |= {f"values {i}": term.dense(weights) for i, term in enumerate(forms.values)}
    return said


def forward(
    encoding: PositionEncoding,
    inputs: Inputs,
    grid: Grid,
    keys: Grid | None = None,
    mask: Tensor | None = None,
    backend: str = "reference",
) -> dict[str, Tensor]:
    _, q, k, v = inputs
    out = attention(q, k, v, grid, [encoding], keys=keys, mask=mask, backend=backend)
    return {"tokens": encoding.tokens(inputs.x, grid), "attention": out}


def with_gradients(encoding: PositionEncoding, sources: Inputs, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, and the gradients of a weighted sum of them by inputs and parameters."""
    weights = [random(*value.shape, seed=6) for value in outputs.values()]
    by = sources._asdict() | {n: p for n, p in encoding.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        list(outputs.values()), list(by.values()), weights, allow_unused=True, materialize_grads=True
    )
    outputs = {what: value.detach() for what, value in outputs.items()}
    return outputs | {f"gradient of {name}": g for name, g in zip(by, gradients, strict=True)}


def run(
    encoding: PositionEncoding,
    grid: Grid,
    keys: Grid | None = None,
    *,
    inputs: Inputs | None = None,
    mask: Tensor | None = None,
    backend: str = "reference",
) -> dict[str, Tensor]:
    """Tokens, attention, and the gradients of a weighted sum of both."""
    inputs = inputs_on(encoding, grid, keys) if inputs is None else inputs
    return with_gradients(encoding, inputs, forward(encoding, inputs, grid, keys, mask, backend))


def on_every_backend(
    subject: Subject,
    encoding: PositionEncoding,
    grid: Grid,
    keys: Grid | None = None,
    mask: Tensor | None = None,
    *,
    where: str,
) -> None:
    """Holds each backend that can serve to the reference, in float64 or else in float32."""
    exact = subject.twin(encoding).float().double()  # numbers that both can hold
    inputs = inputs_on(encoding, grid, keys).map(lambda t: t.detach().float().double().requires_grad_())
    expected = run(exact, grid, keys, inputs=inputs, mask=mask)
    logits = sum(size(bias.dense()) for bias in forms_of(exact, inputs, grid, keys).biases)
    roundings = ROUNDINGS + math.ceil(LOGIT_ROUNDINGS * logits)
    for backend in ("auto", *backends.FASTEST_FIRST):
        for dtype in (torch.float64, torch.float32):
            there = inputs.map(lambda t, dtype=dtype: t.detach().to(dtype).requires_grad_())
            twin = subject.twin(exact).to(dtype)
            if serves(backend, twin, there, grid, keys):
                got = run(twin, grid, keys, inputs=there, mask=mask, backend=backend)
                same(got, expected, f"{where}, on backend {backend!r}", roundings, dtype)
                break


def serves(backend: str, encoding: PositionEncoding, inputs: Inputs, grid: Grid, keys: Grid | None) -> bool:
    if backend == "auto":
        return True
    _, q, k, v = inputs
    return not backends.FASTEST_FIRST[backend].cannot(forms_of(encoding, inputs, grid, keys), Call(q, k, v))


# ---------------------------------------------------------------------------------------------------------------


def hold(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def size(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def finite(results: dict[str, Tensor], where: str) -> None:
    for what, value in results.items():
        hold(bool(value.isfinite().all()), f"{what} on {where} is not finite")


def same(
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    where: str,
    roundings: int = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Equal but for so many roundings of the largest number, in `dtype` or that of `expected`.

    Angles are made in float32 whatever the dtype of tokens: where places change, that is what rounds.
    """
    for what, value in expected.items():
        bound = roundings * torch.finfo(dtype or value.dtype).eps * max(1.0, size(value))
        within(got[what], value, bound, f"{what} on {where}")


def within(got: Tensor, expected: Tensor, bound: float, what: str) -> None:
    hold(got.shape == expected.shape, f"{what} is {tuple(got.shape)}, not {tuple(expected.shape)}")
    error = size(got.double() - expected.double())
    hold(error <= bound, f"{what} is off by {error:.3g}, allowed {bound:.3g}")
