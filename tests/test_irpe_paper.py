"""IRPE against the paper's equations 13-25, written again pair by pair in float64."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from loops import attend, clip, close, dense, leaf, piecewise, places, same_gradients
from whereformer import Grid, attention
from whereformer.encodings import IRPE

ALPHA, BETA, GAMMA = 1.9, 3.8, 15.2
HEADS, HEAD_DIM = 2, 4
GRIDS = (Grid(2, 7), Grid(4, 3, prefix=1), Grid(5, 2, prefix=2))
SUMS_OF_SQUARES = sorted({a * a + b * b for a in range(20) for b in range(20)})


def paper_buckets(
    grid: Grid, method: str, option: Any, g: Callable[[float], int]
) -> Callable[[int, int], list[int]]:
    """I(i, j) of equations 20-25, counted from 0: one number, for cross one for rows and one for columns."""
    reach, side = int(BETA), 2 * int(BETA) + 1
    place = places(grid)

    def buckets(i: int, j: int) -> list[int]:
        query, key = place[i], place[j]
        if query is None or key is None:
            return [side] * 2 if method == "cross" else [side * side if method == "product" else side]
        dy, dx = query[0] - key[0], query[1] - key[1]
        if method == "product":
            return [(g(dy) + reach) * side + g(dx) + reach]
        if method == "cross":
            return [g(dy) + reach, g(dx) + reach]
        distance = math.sqrt(dy**2 + dx**2)
        if method == "euclidean" and option:
            distance = round(distance)
        if method == "quantization":
            distance = SUMS_OF_SQUARES.index(dy**2 + dx**2) if option == "rank" else dy**2 + dx**2
        return [g(distance) + reach]

    return buckets


def paper_attention(
    q: Tensor, k: Tensor, v: Tensor, encoding: IRPE, buckets: Callable[[int, int], list[int]]
) -> Tensor:
    """Equations 13-17 with r_ij the table's row (or number) of bucket I(i, j)."""
    parts = ("_rows", "_columns") if encoding.method == "cross" else ("",)
    scale = 1 / math.sqrt(HEAD_DIM)
    tables = encoding.tables

    def r(side: str, i: int, j: int) -> Tensor | float:
        """[heads or 1, head_dim]; in bias mode [heads or 1]; 0 for sides that have none."""
        if side not in encoding.on:
            return 0.0
        chosen = [(tables[side + part], t) for part, t in zip(parts, buckets(i, j), strict=True)]
        rows = [table[:, t] if side == "v" or table.ndim == 2 else table[:, :, t] for table, t in chosen]
        return torch.stack(rows).sum(0)

    def bias(i: int, j: int) -> Tensor | float:
        if encoding.mode == "bias":
            return (r("k", i, j) + r("q", j, i)) * (scale if encoding.scale_bias else 1)
        on_k = (q[:, :, i] * r("k", i, j)).sum(-1) * scale
        on_q = (k[:, :, j] * r("q", j, i)).sum(-1) * scale
        return on_k + on_q

    return attend(q, k, v, bias, lambda i, j: r("v", i, j))


def settings() -> Iterator[dict[str, Any]]:
    methods = [
        ("product", {}),
        ("cross", {}),
        ("euclidean", {"rounded": True}),
        ("euclidean", {"rounded": False}),
        ("quantization", {"quant": "squared"}),
        ("quantization", {"quant": "rank"}),
    ]
    modes = [("bias", {"on": on, "scale_bias": scaled}) for on in ("k", "q", "qk") for scaled in (False, True)]
    modes += [("contextual", {"on": on}) for on in ("q", "k", "v", "qk", "qv", "kv", "qkv")]
    for (method, own), (mode, more), shared, index in itertools.product(
        methods, modes, (True, False), ("piecewise", "clip")
    ):
        yield {"method": method, **own, "mode": mode, **more, "shared": shared, "index": index}


SETTINGS = list(settings())


@pytest.mark.parametrize(
    ("number", "given"),
    list(enumerate(SETTINGS)),
    ids=[", ".join(f"{key}={value}" for key, value in given.items()) for given in SETTINGS],
)
def test_equations(number: int, given: dict[str, Any]) -> None:
    grid = GRIDS[number % len(GRIDS)]
    method = given["method"]
    distances = {"beta": BETA} if given["index"] == "clip" else {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA}
    encoding = IRPE(HEADS * HEAD_DIM, HEADS, grid, **distances, **given).double()
    for table in encoding.parameters():
        torch.nn.init.normal_(table)

    def g(x: float) -> int:
        return clip(x, BETA) if given["index"] == "clip" else piecewise(x, ALPHA, BETA, GAMMA)

    buckets = paper_buckets(grid, method, given.get("rounded", given.get("quant")), g)
    q, k, v = (leaf(1, HEADS, grid.tokens, HEAD_DIM) for _ in range(3))
    sources = {"q": q, "k": k, "v": v, **dict(encoding.named_parameters())}
    same_gradients(attention(q, k, v, grid, [encoding]), paper_attention(q, k, v, encoding, buckets), sources)


def test_every_setting_meets_every_grid() -> None:
    """The settings go round the grids; methods, modes and sides each see all of them."""
    for key in ("method", "mode", "on", "shared", "index"):
        for value in {given[key] for given in SETTINGS}:
            met = {number % len(GRIDS) for number, given in enumerate(SETTINGS) if given[key] == value}
            assert met == set(range(len(GRIDS))), f"{key}={value!r}"


@pytest.mark.parametrize("method", ["product", "cross"])
def test_on_q_is_equation_16_with_its_table_mirrored(method: Any) -> None:
    """The paper reads r^Q at I(i, j), the released code at I(j, i): as g is odd, the table the other way round."""
    grid = Grid(3, 5)
    encoding = IRPE(
        HEADS * HEAD_DIM, HEADS, grid, method=method, on="q", alpha=ALPHA, beta=BETA, gamma=GAMMA
    ).double()
    for table in encoding.parameters():
        torch.nn.init.normal_(table)
    k = leaf(1, HEADS, grid.tokens, HEAD_DIM)
    found = torch.stack([bias.dense() for bias in encoding.biases(torch.zeros_like(k), k, grid, grid)]).sum(0)
    parts = ("_rows", "_columns") if method == "cross" else ("",)
    mirrored = [encoding.tables["q" + part].flip(-1) for part in parts]
    buckets = paper_buckets(grid, method, None, lambda x: piecewise(x, ALPHA, BETA, GAMMA))

    def bias(i: int, j: int) -> Tensor:
        rows = [table[:, :, t] for table, t in zip(mirrored, buckets(i, j), strict=True)]
        return (k[:, :, j] * torch.stack(rows).sum(0)).sum(-1) / math.sqrt(HEAD_DIM)

    close(found, dense(grid.tokens, grid.tokens, bias))
