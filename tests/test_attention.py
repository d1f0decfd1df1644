"""Attention: the definition against loops, backends against the definition, masks, dropout, errors."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loops import attend, close, leaf, same_gradients, turn
from whereformer import (
    AddedValues,
    AxisBias,
    BucketBias,
    Buckets,
    BucketValues,
    DenseBias,
    Grid,
    InputError,
    LowRankBias,
    OffsetBias,
    Points,
    PositionEncoding,
    Rotation,
    Scores,
    attention,
    backends,
    parse,
)
from whereformer.backends import kernel, sdpa
from whereformer.backends.call import Call
from whereformer.encodings import IRPE, Learned
from whereformer.forms import Bias, Forms
from whereformer.index import Clip, Separable

GRID = Grid(3, 2, prefix=1)
BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, GRID.tokens, 8
LOGITS = (BATCH, HEADS, TOKENS, TOKENS)
BUCKETS = Buckets(Separable(Clip(1), Clip(1)), GRID, GRID)
ROWS, COLUMNS = Separable(Clip(1), None), Separable(None, Clip(1))
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)


class Says(PositionEncoding):
    """Says what it is told to."""

    def __init__(self, *biases: Bias, rotations: tuple[Rotation, ...] = (), values: tuple = ()) -> None:
        super().__init__(HEADS * HEAD_DIM, HEADS, GRID)
        self.forms = Forms(rotations, biases, values)

    def rotations(self, grid: Grid, device: torch.device | None = None) -> tuple[Rotation, ...]:
        return self.forms.rotations

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[Bias, ...]:
        return self.forms.biases

    def values(self, v: Tensor, queries: Grid, keys: Grid) -> tuple:
        return self.forms.values


def rotation(heads: int = HEADS, layout: str = "half") -> Rotation:
    return Rotation(leaf(heads, GRID.patches, 3), layout)  # type: ignore[arg-type]


def axis() -> AxisBias:
    return AxisBias(leaf(BATCH, HEADS, TOKENS, GRID.height), leaf(BATCH, HEADS, TOKENS, GRID.width), GRID)


def low_rank(rank: int = 4) -> LowRankBias:
    return LowRankBias(leaf(BATCH, HEADS, TOKENS, rank), leaf(1, HEADS, TOKENS, rank))


def offsets() -> OffsetBias:
    return OffsetBias(leaf(HEADS, 5, 3), GRID, GRID)


SAYINGS: dict[str, Callable[[], Says]] = {
    "nothing": lambda: Says(),
    "a rotation": lambda: Says(rotations=(rotation(),)),
    "two rotations": lambda: Says(rotations=(rotation(1, "interleaved"), rotation())),
    "low rank": lambda: Says(low_rank()),
    "low rank that does not fit": lambda: Says(low_rank(HEAD_DIM + 1)),
    "low rank twice, of which one fits": lambda: Says(low_rank(), low_rank(5)),
    "axes": lambda: Says(axis()),
    "axes twice, of which one fits": lambda: Says(axis(), axis()),
    "axes of unequal shapes": lambda: Says(AxisBias(leaf(BATCH, 1, TOKENS, 3), leaf(1, HEADS, 1, 2), GRID)),
    "offsets": lambda: Says(offsets()),
    "buckets of queries": lambda: Says(BucketBias(leaf(BATCH, HEADS, TOKENS, 10), BUCKETS)),
    "buckets of keys": lambda: Says(BucketBias(leaf(BATCH, 1, TOKENS, 10), BUCKETS, "key")),
    "buckets of rows": lambda: Says(BucketBias(leaf(BATCH, HEADS, TOKENS, 4), Buckets(ROWS, GRID, GRID))),
    "buckets of columns, of keys": lambda: Says(
        BucketBias(leaf(BATCH, 1, TOKENS, 4), Buckets(COLUMNS, GRID, GRID), "key")
    ),
    "dense": lambda: Says(DenseBias(leaf(BATCH, 1, 1, TOKENS))),
    "dense, two axes": lambda: Says(DenseBias(leaf(TOKENS, TOKENS))),
    "dense, one axis": lambda: Says(DenseBias(leaf(TOKENS))),
    "dense, no axis": lambda: Says(DenseBias(leaf())),
    "an added value": lambda: Says(values=(AddedValues(leaf(BATCH, HEADS, TOKENS, HEAD_DIM)),)),
    "bucket values": lambda: Says(values=(BucketValues(leaf(HEADS, 10, HEAD_DIM), BUCKETS),)),
    "all together": lambda: Says(
        low_rank(),
        axis(),
        offsets(),
        rotations=(rotation(),),
        values=(AddedValues(leaf(BATCH, HEADS, TOKENS, HEAD_DIM)),),
    ),
}


def some_mask(kind: str) -> tuple[Tensor | None, Tensor | None, Tensor | float]:
    """A mask, which pairs it allows, and what it adds to the logits."""
    allowed = torch.rand(LOGITS) > 0.4
    allowed[:, 0, 2] = False
    added = leaf(*LOGITS)
    match kind:
        case "none":
            return None, None, 0.0
        case "boolean":
            return allowed, allowed, 0.0
        case "padding":
            allowed = torch.tensor([True] * TOKENS + [True] * 4 + [False] * 3).view(BATCH, 1, 1, TOKENS)
            return allowed, allowed, 0.0
        case "nothing allowed":
            allowed = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
            return allowed, allowed, 0.0
        case "-inf":
            return added.masked_fill(~allowed, -torch.inf), allowed, added
        case "lowest number":
            return added.masked_fill(~allowed, torch.finfo(added.dtype).min), allowed, added
    raise AssertionError(kind)


MASKS = ("none", "boolean", "padding", "nothing allowed", "-inf", "lowest number")


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.parametrize("backend", ["reference", "auto", *backends.FASTEST_FIRST])
def test_against_loops(backend: str, saying: str, mask_kind: str) -> None:
    q, k, v = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    encoding = SAYINGS[saying]()
    rotations, biases, values, _ = encoding.forms
    if backend in backends.FASTEST_FIRST and backends.FASTEST_FIRST[backend].cannot(encoding.forms, Call(q, k, v)):
        with pytest.raises(InputError, match=f"backend={backend!r} cannot serve: .*'reference'"):
            attention(q, k, v, GRID, [encoding], backend=backend)
        return
    mask, allowed, added = some_mask(mask_kind)
    turned_q, turned_k = q, k
    for rotate in rotations:
        turned_q, turned_k = (turn(x, rotate.angles, rotate.layout, GRID.prefix) for x in (turned_q, turned_k))
    logits = sum((bias.dense() for bias in biases), start=torch.zeros(LOGITS, dtype=torch.float64)) + added
    tables = [term for term in values if isinstance(term, BucketValues)]
    index = BUCKETS.dense()

    def value(i: int, j: int) -> Tensor | float:
        return sum(term.table[:, index[i, j]] for term in tables)

    expected = attend(turned_q, turned_k, v, lambda i, j: logits[:, :, i, j], value, allowed)
    for term in values:
        if isinstance(term, AddedValues):
            expected = expected + term.term
    leaves = [t for form in (*rotations, *biases, *values) for t in vars(form).values() if isinstance(t, Tensor)]
    sources = {"q": q, "k": k, "v": v} | {f"leaf {n} of {saying}": t for n, t in enumerate(leaves)}
    if isinstance(added, Tensor):
        sources["mask"] = added
    same_gradients(attention(q, k, v, GRID, [encoding], mask=mask, backend=backend), expected, sources)


def test_encodings_add_up_in_their_order() -> None:
    q, k, v = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    first, second = rotation(), rotation(layout="interleaved")
    one = attention(q, k, v, GRID, [Says(low_rank_ := low_rank(), rotations=(first,)), Says(rotations=(second,))])
    both = attention(q, k, v, GRID, iter([Says(low_rank_, rotations=(first, second))]))
    assert torch.equal(one, both)
    swapped = attention(q, k, v, GRID, [Says(low_rank_, rotations=(second, first))])
    assert not torch.allclose(one, swapped)


MASK_SHAPES = [
    shape[cut:]
    for shape in itertools.product((1, BATCH), (1, HEADS), (1, TOKENS), (1, TOKENS))
    for cut in range(5)
]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("shape", sorted(set(MASK_SHAPES)), ids=str)
def test_masks_of_every_shape_that_broadcasts(shape: tuple[int, ...], backend: str) -> None:
    q, k, v = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    allowed = torch.rand(shape) > 0.3
    added = torch.randn(shape, dtype=torch.float64)
    for mask, bias in ((allowed, 0 * added), (added.masked_fill(~allowed, -torch.inf), added)):
        logits = bias.expand(LOGITS)
        expected = attend(q, k, v, lambda i, j, b=logits: b[:, :, i, j], allowed=allowed)
        close(attention(q, k, v, GRID, mask=mask, backend=backend), expected)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["boolean", "-inf", "lowest number", "lowest number of float32"])
def test_queries_with_nothing_to_attend_to(kind: str, dtype: torch.dtype, backend: str) -> None:
    """Zeros, and gradients that are finite: zero for the query, none of its weight on keys and values."""
    q, k, v = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM, dtype=dtype) for _ in range(3))
    table = leaf(HEADS, 5, 3, dtype=dtype)
    allowed = torch.ones(LOGITS, dtype=torch.bool)
    allowed[0, :, 2], allowed[1] = False, False
    wide = torch.float32 if kind.endswith("float32") else dtype
    low = -torch.inf if kind == "-inf" else torch.finfo(wide).min
    mask = allowed if kind == "boolean" else torch.zeros(LOGITS, dtype=wide).masked_fill(~allowed, low)
    out = attention(q, k, v, GRID, [Says(OffsetBias(table, GRID, GRID))], mask=mask, backend=backend)
    assert out.dtype == dtype
    assert (out[0, :, 2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, :, :2] != 0).all()
    with torch.autograd.set_detect_anomaly(True):  # nor NaN on the way
        out.backward(torch.randn_like(out))
    for gradient in (q.grad, k.grad, v.grad, table.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert gradient.any()
    for x in (q, k, v):
        assert x.grad is not None
        assert not x.grad[1].any()
    assert q.grad is not None
    assert not q.grad[0, :, 2].any()


def half_bound(dtype: torch.dtype, logits: float) -> float:
    """Eight roundings to `dtype`, each moving a logit by its share and so a weight by twice that; |v| < 4."""
    return 8 * torch.finfo(dtype).eps / 2 * (1 + 2 * logits) * 4


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mask_dtype", ["its own", "float32"])
@pytest.mark.parametrize("low", [-1e4, -6e4, -1e9, -torch.inf])
def test_masks_of_large_numbers_in_half_precision(
    low: float, mask_dtype: str, dtype: torch.dtype, backend: str
) -> None:
    """Padding by a number that is large but finite weighs as good as nothing, whatever the biases add to it."""
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM).clamp(-3, 3).to(dtype) for _ in range(3))
    bias = DenseBias(torch.full((TOKENS, TOKENS), -60.0))
    mask = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.float32 if mask_dtype == "float32" else dtype)
    mask[1, ..., 3:] = low
    expected = attend(q.double(), k.double(), v.double(), allowed=mask == 0)
    logits = (q.double() @ k.double().mT).abs().max().item() / HEAD_DIM**0.5
    plain = attention(q, k, v, GRID, mask=mask, backend=backend)
    assert plain.dtype == dtype
    assert (plain.double() - expected).abs().max() <= half_bound(dtype, logits)
    biased = attention(q, k, v, GRID, [Says(bias)], mask=mask, backend=backend)
    assert biased.dtype == dtype
    assert (biased.double() - expected).abs().max() <= half_bound(dtype, logits + 60)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("low", [-1e4, -6e4, -1e9])
@pytest.mark.parametrize("autocast", [False, True])
def test_large_numbers_on_a_whole_row_do_not_break_it(
    low: float, dtype: torch.dtype, autocast: bool, backend: str
) -> None:
    """Such a query has something to attend to, if barely: what it gets is an average of values, not NaN."""
    q, k = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM, dtype=torch.float32 if autocast else dtype) for _ in range(2))
    v = torch.ones_like(q, requires_grad=True)
    mask = torch.zeros(BATCH, 1, 1, TOKENS)
    mask[1] = low
    with torch.autocast("cpu", dtype, enabled=autocast):
        bias = DenseBias(torch.full((TOKENS, TOKENS), -60.0))
        out = attention(q, k, v, GRID, [Says(bias)], mask=mask, backend=backend)
    assert out.dtype == dtype
    assert (out.double() - 1).abs().max() <= TOKENS * torch.finfo(dtype).eps
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_float32_forms_do_not_promote_tokens(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM).to(dtype) for _ in range(3))
    for name, saying in SAYINGS.items():
        encoding = saying()
        if backend == "sdpa" and sdpa.cannot(encoding.forms):
            continue
        assert attention(q, k, v, GRID, [encoding], backend=backend).dtype == dtype, name


def test_low_rank_and_axis_biases_ride_as_features_while_there_is_room() -> None:
    small, large, axes, other = low_rank(3), low_rank(6), axis(), offsets()
    features, rest = sdpa.split([small, other, axes, large], room=HEAD_DIM)
    assert features[0] is small
    assert rest == [other, large]
    close(features[1].dense(), axes.dense())
    assert sdpa.split([axes], room=GRID.height + GRID.width - 1) == ([], [axes])


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("mapping", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        (GRID, GRID),
        (GRID, Grid(2, 4)),
        (Grid(2, 4), Grid(3, 2, prefix=2)),
        (GRID, Grid(4, 5, prefix=1).keep(torch.tensor([[7, 2, 9], [0, 19, 4]]))),
        (Grid(4, 5).keep(torch.tensor([[7, 2, 9]])), GRID),
        (Points(3, 3, prefix=1, at=torch.tensor([[[0.4, 1.7], [2.0, 0.1]]])), GRID),
    ],
    ids=str,
)
def test_buckets_of_one_axis_are_of_low_rank(here: Grid, there: Grid, mapping: Separable, side: str) -> None:
    buckets = Buckets(mapping, here, there)
    bias = BucketBias(Scores(leaf(BATCH, HEADS, here.tokens, 5), leaf(1, 5, 4)), buckets, side)  # type: ignore[arg-type]
    rank = there.size[0 if mapping is ROWS else 1] + bool(there.prefix)
    assert sdpa.split([bias], room=rank - 1) == ([], [bias])
    (feature,), others = sdpa.split([bias], room=rank)
    assert not others
    assert feature.left.shape[-1] == feature.right.shape[-1] == rank
    expected = bias.dense()
    close(feature.dense().expand_as(expected), expected)


def test_buckets_that_are_not_of_low_rank_stay() -> None:
    """Of both axes; the same for all queries; or where keys lie between rows."""
    own, between = leaf(BATCH, HEADS, TOKENS, 10), Points(3, 3, at=torch.tensor([[[0.5, 1.0]]]))
    biases = [
        BucketBias(own, BUCKETS),
        BucketBias(leaf(1, HEADS, 1, 4), Buckets(ROWS, GRID, GRID)),
        BucketBias(own, Buckets(ROWS, GRID, between)),
    ]
    assert sdpa.split(biases, room=100) == ([], biases)


def test_scores_of_the_same_buckets_are_placed_once() -> None:
    buckets = Buckets(ROWS, GRID, GRID)
    first, second = BucketBias(leaf(BATCH, HEADS, TOKENS, 4), buckets), BucketBias(leaf(1, HEADS, 1, 4), buckets)
    other = BucketBias(leaf(BATCH, HEADS, TOKENS, 4), buckets, "key")
    features, others = sdpa.split([first, other, second], room=100)
    assert (len(features), others) == (2, [])
    found = sum(feature.dense() for feature in features)
    close(found, first.dense() + second.dense() + other.dense())


def test_features_leave_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing of size queries x keys is made."""
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM, dtype=torch.float64) for _ in range(3))
    fused, seen = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*args: Tensor, attn_mask: Tensor | None, **more: float) -> Tensor:
        seen.append(attn_mask)
        assert args[0].shape == args[1].shape == args[2].shape, "fused kernels want one head_dim"
        return fused(*args, attn_mask=attn_mask, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    attention(q, k, v, GRID, [Says(axis(), rotations=(rotation(),))])
    attention(q, k, v, GRID, [Says(offsets())])
    attention(q, k, v, GRID, [Says(BucketBias(leaf(BATCH, HEADS, TOKENS, 4), Buckets(ROWS, GRID, GRID)))])
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[2] is None


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_dropout_keeps_the_mean_and_drops_its_share(backend: str) -> None:
    """Equal weights 1/n, values 1: the output has mean 1 and variance p / ((1 - p) n)."""
    grid, p = Grid(4, 5), 0.25
    q = k = torch.zeros(50, 4, grid.tokens, 2)
    out = attention(q, k, torch.ones_like(q), grid, dropout=p, backend=backend)[..., 0]
    variance = p / ((1 - p) * grid.tokens)
    samples = out.numel()  # 4000, independent; bounds of five standard deviations
    assert abs(out.mean().item() - 1) < 5 * (variance / samples) ** 0.5
    assert abs(out.var().item() / variance - 1) < 5 * (2 / samples) ** 0.5 * 1.5
    again = attention(q, k, torch.ones_like(q), grid, dropout=p, backend=backend)[..., 0]
    assert not torch.equal(out, again)
    still = attention(q, k, torch.ones_like(q), grid, backend=backend)[..., 0]
    close(still, torch.ones_like(still))


def test_values_see_dropped_weights() -> None:
    q = k = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM, dtype=torch.float64)
    table = torch.full((1, 10, HEAD_DIM), -1.0, dtype=torch.float64)
    out = attention(q, k, torch.ones_like(q), GRID, [Says(values=(BucketValues(table, BUCKETS),))], dropout=0.5)
    close(out, torch.zeros_like(out))


@pytest.mark.parametrize("method", ["euclidean", "quantization", "cross", "product"])
def test_an_image_alone_is_the_image_in_a_padded_batch(method: str) -> None:
    """A 3 x 4 image in the corner of a 5 x 6 grid, the rest masked."""
    small, large = Grid(3, 4, prefix=1), Grid(5, 6, prefix=1)
    encoding = IRPE(HEADS * HEAD_DIM, HEADS, large, method=method, on="qkv").double()  # type: ignore[arg-type]
    for table in encoding.parameters():
        torch.nn.init.normal_(table)
    y, x = large.coords().unbind(-1)
    kept = torch.cat([torch.ones(1, dtype=torch.bool), (y < 3) & (x < 4)])
    q, k, v = (torch.randn(1, HEADS, large.tokens, HEAD_DIM, dtype=torch.float64) for _ in range(3))
    padded = attention(q, k, v, large, [encoding], mask=kept)
    alone = attention(q[:, :, kept], k[:, :, kept], v[:, :, kept], small, [encoding])
    close(padded[:, :, kept], alone)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_gradients_of_tables_are_deterministic(backend: str) -> None:
    """Many pairs share a bucket; torch's deterministic mode accepts how they are summed, and runs are equal."""
    grid = Grid(6, 6, prefix=1)
    q, k, v = (leaf(BATCH, HEADS, grid.tokens, HEAD_DIM, dtype=torch.float32) for _ in range(3))
    encoding = IRPE(HEADS * HEAD_DIM, HEADS, grid, on="qk" if backend == "auto" else "qkv")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(
                attention(q, k, v, grid, [encoding], backend=backend).sum(), list(encoding.parameters())
            )
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(a.any() and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_auto_is_the_fastest_that_can_serve() -> None:
    call = Call(*(leaf(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3)))  # in float64
    assert backends.choose("auto", SAYINGS["all together"]().forms, call) is sdpa.attend
    assert backends.choose("auto", SAYINGS["bucket values"]().forms, call) is None
    assert backends.choose("reference", Forms(), call) is None


@pytest.mark.parametrize("saying", ["all together", "bucket values"])
def test_attention_compiles_whole_with_masks(saying: str) -> None:
    q, k, v = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    encoding = SAYINGS[saying]()
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for kind in ("padding", "-inf"):
        mask = some_mask(kind)[0]
        assert mask is not None
        mask = mask.detach()
        expected = attention(q, k, v, GRID, [encoding], mask=mask, backend="reference")
        same_gradients(compiled(q, k, v, GRID, [encoding], mask=mask), expected, {"q": q, "k": k, "v": v})
    torch.compiler.reset()


@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        "sdpa",
        pytest.param("cpu", marks=pytest.mark.skipif(bool(kernel.missing()), reason="no kernel")),
    ],
)
@pytest.mark.parametrize("width", [5, 20])
@pytest.mark.parametrize("text", ["none", "irpe(on='qk')", "rope_axial + decomposed"])
def test_values_of_another_width(text: str, width: int, backend: str) -> None:
    """Attention with the identity for values is the weights; any values are multiplied with them."""
    encodings = [make(HEADS * HEAD_DIM, HEADS, GRID) for make in parse(text)]
    for parameter in itertools.chain.from_iterable(e.parameters() for e in encodings):
        torch.nn.init.normal_(parameter)
    q, k = (leaf(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(2))
    v = leaf(BATCH, HEADS, TOKENS, width)
    identity = torch.eye(TOKENS, dtype=v.dtype).expand(BATCH, HEADS, TOKENS, TOKENS)
    expected = attention(q, k, identity, GRID, encodings, backend="reference") @ v
    if backend == "cpu":
        q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
        encodings = [encoding.float() for encoding in encodings]
        out = attention(q, k, v, GRID, encodings, backend=backend)
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
        return
    out = attention(q, k, v, GRID, encodings, backend=backend)
    same_gradients(out, expected, {"q": q, "k": k, "v": v})


X = torch.zeros(BATCH, HEADS, TOKENS, HEAD_DIM)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(X[0], X, X, GRID), r"q \(3, 7, 8\), expected \[batch, heads, tokens, head_dim\]"),
        (lambda: attention(X, X[..., :4], X, GRID), "k is .*expected the same"),
        (lambda: attention(X, X, X[..., :4], GRID, [IRPE(24, 3, GRID, on="v")]), "IRPE .* values of 8 .* v has 4"),
        (lambda: attention(X, X, X[:, :2], GRID), "v is .*expected the same"),
        (lambda: attention(X, X, X.double(), GRID), "v is .*float64, but q .*float32"),
        (lambda: attention(X, X, X, Grid(3, 2)), r"q has 7 tokens, .* holds 0 \+ 3 \* 2 = 6"),
        (lambda: attention(X, X, X, (2, 3)), r"grid=\(2, 3\), expected a whereformer.Grid"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, IRPE(24, 3, GRID)), "one IRPE, expected a sequence"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, [IRPE]), "IRPE.*expected PositionEncoding modules"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, None), "None, expected PositionEncoding"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, [IRPE(32, 4, GRID)]), "for 4 heads of 8 features, but q has 3 of 8"),
        (lambda: attention(X.int(), X, X, GRID), "q is torch.int32, expected a floating tensor"),
        (lambda: attention(X, X, None, GRID), "v is NoneType, expected a floating tensor"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, mask="a"), "mask='a', expected a tensor"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, dropout="a"), "dropout='a'"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, dropout=1.0), "dropout=1.0"),
        (lambda: attention(X, X, X, GRID, dropout=-0.1), "dropout=-0.1"),
        (
            lambda: attention(X, X, X, GRID, backend="flash"),
            "backend='flash', expected one of .*'reference', 'cpu', 'sdpa'",
        ),
        (lambda: attention(X, X, X, GRID, backend=["cpu"]), r"backend=\['cpu'\], expected one of"),  # pyright: ignore
        (lambda: attention(X, X, X, GRID, mask=torch.ones(6, dtype=torch.bool)), r"mask \(6,\), expected a shape"),
        (lambda: attention(X, X, X, GRID, mask=torch.ones(4, 1, 1, 1, 1) > 0), "mask .*expected a shape"),
        (lambda: attention(X, X, X, GRID, mask=torch.ones(3, 1, 1, 7) > 0), "mask .*expected a shape"),
        (lambda: attention(X, X, X, GRID, mask=torch.ones(7, dtype=torch.long)), "mask is torch.int64"),
        (
            lambda: attention(X, X, X, GRID, [IRPE(24, 3, Grid(3, 2))]),
            r"49 buckets \(built for a grid without prefix tokens\?\), but .*prefix=1\) has 50",
        ),
        (
            lambda: attention(X, X, X, GRID, [Says(rotations=(Rotation(torch.zeros(1, 5, 2)),))]),
            "rotation of 5 patches, expected 6",
        ),
    ],
)
def test_what_cannot_be(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_absolute_encodings_are_silent_here() -> None:
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    assert torch.equal(attention(q, k, v, GRID, [Learned(24, 3, GRID)]), attention(q, k, v, GRID))
