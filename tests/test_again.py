"""Calls like one before: nothing of it may be seen but that they are faster."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from kernel_calls import compiled
from whereformer import Grid, InputError, PositionEncoding, again, attention, equip, parse
from whereformer.backends import kernel
from whereformer.backends.prepared import THREADS, Prepared
from whereformer.catalog import CATALOG
from whereformer.encoding import overridden
from whereformer.encodings import IRPE, Swin

pytestmark = compiled

GRID = Grid(3, 4, prefix=1)
HEADS, WIDTH = 2, 8
KEPT = (
    "none",
    "irpe(on='qkv')",
    "irpe(method='cross', shared=False, on='kv')",
    "irpe(mode='bias')",
    "swin",
    "eva02",
)
"""What can be kept, none with a sum over threads."""


def made(text: str, grid: Grid = GRID) -> list[PositionEncoding]:
    torch.manual_seed(0)
    found = [factory(HEADS * WIDTH, HEADS, grid) for factory in parse(text)]
    for encoding in found:
        for parameter in encoding.parameters():
            nn.init.normal_(parameter)
    return found


def tokens(grid: Grid = GRID, batch: int = 2, seed: int = 1) -> list[Tensor]:
    """q, k and v in one memory, as most hosts have them."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(batch, grid.tokens, 3, HEADS, WIDTH, generator=generator)
    return list(qkv.permute(2, 0, 3, 1, 4).unbind(0))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Prepared]]:
    """The prepared calls that were used."""
    found: list[Prepared] = []
    forward = Prepared.forward

    def spy(self: Prepared, *arguments: object) -> Tensor:
        found.append(self)
        return forward(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Prepared, "forward", spy)
    again._silent.calls.clear()
    yield found
    again._silent.calls.clear()


def attend(encodings: list[PositionEncoding], grid: Grid = GRID, seed: int = 1, times: int = 1) -> Tensor:
    for _ in range(times - 1):
        attention(*tokens(grid, seed=seed), grid, encodings, backend="cpu")
    return attention(*tokens(grid, seed=seed), grid, encodings, backend="cpu")


def anew(encodings: list[PositionEncoding], grid: Grid = GRID, seed: int = 1) -> Tensor:
    """As `attend`, of encodings that were in no call."""
    again._silent.calls.clear()
    return attend(copy.deepcopy(encodings), grid, seed)


def gradients(encodings: list[PositionEncoding], seed: int = 1, **options: object) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in tokens(seed=seed)]
    out = attention(*given, GRID, encodings, backend="cpu")
    wanted = [*given, *(p for e in encodings for p in e.parameters() if p.requires_grad)]
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out, *torch.autograd.grad(out, wanted, grad_out, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize("text", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(text: str, dtype: torch.dtype, starts: list[Prepared]) -> None:
    encodings = made(text)
    found = []
    for _ in range(3):
        given = [x.to(dtype).requires_grad_() for x in tokens()]
        out = attention(*given, GRID, encodings, backend="cpu")
        wanted = [*given, *(p for e in encodings for p in e.parameters())]
        found.append([out, *torch.autograd.grad(out.float().square().sum(), wanted)])
        with torch.inference_mode():
            assert torch.equal(attention(*given, GRID, encodings, backend="cpu"), out)
    kept = dtype == torch.float32 or text not in ("none", "eva02", "irpe(mode='bias')")
    assert len(starts) == (4 if kept else 0)
    for first, second, third in zip(*found, strict=True):
        assert first.stride() == second.stride() == third.stride()
        assert torch.equal(first, second)
        assert torch.equal(first, third)


STEADY = [name for name, cls in CATALOG.items() if cls.steady and overridden(cls) not in ((), ("tokens",))]
"""Whatever says of itself that it is steady, and speaks."""


@pytest.mark.parametrize("text", STEADY)
def test_who_is_steady_says_the_same(text: str, starts: list[Prepared]) -> None:
    """On its home grid and on others, of other tokens, after its parameters changed."""
    encodings = made(text)
    assert [type(e) for e in encodings] == [CATALOG[text]]
    for _ in range(5):
        for grid in (GRID, Grid(5, 2, prefix=1)):
            expected = attention(*tokens(grid, seed=3), grid, encodings, backend="reference")
            torch.testing.assert_close(attend(encodings, grid, seed=3), expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for parameter in encodings[0].parameters():
                parameter.add_(0.1)
    assert starts


def to_other_memory(e: IRPE) -> None:
    for parameter in e.parameters():
        parameter.data = parameter.data.clone() + 1


def through_bfloat16(e: IRPE) -> None:
    e.to(torch.bfloat16)


def out_of_order(e: IRPE) -> None:
    e.tables["k"].data = e.tables["k"].data.mT.contiguous().mT + 1


def loaded(e: IRPE) -> None:
    e.load_state_dict({name: x + 1 for name, x in e.state_dict().items()}, assign=True)


def another_table(e: IRPE) -> None:
    e.tables["v"] = nn.Parameter(torch.ones_like(e.tables["v"]))


def other_tables(e: IRPE) -> None:
    e.tables = nn.ParameterDict({name: nn.Parameter(x + 1) for name, x in e.tables.items()})


def of_each_head(e: IRPE) -> None:
    e.tables["k"] = nn.Parameter(torch.randn(HEADS, *e.tables["k"].shape[1:]))


def parametrized(e: IRPE) -> None:
    parametrize.register_parametrization(e.tables, "k", nn.Tanh())


def on_less(e: IRPE) -> None:
    e.on = "k"


def of_another_index(e: IRPE) -> None:
    e.mappings = IRPE(HEADS * WIDTH, HEADS, GRID, method="product", index="clip", beta=3).mappings


@pytest.mark.parametrize(
    "change",
    [
        *(to_other_memory, through_bfloat16, out_of_order, loaded, another_table, other_tables),
        *(of_each_head, parametrized, on_less, of_another_index),
    ],
)
def test_what_was_changed_is_seen(change: Callable[[IRPE], None], starts: list[Prepared]) -> None:
    (encoding,) = encodings = made("irpe(on='qkv')")
    assert isinstance(encoding, IRPE)
    before = attend(encodings, times=3)
    assert starts
    change(encoding)
    expected = anew(encodings)
    assert not torch.equal(before, expected)
    for _ in range(4):
        assert torch.equal(attend(encodings), expected)


def test_numbers_changed_in_place_are_seen(starts: list[Prepared]) -> None:
    encodings = made("irpe(on='qkv')")
    with torch.inference_mode():
        attend(encodings, times=3)
        for parameter in encodings[0].parameters():
            parameter.add_(1)
        assert torch.equal(attend(encodings), anew(encodings))
    assert len(starts) == 2


def test_a_resized_encoding(starts: list[Prepared]) -> None:
    encodings, other = made("swin"), Grid(4, 5, prefix=1)
    attend(encodings, times=3)
    encodings[0].resize(other)
    for grid in (GRID, other) * 3:
        assert torch.equal(attend(encodings, grid), anew(encodings, grid))
    assert {start.out[0][2] for start in starts} == {GRID.tokens, other.tokens}


def test_grids_in_turn(starts: list[Prepared]) -> None:
    encodings = made("irpe(on='qkv')")
    grids = (GRID, Grid(4, 3, prefix=1), Grid(1, 12, prefix=1), Grid(3, 4), GRID, Grid(4, 3, prefix=1))
    expected = [anew(encodings, grid) for grid in grids]
    for _ in range(3):
        for grid, wanted in zip(grids, expected, strict=True):
            assert torch.equal(attend(encodings, grid), wanted)
    assert len(set(starts)) == len(set(grids))


def test_layouts_in_turn(starts: list[Prepared]) -> None:
    encodings = made("irpe(on='qkv')")
    ways: list[Callable[[Tensor], Tensor]] = [lambda x: x, Tensor.contiguous, Tensor.bfloat16, lambda x: x[:1]]
    expected = [attention(*map(way, tokens()), GRID, copy.deepcopy(encodings), backend="cpu") for way in ways]
    for which in ([0, 1, 2, 3] * 3, [3, 2, 1, 0]):
        for n in which:
            q, k, v = map(ways[n], tokens())
            assert torch.equal(attention(q, k, v, GRID, encodings, backend="cpu"), expected[n])
            assert torch.equal(attention(q.contiguous(), k, v, GRID, encodings, backend="cpu"), expected[n])
    assert len(set(starts)) == 7  # all contiguous is one kind


def test_tables_that_are_one(starts: list[Prepared]) -> None:
    (encoding,) = encodings = made("irpe(on='qk')")
    assert isinstance(encoding, IRPE)
    encoding.tables["k"] = encoding.tables["q"]
    for _ in range(4):
        assert torch.equal(attend(encodings), anew(encodings))
    encoding.tables["q"] = nn.Parameter(encoding.tables["q"] + 1)
    for _ in range(9):
        assert torch.equal(attend(encodings), anew(encodings))
    assert starts


def test_few_kinds_are_kept() -> None:
    encodings = made("swin", Grid(2, 2))
    for batch in range(1, 3 * again.MOST):
        for _ in range(2):
            attention(*tokens(Grid(2, 2), batch), Grid(2, 2), encodings, backend="cpu")
    assert len(encodings[0].said_before.calls) == again.MOST


def test_without_a_gradient_of_a_table(starts: list[Prepared]) -> None:
    encodings = made("irpe(on='qkv')")
    all_of_them = [gradients(encodings) for _ in range(3)][-1]
    encodings[0].tables["q"].requires_grad_(False)  # type: ignore[index]
    names = [name for name, _ in encodings[0].named_parameters()]
    del all_of_them[4 + names.index("tables.q")]
    for got, wanted in zip(gradients(encodings), all_of_them, strict=True):
        assert torch.equal(got, wanted)
    assert len(starts) == 2


@pytest.mark.parametrize("text", KEPT)
def test_nothing_of_the_callers_is_held(text: str, starts: list[Prepared]) -> None:
    encodings = made(text)
    for seed in range(3):
        given = [x.clone().requires_grad_() for x in tokens(seed=seed)]
        out = attention(*given, GRID, encodings, backend="cpu")
        out.sum().backward()
        held = [weakref.ref(x) for x in (*given, out)]
        del given, out
        assert [x() for x in held] == [None] * 4
    of_encodings = [weakref.ref(x) for e in encodings for x in (e, *e.parameters())]
    encodings.clear()
    gc.collect()
    assert starts
    assert [x() for x in of_encodings] == [None] * len(of_encodings)


def test_tables_that_are_gone_are_not_held(starts: list[Prepared]) -> None:
    (encoding,) = encodings = made("irpe(on='k')")
    attend(encodings, times=3)
    held = weakref.ref(encoding.tables["k"])  # type: ignore[index]
    encoding.tables["k"] = nn.Parameter(torch.ones_like(encoding.tables["k"]))  # type: ignore[index, operator]
    assert held() is None


def test_copies_know_nothing(starts: list[Prepared]) -> None:
    encodings = made("irpe(on='qkv')")
    expected = attend(encodings, times=3)
    for copied in (copy.deepcopy(encodings), copy.copy(encodings), pickle.loads(pickle.dumps(encodings))):
        assert torch.equal(attend(copied), expected)
    shallow = copy.copy(encodings[0])
    for twin in (copy.deepcopy(encodings[0]), pickle.loads(pickle.dumps(encodings[0])), shallow):
        assert not hasattr(twin, "said_before")
        assert twin.state_dict().keys() == encodings[0].state_dict().keys()
    assert len(starts) == 2


def test_threads_do_not_meet() -> None:
    encodings = made("irpe(on='qkv')")
    expected = [anew(encodings, seed=seed) for seed in range(4)]
    wrong: list[int] = []

    def calls(seed: int) -> None:
        given = tokens(seed=seed)
        for _ in range(100):
            with torch.no_grad():
                if not torch.equal(attention(*given, GRID, encodings, backend="cpu"), expected[seed]):
                    wrong.append(seed)

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_within_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is called after all is packed, and before the kernel starts."""
    encodings = made("irpe(on='qkv')")
    expected = [anew(encodings, seed=seed) for seed in range(2)]
    attend(encodings, times=2)
    start, within = kernel.start, []

    def spy(*arguments: object) -> None:
        if not within:
            within.append(None)
            within.append(attend(encodings, seed=1))
        start(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "start", spy)
    assert torch.equal(attend(encodings, seed=0), expected[0])
    assert torch.equal(within[1], expected[1])


def test_as_many_threads_as_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    encodings, found, before = made("irpe(on='qkv')"), [], torch.get_num_threads()
    filled = Prepared._filled

    def spy(*arguments: object) -> object:
        words = filled(*arguments)  # type: ignore[arg-type]
        found.append(words[THREADS])
        return words

    monkeypatch.setattr(Prepared, "_filled", spy)
    attend(encodings, times=2)
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            attend(encodings)
    finally:
        torch.set_num_threads(before)
    assert found == [1, 3, 2]


def test_errors_are_as_before() -> None:
    encodings = made("irpe(on='qkv')")
    q, k, v = tokens()
    attend(encodings, times=3)
    with pytest.raises(InputError, match="has 13 tokens, but"):
        attention(q, k, v, Grid(3, 5, prefix=1), encodings, backend="cpu")
    with pytest.raises(InputError, match="expected the same"):
        attention(q, k[:, :, 1:], v, GRID, encodings, backend="cpu")
    with pytest.raises(InputError, match=r"dropout=1\.5"):
        attention(q, k, v, GRID, encodings, dropout=1.5, backend="cpu")
    with pytest.raises(InputError, match="backend='gpu'"):
        attention(q, k, v, GRID, encodings, backend="gpu")
    with pytest.raises(InputError, match="grid=13"):
        attention(q, k, v, 13, encodings, backend="cpu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="backend='cpu' cannot serve: dropout"):
        attention(q, k, v, GRID, encodings, dropout=0.5, backend="cpu")


def test_who_looks_sees_the_operator() -> None:
    encodings = made("irpe(on='qkv')")
    attend(encodings, times=3)
    for _ in range(3):
        attention(*tokens(), GRID, encodings)
    with torch.profiler.profile() as profile:
        attend(encodings)
    assert "whereformer::attention" in {event.name for event in profile.events()}
    given = tokens()
    expected = attention(*given, GRID, encodings, backend="reference")
    batched = torch.func.vmap(lambda q: attention(q, *given[1:], GRID, encodings))(given[0][None])
    torch.testing.assert_close(batched[0], expected)
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own way to its formulas
        dual = forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        assert forward_ad.unpack_dual(attention(dual, *given[1:], GRID, encodings)).tangent is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*given, GRID, encodings, backend="cpu").dtype == torch.bfloat16


def test_parameters_of_a_functional_call(starts: list[Prepared]) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encodings = nn.ModuleList(made("irpe(on='qkv')"))

        def forward(self, *given: Tensor) -> Tensor:
            return attention(*given, GRID, self.encodings, backend="cpu")  # type: ignore[arg-type]

    layer, given = Layer(), tokens()
    for _ in range(3):
        layer(*given)
    other = {name: (x + 1).detach() for name, x in layer.named_parameters()}
    out = torch.func.functional_call(layer, other, tuple(given))
    layer.load_state_dict(other)
    assert len(starts) == 2
    assert torch.equal(out, anew(list(layer.encodings)))  # type: ignore[arg-type]
    negative = {name: torch._neg_view(x) for name, x in other.items()}  # type: ignore[attr-defined]
    out = torch.func.functional_call(layer, negative, tuple(given))
    layer.load_state_dict(negative)
    assert torch.equal(out, anew(list(layer.encodings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", KEPT)
def test_what_is_computed_again_saves_the_same(text: str, starts: list[Prepared]) -> None:
    """Checkpointing compares; the call before it, and what is computed again, may be known or not."""
    encodings = made(text)
    expected = gradients(encodings)
    for _ in range(3):
        given = [x.detach().requires_grad_() for x in tokens()]
        out = checkpoint(lambda *x: attention(*x, GRID, encodings, backend="cpu"), *given, use_reentrant=False)
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        got = torch.autograd.grad(out, [*given, *(p for e in encodings for p in e.parameters())], grad_out)
        for one, other in zip(got, expected[1:], strict=True):
            assert torch.equal(one, other)
        gradients(encodings)
    assert len(starts) == 2


@pytest.mark.parametrize("width", [1, 2])
def test_a_gradient_of_any_layout(width: int, starts: list[Prepared]) -> None:
    encodings, found = made("irpe(on='qkv')"), []
    for _ in range(3):
        given = [x.detach().requires_grad_() for x in tokens()]
        out = attention(*given, GRID, encodings, backend="cpu")
        grad_out = torch.randn(*out.shape, width, generator=torch.Generator().manual_seed(3))[..., 0]
        found.append(torch.autograd.grad(out, [*given, *encodings[0].parameters()], grad_out))
    for first, third in zip(found[0], found[2], strict=True):
        assert torch.equal(first, third)
    assert len(starts) == 1


def test_no_second_derivative(starts: list[Prepared]) -> None:
    for text in ("none", "swin"):
        encodings = made(text)
        expected = gradients(encodings)
        gradients(encodings)
        got = gradients(encodings, create_graph=True)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)
        with pytest.raises(NotImplementedError, match="no gradients of gradients"):
            got[1].sum().backward()
    assert len(starts) == 2


def test_compiled_after_it_was_kept(starts: list[Prepared]) -> None:
    for text in ("none", "irpe(on='qkv')"):
        encodings, given = made(text), tokens()
        expected = attend(encodings, times=3)
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given, GRID, encodings, backend="cpu"), expected)
    assert len(starts) == 2


class Moody(Swin):
    """Says its bias at each second call only."""

    calls = 0

    def biases(self, *arguments: object) -> tuple:  # type: ignore[override]
        Moody.calls += 1
        return super().biases(*arguments) if Moody.calls % 2 else ()  # type: ignore[arg-type]


def test_a_class_says_of_itself_that_it_is_steady(starts: list[Prepared]) -> None:
    encodings: list[PositionEncoding] = [Moody(HEADS * WIDTH, HEADS, GRID, std=1.0)]
    odd, even = attend(encodings), attend(encodings)
    assert not torch.equal(odd, even)
    for _ in range(2):
        assert torch.equal(attend(encodings), odd)
        assert torch.equal(attend(encodings), even)
    assert not starts


def test_an_equipped_model_is_served(starts: list[Prepared]) -> None:
    """Its attention says where the keys are, too: on the same grid."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    equip(model, "irpe(on='qkv')")
    images = torch.randn(2, 3, 64, 64)
    outs = [model(images) for _ in range(4)]
    assert len(starts) == 2 * 2  # of two blocks, from the third call on
    assert all(torch.equal(outs[0], out) for out in outs)
