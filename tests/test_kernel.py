"""What no input may do to the kernel: poison its neighbours, depend on chance, crash."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import emulated
from kernel_calls import CASES, QKV, Case, compiled, hold_to_bounds, made, results
from kernel_cases import INSTRUCTIONS, on
from loops import close
from whereformer.backends import kernel
from whereformer.backends.kernel import BY_KEY, Arguments

pytestmark = compiled


def called(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Arguments, Tensor]:
    a = made(case, dtype)
    return a, torch.randn(*a.q.shape[:-1], a.v.shape[-1]).to(dtype)


@pytest.fixture
def _one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=INSTRUCTIONS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param) as runs:
        if not runs:
            pytest.skip(f"no {request.param} here")
        assert kernel.isa() == request.param
        yield request.param


# ---------------------------------------------------------------------------------------------------------------
# Numbers.

AT = (0, 1, 5)
"""Image, head and token of a number that is none."""


def poisoned(case: Case, name: str, value: float) -> tuple[Arguments, dict[str, Tensor], dict[str, Tensor]]:
    """A call with one bad number in q, k or v, its results, and those without it."""
    a, grad_out = called(case)
    clean = results(a, grad_out)
    bad = getattr(a, name).clone()
    bad[*AT, 2] = value
    a = a._replace(**{name: bad})
    return a, results(a, grad_out), clean


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("lookups", [(), QKV], ids=["plain", "lookups"])
def test_a_query_that_is_no_number_spoils_its_own_row(lookups: tuple[tuple[str, int], ...], value: float) -> None:
    _, got, clean = poisoned(Case((1, 1, 4, 5), lookups=lookups), "q", value)
    other = torch.ones_like(got["out"], dtype=torch.bool)
    other[AT] = False
    for what in ("out", "q"):
        assert got[what][AT].isnan().all(), what
        assert torch.equal(got[what][other], clean[what][other]), what
    of_head = torch.ones(got["k"].shape[:2], dtype=torch.bool)
    of_head[AT[:2]] = False
    for what in ("k", "v"):
        assert torch.equal(got[what][of_head], clean[what][of_head]), what


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("keys", [(0, 1, 4, 5), (0, 1, 100, 13)], ids=["keys at once", "keys by and by"])
@pytest.mark.parametrize("lookups", [(), QKV], ids=["plain", "lookups"])
def test_a_key_that_is_nan_spoils_its_head(
    lookups: tuple[tuple[str, int], ...], keys: tuple[int, int, int, int], name: str
) -> None:
    a, got, clean = poisoned(Case((1, 1, 3, 4), keys, lookups, batch=1, heads=2), name, math.nan)
    head = AT[:2]
    of_others = torch.ones(got["out"].shape[:2], dtype=torch.bool)
    of_others[head] = False
    for what in ("out", "q", "k", "v"):
        assert torch.equal(got[what][of_others], clean[what][of_others]), what
    expected = emulated.attention(a)
    assert torch.equal(got["out"][head].isnan(), expected[head].isnan())
    for what in ("q", "v") if name == "k" else ("q",):
        assert got[what][head].isnan().all(), what


@pytest.mark.usefixtures("isa")
def test_where_nothing_is_allowed_all_is_zero() -> None:
    a, grad_out = called(Case((1, 1, 4, 5), lookups=QKV))
    a = a._replace(allowed=torch.zeros(*a.q.shape[:-1], a.k.shape[-2], dtype=torch.bool))
    for what, value in results(a, grad_out).items():
        assert not value.any(), what


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e-10, 4.0, 5.0, 6.0, 30.0])
def test_sizes(size: float) -> None:
    """Also denormal numbers, and weights of all sizes; sizes around one are in the tests of the backend."""
    a, grad_out = called(Case((1, 1, 4, 5), lookups=QKV, size=size))
    exact = results(emulated.in_float64(a), grad_out, emulated.attention)
    got = results(a, grad_out)
    for what, bound in emulated.bounds(a, grad_out, 0.0).items():
        assert got[what].isfinite().all(), what
        assert ((got[what].double() - exact[what]).abs() <= bound + 1e-35).all(), what


RISING, BROKEN = [0, 0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 0, 2, 3, 2, 3]
"""Buckets along a line, as few as the shortest vector has lanes: keys of one are neighbours, or are not."""


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    "lines", [[RISING] * 3, [BROKEN] * 3, [RISING, BROKEN, RISING]], ids=["rise", "break", "differ"]
)
@pytest.mark.parametrize("kind", ["query", "key not mirrored"])
def test_a_bad_query_stays_in_its_buckets(kind: str, lines: list[list[int]]) -> None:
    """In the gradient of a table only what its own pairs say: offsets −1 and 0 of rows, −4 to 0 of columns."""
    a = made(Case((0, 1, 2, 5), lookups=((kind, 4),), batch=1, heads=1))
    a = a._replace(maps=[torch.tensor(lines, dtype=torch.int32).reshape(a.maps[0].shape)])
    grad_out = torch.randn(a.q.shape)
    grad_out[0, 0, 0, 0] = math.nan
    finite = results(a, grad_out)["entries 0"].isfinite()  # [1, features, buckets]
    assert torch.equal(finite, torch.tensor([False, False, True, True]).expand_as(finite))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("before", [0, 32, 48], ids="{} before".format)
@pytest.mark.parametrize("last", [1, 2, 3, 5, 8, 16, 17], ids="{} last".format)
def test_few_queries_in_the_last_group(last: int, before: int) -> None:
    """Sums over queries are made of groups of 32 or 48, and of few otherwise than of many."""
    case = Case((0, 1, 1, before + last), (1, 1, 4, 8), batch=1, heads=2, features=24, value_features=5)
    hold_to_bounds(made(case))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("least", [-1e4, -1e30, -1e38, torch.finfo(torch.float32).min])
def test_what_masks_add_may_be_large(least: float) -> None:
    a, grad_out = called(Case((1, 1, 4, 5), lookups=QKV))
    shape = (*a.q.shape[:-1], a.k.shape[-2])
    seen = torch.rand(shape) > 0.5
    seen[..., 0] = True
    got = results(a._replace(added=torch.where(seen, 0.0, least)), grad_out)
    expected = results(a._replace(allowed=seen), grad_out)
    for what in expected:
        close(got[what], expected[what])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("size", [1e3, 1e5])
def test_huge_logits_choose_one_key(size: float) -> None:
    """Softmax is then the largest logit's; it must be no NaN, and the output that key's value."""
    a, grad_out = called(Case((1, 1, 4, 5), lookups=(("query", 50), ("key", 50)), size=size))
    got = results(a, grad_out)
    logits = emulated.logits(emulated.in_float64(a))
    best, second = logits.topk(2).values.unbind(-1)
    clear = best - second > 1e-4 * logits.abs().amax(-1)
    assert clear.float().mean() > 0.5
    chosen = a.v.gather(-2, logits.argmax(-1)[..., None].expand(*a.q.shape[:-1], a.v.shape[-1]))
    close(got["out"][clear], chosen[clear])
    for what, value in got.items():
        assert value.isfinite().all(), what


@pytest.mark.parametrize("names", [("query", "key", "values"), ("shared", "shared per head")], ids=str)
def test_very_many_buckets(names: tuple[str, ...]) -> None:
    a, grad_out = called(Case((1, 1, 7, 9), lookups=tuple((name, 100_000) for name in names), batch=1, heads=2))
    exact, got = results(emulated.in_float64(a), grad_out, emulated.attention), results(a, grad_out)
    for what, value in exact.items():
        close(got[what], value.float())


@pytest.mark.usefixtures("isa")
def test_what_runs_later_on_the_thread_is_as_before() -> None:
    """Numbers below 2^-126 count, and torch's own products of bfloat16, on tiles where it has them."""
    small, halves = torch.full((64,), 1e-40), torch.randn(96, 96).bfloat16()
    half, product = (small * 0.5).view(torch.int32), halves @ halves
    assert half.all()
    for _ in range(3):
        results(*called(Case((1, 1, 4, 5), lookups=QKV)))
        assert torch.equal((small * 0.5).view(torch.int32), half)
        assert torch.equal(halves @ halves, product)


# ---------------------------------------------------------------------------------------------------------------
# Threads.


@pytest.mark.usefixtures("_one_thread_afterwards")
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@pytest.mark.parametrize("name", ["14 x 14", "two grids", "one token"])
def test_runs_are_equal_bit_by_bit(name: str, threads: int) -> None:
    a, grad_out = called(CASES[name])
    alone = results(a, grad_out)
    torch.set_num_threads(threads)
    first = results(a, grad_out)
    for _ in range(5):
        again = results(a, grad_out)
        assert all(torch.equal(again[what], value) for what, value in first.items())
    bounds = emulated.bounds(a, grad_out, 0.0)
    for what, value in alone.items():
        assert ((first[what] - value).abs() <= 2 * bounds[what]).all(), what


@pytest.mark.usefixtures("_one_thread_afterwards")
def test_many_callers_at_once() -> None:
    """Each of them on two threads of its own."""
    torch.set_num_threads(2)
    calls = [called(CASES[name]) for name in ("14 x 14", "two grids", "a video", "strided")]
    expected = [results(*call) for call in calls]

    def again(n: int) -> bool:
        torch.set_num_threads(2)
        found = results(*calls[n % len(calls)])
        return all(torch.equal(found[what], value) for what, value in expected[n % len(calls)].items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, range(40)))


# ---------------------------------------------------------------------------------------------------------------
# The C interface alone.


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["query", "shared", "key", "values"])
def test_nine_lookups_are_refused(kind: str) -> None:
    a, _ = called(Case(lookups=((kind, 5),) * 9))
    with pytest.raises(RuntimeError, match="more than 8 lookups"):
        kernel.attention(a)
    kernel.attention(
        a._replace(lookups=a.lookups[5:], maps=a.maps[1:], entries=a.entries[1:], scales=a.scales[1:])
    )


def test_keys_that_read_by_their_own_place_are_refused() -> None:
    a, _ = called(Case(lookups=(("key", 5),)))
    with pytest.raises(RuntimeError, match="keys read by their own places"):
        kernel.attention(a._replace(lookups=[BY_KEY, 1, 1, 0, -1], maps=[a.maps[0][:, :3, :4].contiguous()]))


def test_instructions_that_do_not_run_here_are_told_apart() -> None:
    """So that tests of them are left out, not broken, on a lesser machine."""
    before = kernel._library
    with on("avx1024") as runs:
        assert not runs
    assert kernel._library is before


@pytest.mark.usefixtures("isa")
def test_too_many_features_are_refused() -> None:
    a, _ = called(Case((0, 1, 2, 2), features=1025, batch=1, heads=1))
    with pytest.raises(RuntimeError, match="more than 1024 features"):
        kernel.attention(a)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a sum": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "of each feature": lambda x: x[:1, :1, :1].expand_as(x),
    "of each token": lambda x: x[..., :1].expand_as(x),
    "features apart": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "within wider rows": lambda x: torch.nn.functional.pad(x, (3, 5))[..., 3:-5],
    "negative": lambda x: torch.complex(x, x).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_output_may_lie_anyhow(layout: str) -> None:
    a, grad_out = called(Case((1, 1, 4, 5), lookups=QKV))
    laid = LAYOUTS[layout](grad_out)
    expected = results(a, laid.resolve_neg().contiguous())
    for what, value in results(a, laid).items():
        assert torch.equal(value, expected[what]), what
