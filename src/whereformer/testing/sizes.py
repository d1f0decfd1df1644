"""Promises about another home grid."""

import copy

import torch

from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.testing.subject import ROUNDINGS, Subject, forward, hold, inputs_on, same


def can_be_resized(subject: Subject) -> None:
    """says after resize to a new home grid what it said there before, to the bit if the size stays"""
    home = subject.home
    for prefix in (0, 1):
        old = subject.make(subject.grid(3, 4, prefix))
        for grid in _others(subject, prefix):
            inputs = inputs_on(old, grid).map(torch.Tensor.detach)
            expected = forward(old, inputs, grid)
            new = copy.deepcopy(old)
            hold(new.resize(grid) is new, "resize returns another")
            hold(new.grid == grid, f"after resize to {grid} its home is {new.grid}")
            got = forward(new, inputs, grid)
            same(got, expected, f"{grid}, resized from {old.grid}", ROUNDINGS, torch.float32)
            untouched = torch.equal(got["tokens"][:, :prefix], expected["tokens"][:, :prefix])
            hold(untouched, f"tokens of the prefix change with the resize to {grid}")
            try:
                subject.make(grid).load_state_dict(new.state_dict())
            except RuntimeError as error:
                raise AssertionError(
                    f"resized to {grid} it does not fit one that was built there: {error}"
                ) from None
    same_size, before = subject.make(), subject.make()
    parameters = dict(same_size.named_parameters())
    for name, parameter in same_size.resize(subject.grid(3, 4)).named_parameters():
        hold(parameter is parameters[name], f"parameter {name} is another after resize to the same size")
    inputs = inputs_on(before, home)
    same(forward(same_size, inputs, home), forward(before, inputs, home), f"{home}, resized to the same size")
    try:
        subject.make().resize(subject.grid(5, 2, prefix=2))
    except InputError:
        return
    raise AssertionError(f"resize from {home} to a grid with two prefix tokens goes through")


def resizes_in_float32(subject: Subject) -> None:
    """is resized in float32, rounded once to the dtype of its parameters, which learn or do not as before"""
    for grid in _others(subject, 1):
        for dtype in (torch.bfloat16, torch.float16):
            half = subject.make().to(dtype)
            learns = {name: parameter.requires_grad for name, parameter in half.named_parameters()}
            wide = copy.deepcopy(half).float().resize(grid)
            with torch.autocast("cpu", torch.bfloat16):
                half.resize(grid)
            for (name, parameter), exact in zip(half.named_parameters(), wide.parameters(), strict=True):
                what = f"{name} in {dtype}, resized to {grid}"
                hold(parameter.dtype == dtype, f"parameter {what}, is {parameter.dtype}")
                hold(
                    parameter.requires_grad == learns[name], f"parameter {what}, learns: {parameter.requires_grad}"
                )
                same({name: parameter.detach()}, {name: exact.detach().to(dtype)}, f"{grid}, resized in {dtype}")


def _others(subject: Subject, prefix: int) -> list[Grid]:
    """Larger, smaller, of another shape, of as many patches."""
    return [subject.grid(height, width, prefix) for height, width in ((5, 7), (2, 3), (5, 2), (6, 2), (1, 1))]
