"""The cpu backend: forms as lookups, and what it cannot serve."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import emulated
from kernel_calls import compiled
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
from whereformer.backends import cpu, kernel, library
from whereformer.backends.call import Call
from whereformer.backends.kernel import BY_KEY, BY_QUERY, SHARED, VALUES, Arguments
from whereformer.forms import Scores
from whereformer.index import Buckets, Clip, Separable


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
