"""The kernel against its interface, written again."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

import emulated
from kernel_calls import CASES, compiled, hold_to_bounds, made, results
from whereformer.backends import kernel, library


def test_the_kernel_is_here_where_it_can_be_built() -> None:
    """So that no machine with a compiler passes the tests below by leaving them out."""
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        assert not kernel.missing(), library.why_missing()


@pytest.fixture
def _nan_in_fresh_memory() -> Iterator[None]:
    """What is not written shows."""
    torch.use_deterministic_algorithms(True)
    assert deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@compiled
@pytest.mark.usefixtures("_nan_in_fresh_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_does_what_its_interface_says(name: str, dtype: torch.dtype) -> None:
    hold_to_bounds(made(CASES[name], dtype))


@compiled
def test_bounds_are_not_so_wide_that_all_holds() -> None:
    """One entry of a table that is off by 1e-2 is seen, and so is one key that is left out."""
    a = made(CASES["14 x 14"])
    grad_out = torch.randn(a.q.shape)
    exact, bounds = results(a, grad_out), emulated.bounds(a, grad_out, 0.0)
    moved = a.entries[0].clone()
    moved[0, :, 7] += 1e-2
    allowed = torch.ones(*a.q.shape[:-1], a.k.shape[-2], dtype=torch.bool)
    allowed[..., 50] = False
    for other in (a._replace(entries=[moved, *a.entries[1:]]), a._replace(allowed=allowed)):
        got = results(other, grad_out)
        for what, bound in bounds.items():
            assert ((got[what] - exact[what]).abs() > bound).any(), what


@compiled
def test_runs_are_equal_and_threads_nearly() -> None:
    a = made(CASES["two grids"])
    grad_out = torch.randn(a.q.shape)
    first, second = results(a, grad_out), results(a, grad_out)
    torch.set_num_threads(2)
    try:
        threads, again = results(a, grad_out), results(a, grad_out)
    finally:
        torch.set_num_threads(1)
    bounds = emulated.bounds(a, grad_out, 0.0)
    for what, value in first.items():
        assert torch.equal(value, second[what]), what
        assert torch.equal(threads[what], again[what]), what
        assert ((threads[what] - value).abs() <= 2 * bounds[what]).all(), what
