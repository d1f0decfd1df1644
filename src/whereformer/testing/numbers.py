"""Promises about numbers: backends, dtypes, memory layout, real numbers."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whereformer.attention import attention
from whereformer.encoding import PositionEncoding
from whereformer.forms import MatrixRotation, Rotation
from whereformer.grid import Grid
from whereformer.testing.subject import (
    ROUNDINGS,
    Inputs,
    Subject,
    forward,
    hold,
    inputs_on,
    masks,
    on_every_backend,
    run,
    said_by,
    same,
    size,
    within,
)

FORM_ROUNDINGS = 8
"""Roundings to the tokens' dtype on the way to one form or output: sums inside are kept in float32."""

COSINE = 2e-3
"""How far cosines of angles may be off: they are 1.8e-3 off if only the result is rounded to bfloat16."""


def backends_agree(subject: Subject) -> None:
    """is the same on every backend that can serve it, in values and in every gradient"""
    for home, grids in (
        (subject.home, (subject.home, subject.away)),
        (subject.grid(3, 4, 0), (subject.grid(4, 3, 0), subject.grid(1, 1, 0))),
    ):
        encoding = subject.make(home)
        for grid in grids:
            for kind, mask in (("absent", None), *((kind, mask) for kind, mask, _ in masks(encoding, grid))):
                on_every_backend(subject, encoding, grid, mask=mask, where=f"{grid}, mask {kind}")


def takes_any_strides(subject: Subject) -> None:
    """does not care how its input lies in memory"""
    encoding = subject.make()
    for grid in (subject.home, subject.away):
        inputs = inputs_on(encoding, grid)
        # [b, tokens, heads, d], as a projection gives them, and tokens that were an image [b, dim, tokens]
        strided = inputs.map(lambda t: t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_())
        for backend in ("reference", "auto"):
            got, expected = (run(encoding, grid, inputs=i, backend=backend) for i in (strided, inputs))
            same(got, expected, f"{grid}, transposed in memory", ROUNDINGS)


class _NoComplex(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                hold(not tensor.is_complex(), f"{func} makes {tensor.dtype}")
        return out


def is_real(subject: Subject) -> None:
    """has and makes real numbers alone: complex ones cannot be exported, or moved to half precision"""
    with _NoComplex():
        encoding = subject.make()
        for name, tensor in encoding.state_dict(keep_vars=True).items():
            hold(not tensor.is_complex(), f"{name} is {tensor.dtype}")
        run(encoding, subject.away)


def keeps_dtypes(subject: Subject) -> None:
    """keeps the dtype of tokens, within its rounding, under autocast too; angles and positions stay exact"""
    long = Grid(1, 300, 1) if subject.frames is None else Grid(1, 150, 1, 2)  # bfloat16 cannot count to 300
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for grid in (subject.home, long):
            encoding = subject.make().to(dtype)
            inputs = inputs_on(encoding, grid).map(lambda t, dtype=dtype: t.detach().to(dtype))
            if grid is long:
                inputs = inputs.map(lambda t: t[:1])
            wide, wide_inputs = copy.deepcopy(encoding).float(), inputs.map(Tensor.float)
            truth = _Truth(encoding, inputs, grid, attends=grid is not long)
            truth.check(encoding, inputs, f"{grid} in {dtype}")
            if dtype != torch.float32:
                truth.check(wide, inputs, f"{grid} in {dtype}, parameters in float32")
                with torch.autocast("cpu", dtype):
                    truth.check(wide, wide_inputs, f"{grid} under autocast to {dtype}")


class _Truth:
    """What an encoding of some dtype says in float64, and how far its own rounding may lead away."""

    def __init__(self, encoding: PositionEncoding, inputs: Inputs, grid: Grid, attends: bool) -> None:
        exact = copy.deepcopy(encoding).double()
        exact_inputs = inputs.map(Tensor.double)
        self.grid, self.attends = grid, attends
        self.said = said_by(exact, exact_inputs, grid)
        self.turns = _turns(exact, grid)
        unit, sums = (torch.finfo(dtype).eps / 2 for dtype in (inputs.q.dtype, torch.float32))
        self.error = FORM_ROUNDINGS * unit + grid.tokens * sums
        self.out = forward(exact, exact_inputs, grid)["attention"] if attends else torch.empty(0)
        # A weight changes, relative to itself, by twice what a logit changes.
        _, q, k, v = exact_inputs
        logits = size(q.abs() @ k.abs().mT) * q.shape[-1] ** -0.5
        logits += sum(size(value) for what, value in self.said.items() if what.startswith("biases"))
        self.out_error = self.error * (1 + 2 * logits) * (size(v) + size(self.out)) if attends else 0.0

    def check(self, encoding: PositionEncoding, inputs: Inputs, where: str) -> None:
        said = said_by(encoding, inputs, self.grid)
        kept = said["tokens"].dtype == inputs.x.dtype
        hold(kept, f"tokens on {where} turn into {said['tokens'].dtype}")
        for what, value in self.said.items():
            within(said[what], value, self.error * size(value), f"{what} on {where}")
        for found, exact in zip(_turns(encoding, self.grid), self.turns, strict=True):
            hold(torch.finfo(found.dtype).bits >= 32, f"angles on {where} are {found.dtype}")
            within(found.cos(), exact.cos(), COSINE, f"the cosine of angles on {where}")
            apart = [rows.unique(dim=-2).shape[-2] for rows in (found, exact)]
            hold(apart[0] == apart[1], f"only {apart[0]} of {apart[1]} angles on {where} stay apart")
        if not self.attends:
            return
        plain = attention(inputs.q, inputs.k, inputs.v, self.grid).dtype
        for backend in ("reference", "auto"):
            out = forward(encoding, inputs, self.grid, backend=backend)["attention"]
            what = f"attention on {where}, backend {backend!r}"
            hold(out.dtype == plain, f"{what}, is {out.dtype}, but {plain} without encodings")
            within(out, self.out, self.out_error, what)


def _turns(encoding: PositionEncoding, grid: Grid) -> list[Tensor]:
    """Angles, or the numbers of matrices, of each rotation: [..., patches, numbers]."""
    found = []
    for rotate in encoding.rotations(grid, torch.device("cpu")):
        match rotate:
            case Rotation():
                found.append(rotate.angles)
            case MatrixRotation():
                found.append(rotate.matrices.flatten(-2))
    return found
