"""Each form's dense meaning, pair by pair, and the gradients through it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loops import close, dense, leaf, places, same_gradients, turn
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
    Rotation,
    Scores,
    attention,
)
from whereformer.encodings import IRPE
from whereformer.forms import Forms
from whereformer.index import Clip, Separable

QUERIES, KEYS = Grid(2, 3, prefix=1), Grid(3, 2, prefix=2)
GRIDS = [(QUERIES, QUERIES), (QUERIES, KEYS), (KEYS, Grid(1, 4)), (Grid(1, 1), Grid(1, 1, prefix=1))]
MAPPING = Separable(Clip(1), Clip(2))
BATCH, HEADS = 2, 3


def bucket(queries: Grid, keys: Grid, i: int, j: int) -> int:
    query, key = places(queries)[i], places(keys)[j]
    if query is None or key is None:
        return 15
    dy, dx = query[0] - key[0], query[1] - key[1]
    return (max(-1, min(1, dy)) + 1) * 5 + max(-2, min(2, dx)) + 2


def by_pair(queries: Grid, keys: Grid, bias: Callable[[int, int], Tensor]) -> Tensor:
    return dense(queries.tokens, keys.tokens, bias).expand(BATCH, HEADS, -1, -1)


@pytest.mark.parametrize(("queries", "keys"), GRIDS)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_offset_bias(queries: Grid, keys: Grid, heads: int) -> None:
    table = leaf(heads, queries.height + keys.height - 1, queries.width + keys.width - 1)

    def bias(i: int, j: int) -> Tensor:
        query, key = places(queries)[i], places(keys)[j]
        if query is None or key is None:
            return torch.zeros(1, heads, dtype=torch.float64)
        return table[None, :, query[0] - key[0] + keys.height - 1, query[1] - key[1] + keys.width - 1]

    found = OffsetBias(table, queries, keys).dense().expand(BATCH, HEADS, -1, -1)
    same_gradients(found, by_pair(queries, keys, bias), {"table": table})


@pytest.mark.parametrize(("queries", "keys"), GRIDS)
@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("own", [True, False], ids=["a row of scores each", "one row of scores for all"])
def test_bucket_bias(queries: Grid, keys: Grid, batch: int, heads: int, own: bool) -> None:
    count = 15 + bool(queries.prefix or keys.prefix)
    for side, reader in (("query", queries), ("key", keys)):
        scores = leaf(batch, heads, reader.tokens if own else 1, count)

        def bias(i: int, j: int, side: str = side, scores: Tensor = scores) -> Tensor:
            if side == "query":
                return scores[:, :, i if own else 0, bucket(queries, keys, i, j)]
            return scores[:, :, j if own else 0, bucket(keys, queries, j, i)]

        buckets = Buckets(MAPPING, queries, keys) if side == "query" else Buckets(MAPPING, keys, queries)
        form = BucketBias(scores, buckets, side)  # type: ignore[arg-type]
        found = form.dense().expand(BATCH, HEADS, -1, -1)
        same_gradients(found, by_pair(queries, keys, bias), {"scores": scores})


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("side", ["query", "key"])
def test_scores_are_what_their_reader_reads_of_their_table(side: str, heads: int) -> None:
    here, there = (QUERIES, KEYS) if side == "query" else (KEYS, QUERIES)
    reader, table = leaf(BATCH, HEADS, here.tokens, 5), leaf(heads, 5, 16)
    scores = Scores(reader, table)
    assert (scores.shape, scores.device) == ((BATCH, HEADS, here.tokens, 16), reader.device)

    def bias(i: int, j: int) -> Tensor:
        first, second = (i, j) if side == "query" else (j, i)
        return (reader[:, :, first] * table[:, :, bucket(here, there, first, second)]).sum(-1)

    form = BucketBias(scores, Buckets(MAPPING, here, there), side)  # type: ignore[arg-type]
    assert form.scores is scores
    same_gradients(form.dense(), by_pair(QUERIES, KEYS, bias), {"reader": reader, "table": table})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_of_their_readers_dtype(dtype: torch.dtype) -> None:
    assert Scores(torch.ones(1, 2, 3, 4, dtype=dtype), torch.ones(1, 4, 5)).dense().dtype == dtype


@pytest.mark.parametrize(("queries", "keys"), GRIDS)
@pytest.mark.parametrize("shape", [(BATCH, HEADS, True), (1, HEADS, False), (BATCH, 1, True)])
def test_axis_bias(queries: Grid, keys: Grid, shape: tuple[int, int, bool]) -> None:
    batch, heads, own = shape
    axes = (batch, heads, queries.tokens if own else 1)
    rows, columns = leaf(*axes, keys.height), leaf(1, HEADS, 1, keys.width)

    def bias(i: int, j: int) -> Tensor:
        key = places(keys)[j]
        if key is None:
            return torch.zeros(1, 1, dtype=torch.float64).expand(BATCH, HEADS)
        return (rows[:, :, i if own else 0, key[0]] + columns[:, :, 0, key[1]]).expand(BATCH, HEADS)

    found = AxisBias(rows, columns, keys).dense().expand(BATCH, HEADS, queries.tokens, -1)
    same_gradients(found, by_pair(queries, keys, bias), {"rows": rows, "columns": columns})


def test_low_rank_bias() -> None:
    left, right = leaf(BATCH, 1, 5, 4), leaf(1, HEADS, 7, 4)
    found = LowRankBias(left, right).dense()
    expected = dense(5, 7, lambda i, j: (left[:, :, i] * right[:, :, j]).sum(-1))
    same_gradients(found, expected, {"left": left, "right": right})


def test_dense_bias_is_itself() -> None:
    bias = leaf(2, 1, 3, 3)
    assert DenseBias(bias).dense() is bias


@pytest.mark.parametrize(("queries", "keys"), GRIDS)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_bucket_values(queries: Grid, keys: Grid, heads: int) -> None:
    table = leaf(heads, 16, 4)
    weights = leaf(BATCH, HEADS, queries.tokens, keys.tokens)
    rows = [
        sum(
            (weights[:, :, i, j, None] * table[:, bucket(queries, keys, i, j)] for j in range(keys.tokens)),
            start=torch.zeros(BATCH, HEADS, 4, dtype=torch.float64),
        )
        for i in range(queries.tokens)
    ]
    found = BucketValues(table, Buckets(MAPPING, queries, keys)).dense(weights)
    same_gradients(found, torch.stack(rows, -2), {"table": table, "weights": weights})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bucket_values_sum_weights_in_float32(dtype: torch.dtype) -> None:
    """4096 weights of 2^-12 are 1; summed up in bfloat16, whose steps at 2^-4 are 2^-12, they would stay below."""
    keys = Grid(1, 4096)
    weights = torch.full((1, 1, 1, 4096), 2.0**-12, dtype=dtype)
    table = torch.ones(1, 1, 2, dtype=dtype)
    found = BucketValues(table, Buckets(Separable(None, None), Grid(1, 1), keys)).dense(weights)
    assert found.dtype == dtype
    assert found.tolist() == [[[[1.0, 1.0]]]]


def test_added_values_do_not_ask_for_weights() -> None:
    term = leaf(2, 3, 5, 4)
    assert AddedValues(term).dense(torch.full((2, 3, 5, 5), torch.nan)) is term


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize(("heads", "pairs"), [(HEADS, 4), (1, 4), (HEADS, 3), (1, 1)])
def test_rotation(layout: str, prefix: int, heads: int, pairs: int) -> None:
    angles = leaf(heads, 6, pairs)
    x = leaf(BATCH, HEADS, prefix + 6, 8)
    found = Rotation(angles, layout)(x)  # type: ignore[arg-type]
    same_gradients(found, turn(x, angles, layout, prefix), {"angles": angles, "x": x})
    assert torch.equal(found[:, :, :prefix], x[:, :, :prefix]), "prefix tokens stay"
    assert torch.equal(found[..., 2 * pairs :], x[..., 2 * pairs :]), "features beyond the pairs stay"
    close(found.norm(dim=-1), x.norm(dim=-1))


def test_waves_of_a_rotation_are_made_once_for_queries_and_keys() -> None:
    angles = leaf(1, 6, 2)
    rotation = Rotation(angles, scale=1.5)
    cos, sin = rotation.waves
    assert torch.equal(cos, 1.5 * angles.cos())
    assert torch.equal(sin, 1.5 * angles.sin())
    q, k = (leaf(BATCH, HEADS, 7, 4) for _ in range(2))
    with Counted() as counted:
        turned = Forms((rotation,)).turn(q, k)
    assert counted.calls.count(torch.ops.aten.cos.default) == 1
    assert all(map(torch.equal, turned, (rotation(q), rotation(k))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_in_half_precision_rounds_its_result_not_its_angles(dtype: torch.dtype) -> None:
    """Cosine, sine, two products and their sum: five roundings of numbers up to |x|, be angles up to 1000."""
    angles = 1000 * torch.rand(1, 50, 4)
    x = torch.randn(1, 1, 50, 8).to(dtype)
    found = Rotation(angles)(x)
    assert found.dtype == dtype
    error = (found.double() - Rotation(angles.double())(x.double())).abs().max()
    assert error <= 5 * torch.finfo(dtype).eps / 2 * x.double().norm(dim=-1).max()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rotation(torch.zeros(6, 4)), r"angles \(6, 4\), expected \[heads, patches, pairs\]"),
        (
            lambda: Rotation(torch.zeros(1, 6, 4), "pairs"),  # type: ignore[arg-type]
            "layout='pairs', expected 'interleaved' or 'half'",
        ),
        (lambda: Rotation(torch.zeros(1, 6, 4))(torch.zeros(1, 1, 5, 8)), "do not fit"),
        (lambda: Rotation(torch.zeros(1, 6, 5))(torch.zeros(1, 1, 6, 8)), "do not fit"),
        (
            lambda: OffsetBias(torch.zeros(3, 5, 3), Grid(2, 3), Grid(2, 3)),
            r"table \(3, 5, 3\), expected \[heads, 3, 5\]",
        ),
        (lambda: OffsetBias(torch.zeros(3, 5), Grid(2, 3), Grid(2, 3)), r"expected \[heads, 3, 5\]"),
        (lambda: AxisBias(torch.zeros(1, 1, 6, 3), torch.zeros(1, 1, 6, 2), Grid(2, 3)), "3 rows and 2 columns"),
        (
            lambda: BucketBias(torch.zeros(1, 1, 7, 15), Buckets(MAPPING, QUERIES, QUERIES)),
            "15 buckets .*without prefix tokens.* has 16",
        ),
        (lambda: BucketBias(torch.zeros(1, 1, 7, 9), Buckets(MAPPING, QUERIES, QUERIES)), "9 buckets.* has 16"),
        (
            lambda: BucketBias(
                Scores(torch.zeros(1, 1, 7, 4), torch.zeros(1, 4, 15)), Buckets(MAPPING, QUERIES, QUERIES)
            ),
            "15 buckets .*without prefix tokens.* has 16",
        ),
        (
            lambda: Scores(torch.zeros(1, 1, 7, 4), torch.zeros(1, 5, 16)),
            r"reader \(1, 1, 7, 4\) and table \(1, 5, 16\), expected \[b, h, tokens, d\] and \[1 or h, d, b",
        ),
        (lambda: Scores(torch.zeros(1, 1, 7, 4), torch.zeros(4, 16)), r"table \(4, 16\), expected"),
        (
            lambda: BucketBias(torch.zeros(1, 1, 7, 16), Buckets(MAPPING, QUERIES, QUERIES), "keys"),  # type: ignore[arg-type]
            "side='keys', expected 'query' or 'key'",
        ),
        (
            lambda: BucketValues(torch.zeros(1, 15, 4), Buckets(MAPPING, QUERIES, QUERIES)),
            "15 buckets .*without prefix tokens.* has 16",
        ),
    ],
)
def test_forms_that_cannot_be(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


class Counted(TorchDispatchMode):
    """Lists the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Watches how many numbers the largest new tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        new = out if isinstance(out, tuple | list) else (out,)
        self.numel = max([self.numel, *(t.numel() for t in new if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("method", ["product", "cross"])
def test_irpe_makes_nothing_of_tokens_squared_times_features(method: str) -> None:
    """Neither forward nor backward; the released code's value side does."""
    grid, head_dim, buckets = Grid(9, 9, prefix=1), 32, 50
    encoding = IRPE(2 * head_dim, 2, grid, method=method, on="qkv")  # type: ignore[arg-type]
    q, k, v = (leaf(1, 2, grid.tokens, head_dim, dtype=torch.float32) for _ in range(3))
    with Largest() as largest:
        attention(q, k, v, grid, [encoding], backend="reference").sum().backward()
    assert largest.numel == 2 * grid.tokens * max(grid.tokens, buckets)
