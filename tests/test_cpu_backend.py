"""The cpu backend: the kernel against its interface written again, forms against the reference, operators."""

import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

import emulated
from loops import close, leaf, same_gradients
from test_attention import (
    BATCH,
    BUCKETS,
    GRID,
    HEAD_DIM,
    HEADS,
    SAYINGS,
    TOKENS,
    Says,
    low_rank,
    offsets,
    some_mask,
)
from test_forms import Largest
from whereformer import (
    AxisBias,
    BucketBias,
    BucketValues,
    DenseBias,
    Grid,
    InputError,
    OffsetBias,
    PositionEncoding,
    Rotation,
    attention,
    backends,
    describe,
    equip,
    explain,
    parse,
)
from whereformer.backends import cpu, kernel, library, lookups
from whereformer.backends.call import Call
from whereformer.backends.kernel import BY_KEY, BY_QUERY, SHARED, VALUES, Arguments
from whereformer.forms import Scores
from whereformer.index import Buckets, Clip, Separable

compiled = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing() or "-")


def test_the_kernel_is_here_where_it_can_be_built() -> None:
    """So that no machine with a compiler passes the tests below by leaving them out."""
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        assert not kernel.missing(), library.why_missing()


# ---------------------------------------------------------------------------------------------------------------
# The kernel against its interface.

Lookup = tuple[int, int, int, int, Tensor, Tensor]
"""kind, by_table, absolute, mirrored, map, entries."""


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


@pytest.fixture
def _nan_in_fresh_memory() -> Iterator[None]:
    """What is not written shows."""
    torch.use_deterministic_algorithms(True)
    assert deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


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


# ---------------------------------------------------------------------------------------------------------------
# Forms as lookups, exactly: in float64, the kernel written again in its place.


@pytest.mark.parametrize("mask_kind", ["none", "boolean", "-inf"])
@pytest.mark.parametrize("saying", SAYINGS)
def test_forms_become_lookups(saying: str, mask_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    encoding = SAYINGS[saying]()
    mask = some_mask(mask_kind)[0]
    expected = attention(q, k, v, GRID, [encoding], mask=mask, backend="reference")
    why = cpu.cannot(encoding.forms)
    if saying in ("dense", "dense, one axis", "dense, no axis", "dense, two axes"):
        assert bool(why) == (saying != "dense")  # that one says the same to all queries
    else:
        assert not why
    if why:
        return
    monkeypatch.setattr(kernel, "attention", emulated.attention)
    monkeypatch.setattr(backends, "choose", lambda *_: cpu.attend)
    got = attention(q, k, v, GRID, [encoding], mask=mask)
    leaves = [
        t
        for form in (*encoding.forms.rotations, *encoding.forms.biases, *encoding.forms.values)
        for t in vars(form).values()
        if isinstance(t, Tensor)
    ]
    same_gradients(got, expected, {"q": q, "k": k, "v": v} | {f"leaf {n}": t for n, t in enumerate(leaves)})


def seen(monkeypatch: pytest.MonkeyPatch, grid: Grid, text: str, keys: Grid | None = None) -> Arguments:
    """What the kernel is given for an encoding, in float64."""
    found: list[Arguments] = []

    def spy(a: Arguments) -> Tensor:
        found.append(a)
        return emulated.attention(a)

    monkeypatch.setattr(kernel, "attention", spy)
    monkeypatch.setattr(backends, "choose", lambda *_: cpu.attend)
    q, k, v = (torch.randn(1, 2, (g or grid).tokens, 12, dtype=torch.float64) for g in (None, keys, keys))
    encodings = [factory(24, 2, grid).double() for factory in parse(text)]
    attention(q, k, v, grid, encodings, keys=keys)
    assert len(found) == 1
    return found[0]


def kinds(a: Arguments) -> list[tuple[int, int]]:
    """Kind and by_table of each lookup."""
    step = len(kernel.FIELDS)
    return [(a.lookups[n], a.lookups[n + 1]) for n in range(0, len(a.lookups), step)]


class Few(PositionEncoding):
    """Its table has scores for the first buckets only."""

    mapping = Separable(Clip(2), Clip(2))

    def __init__(self, extra: int, side: str) -> None:
        super().__init__(HEADS * HEAD_DIM, HEADS, GRID)
        self.extra, self.side = extra, side
        self.table = nn.Parameter(torch.randn(1, HEAD_DIM, self.mapping.count + 1 - extra))

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[BucketBias, ...]:
        scores = Scores(q if self.side == "query" else k, self.table, extra=self.extra)
        return (BucketBias(scores, Buckets(self.mapping, queries, keys), self.side),)  # type: ignore[arg-type]


@compiled
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("extra", [0, 1, 2, 9, 25])
def test_buckets_behind_the_table_say_nothing(extra: int, side: str) -> None:
    torch.manual_seed(0)
    encoding = Few(extra, side)
    q, k, v = (torch.randn(2, HEADS, GRID.tokens, HEAD_DIM, requires_grad=True) for _ in range(3))
    ours, definition = (attention(q, k, v, GRID, [encoding], backend=name) for name in ("cpu", "reference"))
    same_gradients(ours, definition, {"q": q, "k": k, "v": v, "table": encoding.table})


@pytest.mark.parametrize(
    ("text", "lookups", "features", "turns"),
    [
        ("none", [], 12, 0),
        ("irpe(on='qkv')", [(BY_QUERY, 1), (BY_KEY, 1), (VALUES, 0)], 12, 0),
        ("irpe(mode='bias', on='qk')", [(SHARED, 0), (SHARED, 0)], 12, 0),
        ("irpe(method='cross')", [(BY_QUERY, 1), (BY_QUERY, 1)], 12, 0),
        ("swin", [(SHARED, 0)], 12, 0),
        ("alibi", [(SHARED, 0)], 12, 0),
        ("beit", [(SHARED, 0)], 14, 0),
        ("decomposed", [(BY_QUERY, 2), (BY_QUERY, 2)], 12, 0),
        ("shaw", [(BY_QUERY, 2), (VALUES, 0)], 12, 0),
        ("rope_axial", [], 12, 4),
        ("rope_axial + irpe", [(BY_QUERY, 1)], 12, 4),
        ("rope_mixed", [], 12, 0),
        ("rope_mixed + irpe", [(BY_QUERY, 0)], 12, 0),
        ("rope_axial + rope1d", [], 12, 0),
    ],
)
def test_how_encodings_are_put_to_the_kernel(
    text: str, lookups: list[tuple[int, int]], features: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By table where q or k itself reads; turned by the kernel if angles are fixed and there is one rotation."""
    a = seen(monkeypatch, Grid(3, 4, prefix=1), text)
    assert kinds(a) == lookups
    assert a.q.shape[-1] == features
    assert len(a.turns) == turns


def test_maps_are_kept_and_can_be_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(3, 5, prefix=1)
    with torch.inference_mode():
        first = seen(monkeypatch, grid, "irpe")
    second = seen(monkeypatch, Grid(3, 5, prefix=1), "irpe")
    assert first.maps[0] is second.maps[0]
    assert not first.maps[0].is_inference()
    other = seen(monkeypatch, Grid(5, 3, prefix=1), "irpe")
    assert other.maps[0].shape != first.maps[0].shape


# ---------------------------------------------------------------------------------------------------------------
# As part of torch.


def qkv(grid: Grid, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (leaf(BATCH, HEADS, grid.tokens, HEAD_DIM, dtype=dtype) for _ in range(3))
    return q, k, v


def some(text: str, grid: Grid = GRID) -> list[PositionEncoding]:
    """Encodings with random parameters, in float32."""
    encodings = [factory(HEADS * HEAD_DIM, HEADS, grid) for factory in parse(text)]
    for encoding in encodings:
        for parameter in encoding.parameters():
            torch.nn.init.normal_(parameter)
    return encodings


TOGETHER = "irpe(on='qkv') + rope_axial + swin + lepe + irpe(mode='bias')"


@compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of opcheck's own
@pytest.mark.parametrize("text", ["none", "irpe(on='qkv')", TOGETHER, "rope_mixed + irpe", "sasa"])
@pytest.mark.parametrize("mask_kind", ["none", "-inf"])
def test_operators_are_what_they_say(text: str, mask_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake kernels, autograd and tracing, by torch's own check."""
    found: list[Arguments] = []
    monkeypatch.setattr(kernel, "attention", lambda a: (found.append(a), torch.zeros(()))[1])
    mask = some_mask(mask_kind)[0]
    q, k, v = qkv(GRID)
    attention(q, k, v, GRID, some(text), mask=None if mask is None else mask.detach().float(), backend="cpu")
    (a,) = found

    def leaves(x: object, wants: bool) -> object:
        if isinstance(x, Tensor):
            return x.detach().requires_grad_(wants and x.requires_grad)
        return [leaves(y, wants) for y in x] if isinstance(x, list) else x

    forward = torch.ops.whereformer.attention.default
    torch.library.opcheck(forward, (*(leaves(x, True) for x in a), True))
    plain = [leaves(x, False) for x in a]
    torch.library.opcheck(forward, (*plain, False))
    out, lse = forward(*plain, True)
    wanted = [n % 2 == 0 for n in range(len(a.entries))]
    backward = torch.ops.whereformer.attention_backward.default
    torch.library.opcheck(backward, (torch.randn_like(out), out, lse, *plain, wanted))


@compiled
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    encodings = some(TOGETHER)
    torch.compiler.reset()

    def function(q: Tensor, k: Tensor, v: Tensor, height: int, width: int) -> Tensor:
        return attention(q, k, v, Grid(height, width, GRID.prefix), encodings, backend="cpu")

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for height, width in ((3, 2), (4, 5))[: 1 + dynamic]:
        grid = Grid(height, width, GRID.prefix)
        q, k, v = qkv(grid)
        sources = {"q": q, "k": k, "v": v} | {
            f"{n}.{name}": p for n, e in enumerate(encodings) for name, p in e.named_parameters()
        }
        same_gradients(compiled(q, k, v, height, width), function(q, k, v, height, width), sources)
    torch.compiler.reset()


class Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encodings = torch.nn.ModuleList(some(TOGETHER))

    def forward(self, image: Tensor) -> Tensor:
        """[batch, dim, height, width]."""
        x = image.flatten(2).mT.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        x = torch.nn.functional.pad(x, (0, 0, GRID.prefix, 0), value=0.5)
        grid = Grid(image.shape[2], image.shape[3], GRID.prefix)
        return attention(x, x.roll(1, -1), x, grid, list(self.encodings), backend="cpu")  # type: ignore[arg-type]


@compiled
def test_exports_with_free_sizes() -> None:
    model = Exported().eval()
    free = {0: torch.export.Dim("batch", min=1, max=9)}
    free |= {2: torch.export.Dim("height", min=2, max=64), 3: torch.export.Dim("width", min=2, max=64)}
    with torch.no_grad():
        image = torch.randn(2, HEADS * HEAD_DIM, 3, 4)
        exported = torch.export.export(model, (image,), dynamic_shapes=(free,)).module()
        for batch, height, width in ((2, 3, 4), (1, 5, 2), (3, 7, 8)):
            image = torch.randn(batch, HEADS * HEAD_DIM, height, width)
            close(exported(image), model(image))


@compiled
def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = qkv(GRID)
    out = attention(q, k, v, GRID, some("irpe"), backend="cpu")
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward.*backend='reference'"):
        gradient.sum().backward()


@compiled
def test_output_and_gradients_lie_as_models_want_them() -> None:
    """The output as [batch, tokens, heads, d], so that heads are joined without a copy; gradients as inputs."""
    whole = torch.randn(BATCH, TOKENS, 3, HEADS, HEAD_DIM, requires_grad=True)
    q, k, v = whole.permute(2, 0, 3, 1, 4).unbind(0)
    out = attention(q, k, v, GRID, some("irpe(on='qkv')"), backend="cpu")
    assert out.transpose(1, 2).is_contiguous()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.transpose(1, 2).is_contiguous() for g in gradients)


@compiled
@pytest.mark.parametrize("where", ["features", "broadcast", "expanded gradient"])
def test_any_strides(where: str) -> None:
    q, k, v = qkv(GRID)
    expected = attention(q, k, v, GRID, some_irpe := some("irpe(on='qkv')"), backend="reference")
    if where == "features":
        q_, k_, v_ = (x.detach().mT.contiguous().mT for x in (q, k, v))
        close(attention(q_, k_, v_, GRID, some_irpe, backend="cpu"), expected)
    elif where == "broadcast":
        one = torch.randn(1, 1, TOKENS, HEAD_DIM).expand(BATCH, HEADS, -1, -1)
        close(
            attention(one, one, one, GRID, some_irpe, backend="cpu"),
            attention(one, one, one, GRID, some_irpe, backend="reference"),
        )
    else:
        got = attention(q, k, v, GRID, some_irpe, backend="cpu")
        for g, e in zip(
            torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
        ):
            close(g, e)


@compiled
@pytest.mark.parametrize("which", ["q", "k", "v", "gradient"])
@pytest.mark.parametrize(
    "odd", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)], ids=["negatives", "zeros"]
)
def test_numbers_that_do_not_lie_in_memory(odd: Callable[[Tensor], Tensor], which: str) -> None:
    """Such as the imaginary part of a conjugate, or zeros that need no memory; called again, too."""
    encodings = some("irpe(on='qkv')")
    for _ in range(3):
        found = []
        for backend in ("cpu", "reference"):
            torch.manual_seed(0)
            given = dict(zip("qkv", (x.detach() for x in qkv(GRID)), strict=True))
            given["gradient"] = torch.randn_like(given["v"])
            given[which] = odd(given[which])
            *inputs, grad_out = [x.requires_grad_(name != "gradient") for name, x in given.items()]
            out = attention(*inputs, GRID, encodings, backend=backend)
            found.append([out, *torch.autograd.grad(out, [*inputs, *encodings[0].parameters()], grad_out)])
        for got, expected in zip(*found, strict=True):
            close(got, expected)


@compiled
@pytest.mark.parametrize("text", ["irpe(on='qkv')", "swin", "decomposed", "rope_axial"])
def test_nothing_of_queries_times_keys_is_made(text: str) -> None:
    """Forward or backward: the largest tensor has a number for each token and feature, or for each offset."""
    grid = Grid(9, 9, prefix=1)
    q, k, v = qkv(grid)
    encodings = some(text, grid)
    with Largest() as largest:
        attention(q, k, v, grid, encodings, backend="cpu").sum().backward()
    assert largest.numel <= max(q.numel(), HEADS * 17 * 17)
    assert largest.numel < BATCH * grid.tokens**2


class Called(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@compiled
def test_the_operator_is_there_for_all_who_look() -> None:
    """Modes and profilers see it; where nobody looks the kernel is called without it, with the same numbers."""
    q, k, v = qkv(GRID)
    encodings = some("irpe(on='qkv')")

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, GRID, encodings, backend="cpu")
        return out, *torch.autograd.grad(out.sum(), (q, k, v, *encodings[0].parameters()))

    plain = step()
    with Called() as called:
        looked_at = step()
    assert {"whereformer.attention.default", "whereformer.attention_backward.default"} <= set(called.names)
    with torch.profiler.profile() as profile:
        step()
    assert {"whereformer::attention", "whereformer::attention_backward"} <= {e.key for e in profile.key_averages()}
    with Called() as called, torch.inference_mode():
        inferred = attention(q, k, v, GRID, encodings, backend="cpu")
    assert "whereformer.attention.default" in called.names
    for one, other in zip(plain, looked_at, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain[0], inferred)


@compiled
@pytest.mark.parametrize("where", ["k", "v", "table"])
def test_tensors_elsewhere_are_refused(where: str) -> None:
    """Their addresses mean nothing to the kernel."""
    tensors = {name: torch.zeros(BATCH, HEADS, TOKENS, HEAD_DIM) for name in "qkv"}
    (encoding,) = some("irpe")
    if where == "table":
        encoding = encoding.to("meta")
    else:
        tensors[where] = tensors[where].to("meta")
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match=r"\['cpu', 'meta'\], expected one device"),
        ):
            attention(*tensors.values(), GRID, [encoding], backend="cpu")


@compiled
def test_maps_made_under_a_mode_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, encodings = Grid(2, 9), some("irpe")
    with Called():
        attention(x := torch.zeros(1, HEADS, 18, HEAD_DIM), x, x, grid, encodings, backend="cpu")
    made = 0
    mapping = lookups._made

    def counted(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return mapping(*arguments)

    monkeypatch.setattr(lookups, "_made", counted)
    for _ in range(2):
        attention(x, x, x, grid, encodings, backend="cpu")
    assert made == 1


@compiled
def test_no_images_and_no_gradient() -> None:
    q, k, v = (torch.zeros(0, HEADS, TOKENS, HEAD_DIM, requires_grad=True) for _ in range(3))
    encodings = some("irpe(on='qkv')")
    out = attention(q, k, v, GRID, encodings, backend="cpu")
    assert out.shape == q.shape
    out.sum().backward()
    assert all(not p.grad.any() for p in encodings[0].parameters() if p.grad is not None)


@compiled
def test_trains_after_inference_mode() -> None:
    q, k, v = qkv(GRID)
    encodings = some(TOGETHER)
    with torch.inference_mode():
        expected = attention(q, k, v, GRID, encodings, backend="cpu")
    out = attention(q, k, v, GRID, encodings, backend="cpu")
    close(out, expected)
    out.sum().backward()


@compiled
def test_under_autocast() -> None:
    """Tokens go in as bfloat16, tables stay float32."""
    q, k, v = qkv(GRID)
    encodings = some("irpe(on='qkv')")
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, GRID, encodings, backend="cpu")
        plain = attention(q, k, v, GRID, backend="reference")
    assert out.dtype == plain.dtype == torch.bfloat16
    out.float().sum().backward()
    for x in (q, *encodings[0].parameters()):
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
    halves = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), GRID, encodings, backend="cpu")
    assert (halves - out).abs().max() <= torch.finfo(torch.bfloat16).eps * out.abs().max()


def _on_its_part(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Exported())
    images = torch.randn(2, HEADS * HEAD_DIM, 3, 4)
    model(images[rank : rank + 1]).sum().backward()
    if rank == 0:
        results.update({name: p.grad for name, p in model.module.named_parameters()})
    torch.distributed.destroy_process_group()


@compiled
def test_two_processes_share_their_gradients(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_on_its_part, (str(tmp_path / "store"), results), nprocs=2)
        got = dict(results)
    torch.manual_seed(0)
    model, images = Exported(), torch.randn(2, HEADS * HEAD_DIM, 3, 4)
    (model(images).sum() / 2).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        close(got[name], parameter.grad)


# ---------------------------------------------------------------------------------------------------------------
# What it cannot serve, and says so.


@compiled
def test_auto_is_the_kernel_where_it_serves() -> None:
    q, k, v = qkv(GRID)
    assert backends.choice("auto", SAYINGS["bucket values"]().forms, Call(q, k, v)) == ("cpu", {})
    doubles = Call(q.double(), k.double(), v.double())
    found = backends.choice("auto", SAYINGS["offsets"]().forms, doubles)
    assert found.backend == "sdpa"
    assert "float64" in found.refused["cpu"]
    assert str(found) == "sdpa (not cpu: float64, where it computes in float32 and bfloat16)"


def test_explain_says_which_backend_and_why() -> None:
    encodings, q = some("huang(method=1)"), torch.zeros(BATCH, HEADS, TOKENS, HEAD_DIM)
    assert str(explain(q, q, q, GRID, encodings)) == "sdpa (not cpu: DenseBias is no lookup in a table)"
    found = explain(q, q, q, GRID, some("irpe(on='v')"), dropout=0.5)
    assert found.backend == "reference"
    assert (found.refused["cpu"], list(found.refused)) == ("dropout", ["cpu", "sdpa"])
    with pytest.raises(InputError, match="q has 7 tokens"):
        explain(q, q, q, Grid(2, 2))


@compiled
def test_bfloat16_goes_where_amx_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """If sdpa makes nothing of queries x keys: at once if nothing is said, else from many keys on."""
    few, many = Grid(3, 4), Grid(40, 40)

    def taken(grid: Grid, text: str, *, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> str:
        q = torch.zeros(1, HEADS, grid.tokens, HEAD_DIM, dtype=dtype, requires_grad=learns)
        return str(explain(q, q, q, grid, some(text, grid)))

    monkeypatch.setattr(cpu, "_amx", lambda: False)
    assert taken(few, "none") == taken(many, "none") == "cpu"
    monkeypatch.setattr(cpu, "_amx", lambda: True)
    there = "sdpa (not cpu: bfloat16, which it computes in float32 and torch on AMX)"
    assert taken(few, "none") == taken(few, "lepe") == there
    assert taken(many, "rope_axial") == taken(many, "none", learns=True) == there
    assert taken(few, "rope_axial") == taken(few, "none", learns=True) == "cpu"
    assert taken(many, "swin") == taken(many, "irpe(on='v')") == taken(many, "decomposed") == "cpu"
    assert taken(many, "none", dtype=torch.float32) == "cpu"
    with torch.autocast("cpu", torch.bfloat16):
        assert taken(few, "none", dtype=torch.float32) == there
    q = torch.zeros(1, HEADS, few.tokens, HEAD_DIM, dtype=torch.bfloat16)
    assert str(explain(q, q, q, few, mask=torch.ones(few.tokens, dtype=torch.bool))) == "cpu"
    assert attention(q, q, q, few, backend="cpu").dtype == torch.bfloat16


@compiled
def test_describe_says_which_backend_a_model_takes() -> None:
    timm = pytest.importorskip("timm")
    model = equip(timm.create_model("vit_tiny_patch16_224", depth=2, attn_drop_rate=0.1), "learned + irpe(on='v')")
    names = ["blocks.0.attn", "blocks.1.attn"]
    assert describe(model.eval()).attentions == tuple((name, "cpu") for name in names)
    assert "attention of blocks.0.attn ... blocks.1.attn: cpu" in str(describe(model))
    assert all(
        backend.startswith("reference (not cpu: dropout; not sdpa: BucketValues")
        for _, backend in describe(model.train()).attentions
    )


X = torch.zeros(BATCH, HEADS, TOKENS, HEAD_DIM)
WIDE = torch.zeros(BATCH, HEADS, TOKENS, 257)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(*[X.double()] * 3, GRID, backend="cpu"), "float64, where it computes in float32"),
        (lambda: attention(*[X.half()] * 3, GRID, backend="cpu"), "float16, where it computes in float32"),
        (lambda: attention(X, X, X, GRID, dropout=0.5, backend="cpu"), "dropout"),
        (lambda: attention(*[X.to("meta")] * 3, GRID, backend="cpu"), "tensors on meta"),
        (lambda: attention(WIDE, WIDE, WIDE, GRID, backend="cpu"), "257 features a head, more than 256"),
        (
            lambda: attention(X, X, X, GRID, [Says(low_rank(249))], backend="cpu"),
            "257 features a head, more than 256",
        ),
        (lambda: attention(X, X, X, GRID, [Says(*[offsets()] * 9)], backend="cpu"), "9 lookups, more than 8"),
        (
            lambda: attention(X, X, X, GRID, mask=torch.zeros(TOKENS, requires_grad=True), backend="cpu"),
            "a mask that asks for a gradient",
        ),
        (lambda: attention(X, X, X, GRID, [Says(DenseBias(X.mT @ X))], backend="cpu"), "DenseBias is no lookup"),
        (
            lambda: attention(X, X, X, GRID, some("shaw + shaw(offsets='raster')"), backend="cpu"),
            "different grids",
        ),
        (
            lambda: attention(
                *[X[..., :5, :]] * 3, GRID.keep(torch.tensor([[0, 1, 3, 5]])), some("irpe"), backend="cpu"
            ),
            "lookups where patches do not fill their grid",
        ),
    ],
)
def test_what_the_kernel_cannot(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=f"backend='cpu' cannot serve: .*{message}"):
        call()


@compiled
@pytest.mark.parametrize(
    ("saying", "message"),
    [
        (lambda: Says(rotations=(Rotation(torch.zeros(1, TOKENS - 1, HEAD_DIM)),)), "cos or sin"),
        (lambda: Says(rotations=(Rotation(torch.zeros(HEADS + 1, TOKENS - 1, 2)),)), "cos or sin"),
        (lambda: Says(OffsetBias(torch.zeros(HEADS + 1, 5, 3), GRID, GRID)), "table or scores"),
        (lambda: Says(OffsetBias(torch.zeros(1, 9, 9), Grid(5, 5), Grid(5, 5))), "queries on"),
        (lambda: Says(AxisBias(torch.zeros(TOKENS, 5), torch.zeros(TOKENS, 5), Grid(5, 5))), "keys on"),
        (lambda: Says(values=(BucketValues(torch.zeros(HEADS + 1, 10, HEAD_DIM), BUCKETS),)), "table or scores"),
        (lambda: Says(values=(BucketValues(torch.zeros(1, 10, HEAD_DIM + 1), BUCKETS),)), "table or scores"),
    ],
)
def test_forms_that_do_not_fit_never_reach_the_kernel(saying: Callable[[], Says], message: str) -> None:
    """It reads and writes where sizes say: a form of other heads or another grid would be read past its end."""
    with pytest.raises(InputError, match=message):
        attention(X, X, X, GRID, [saying()], backend="cpu")


def test_transforms_of_torch_func_go_another_way() -> None:
    q, encodings = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM, requires_grad=True), some("irpe")

    def total(q: Tensor, backend: str = "auto") -> Tensor:
        return attention(q, q, q, GRID, encodings, backend=backend).square().sum()

    (expected,) = torch.autograd.grad(total(q, "reference"), q)
    close(torch.func.grad(total)(q.detach()), expected)
    with pytest.raises(InputError, match=r"backend='cpu' cannot serve: a transform of torch\.func"):
        torch.func.grad(lambda q: total(q, "cpu"))(q.detach())


@compiled
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:FutureWarning"
)  # of torch's own, for its formulas
@pytest.mark.parametrize("text", ["irpe(on='qkv')", "swin", "none"])
def test_derivatives_in_forward_mode_go_another_way(text: str) -> None:
    """Frozen parameters: nothing else asks for a gradient."""
    q, tangent = torch.randn(2, BATCH, HEADS, TOKENS, HEAD_DIM)
    encodings = [encoding.requires_grad_(False) for encoding in some(text)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        got, expected = (
            forward_ad.unpack_dual(attention(dual, q, q, GRID, encodings, backend=backend)).tangent
            for backend in ("auto", "reference")
        )
        assert got is not None
        close(got, expected)
        with pytest.raises(InputError, match="backend='cpu' cannot serve: derivatives in forward mode"):
            attention(dual, q, q, GRID, encodings, backend="cpu")


def test_without_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "missing", lambda: "the compiled kernel was not built at installation")
    with pytest.raises(InputError, match=r"cannot serve: the compiled kernel was not built.*Use 'auto'"):
        attention(X, X, X, GRID, backend="cpu")
    assert torch.equal(attention(X, X, X, GRID), X)


@compiled
def test_instructions_that_are_none() -> None:
    code = """
import torch, whereformer
x = torch.zeros(1, 1, 6, 8)
print(whereformer.explain(x, x, x, whereformer.Grid(2, 3)))
whereformer.attention(x, x, x, whereformer.Grid(2, 3))
"""
    environment = os.environ | {"WHEREFORMER_ISA": "avx1024"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip() == "sdpa (not cpu: WHEREFORMER_ISA='avx1024' names no instructions that run here)"


def test_a_library_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_text("text")
    monkeypatch.setenv(library.ENVIRONMENT, str(tmp_path / "kernel.so"))
    with pytest.raises(OSError, match=r"kernel\.so"):
        kernel._library.__wrapped__()
