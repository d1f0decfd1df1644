"""Offsets to buckets: the released code's numbers, the properties of the paper, the loops."""

import itertools
import math
from typing import Any

import pytest
import torch

from loops import clip, piecewise
from whereformer import Buckets, Grid, InputError, OffsetBias
from whereformer.encodings import IRPE
from whereformer.index import Clip, Euclidean, Mapping, Piecewise, Quantization, Separable

RELEASED = Piecewise(1.9, 3.8, 15.2)
RATIOS = (1.0, 1.3, 1.5, 1.9, 2.0, 2.5, 3.0, 20.0, 33.0)
METHODS = {"euclidean": 20, "quantization": 33, "cross": 20, "product": 1.9}


def ids(mapping: Mapping, height: int, width: int, prefix: int = 0) -> torch.Tensor:
    grid = Grid(height, width, prefix)
    return Buckets(mapping, grid, grid).dense()


@pytest.mark.parametrize("ratio", RATIOS)
def test_piecewise_is_equation_18(ratio: float) -> None:
    offsets = range(-400, 401)
    found = Piecewise(ratio, 2 * ratio, 8 * ratio)(torch.tensor(offsets)).tolist()
    assert found == [piecewise(x, ratio, 2 * ratio, 8 * ratio) for x in offsets]


def test_piecewise_of_distances_that_are_not_whole() -> None:
    distances = sorted({math.hypot(a, b) for a in range(30) for b in range(30)})
    found = RELEASED(torch.tensor(distances)).tolist()
    assert found == [piecewise(x, 1.9, 3.8, 15.2) for x in distances]


@pytest.mark.parametrize("beta", [1, 2.6, 3, 7.9])
def test_clip_is_equation_9(beta: float) -> None:
    offsets = [x / 4 for x in range(-80, 81)]
    assert Clip(beta)(torch.tensor(offsets)).tolist() == [clip(x, beta) for x in offsets]


@pytest.mark.parametrize("index", [Clip(3), RELEASED, Piecewise(20, 40, 160)], ids=str)
def test_index_functions_are_odd_rise_and_stay_within_reach(index: Clip | Piecewise) -> None:
    found = index(torch.arange(-500, 501))
    assert torch.equal(found, -found.flip(0))
    assert (found.diff() >= 0).all()
    assert found.max() == index.reach
    small = int(index.alpha) if isinstance(index, Piecewise) else index.reach
    assert found[500 : 501 + small].tolist() == list(range(small + 1)), "near offsets keep buckets of their own"


def test_index_functions_count_exactly_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert Clip(500)(torch.arange(400)).tolist() == list(range(400))
        assert Piecewise(400, 800, 3200)(torch.arange(400)).tolist() == list(range(400))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_numbers_of_the_released_ratios() -> None:
    assert RELEASED(torch.arange(8)).tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    assert Piecewise(1.5, 3, 12)(torch.arange(8)).tolist() == [0, 1, 2, 2, 2, 2, 2, 3]
    assert RELEASED.reach == 3


def test_released_piecewise_differs_from_clip_at_3_alone() -> None:
    offsets = torch.arange(-13, 14)
    differ = offsets[RELEASED(offsets) != Clip(3.8)(offsets)]
    assert differ.tolist() == [-3, 3]


def test_product_ids_of_grids_that_are_not_square() -> None:
    product = Separable(RELEASED, RELEASED)
    wide, tall = ids(product, 3, 6), ids(product, 6, 3)
    assert wide[0, :8].tolist() == [24, 23, 22, 22, 21, 21, 17, 16]
    assert tall[0, :8].tolist() == [24, 23, 22, 17, 16, 15, 10, 9]
    for found in (wide, tall):
        assert (found + found.T == 48).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_small_grid_is_a_part_of_a_large_one(method: str) -> None:
    for mapping in irpe(method, Grid(7, 9)).mappings.values():
        large = ids(mapping, 7, 9).reshape(7, 9, 7, 9)
        assert torch.equal(ids(mapping, 3, 5), large[:3, :5, :3, :5].reshape(15, 15))
        assert torch.equal(ids(mapping, 3, 5), large[4:, 4:, 4:, 4:].reshape(15, 15)), "offsets alone count"


@pytest.mark.parametrize("prefix", [1, 2, 5])
def test_every_pair_with_a_prefix_token_falls_in_the_last_bucket(prefix: int) -> None:
    found = ids(Separable(RELEASED, RELEASED), 3, 4, prefix)
    assert found.shape == (12 + prefix, 12 + prefix)
    assert (found[:prefix] == 49).all()
    assert (found[:, :prefix] == 49).all()
    assert torch.equal(found[prefix:, prefix:], ids(Separable(RELEASED, RELEASED), 3, 4))
    assert found[prefix:, prefix:].max() < 49


@pytest.mark.parametrize("method", METHODS)
def test_prefix_tokens_of_another_number_in_turn(method: str) -> None:
    """With and without a distillation token at the same size."""
    encoding = irpe(method, Grid(14, 14, prefix=1))
    for prefix in (1, 2, 1):
        grid = Grid(14, 14, prefix)
        q = torch.zeros(1, 1, grid.tokens, 8)
        for bias in encoding.biases(q, q, grid, grid):
            assert bias.dense().shape[-2:] == (196 + prefix, 196 + prefix)


def irpe(method: Any, grid: Grid) -> IRPE:
    return IRPE(8, 1, grid, method=method, ratio=METHODS[method])


@pytest.mark.parametrize(
    ("method", "allocated", "used"),
    [("euclidean", 82, 20), ("quantization", 134, 51), ("cross", 164, 56), ("product", 50, 50)],
)
def test_the_papers_bucket_numbers(method: str, allocated: int, used: int) -> None:
    """At 14 x 14 with a class token: what the released code allocates, and what the paper counts (Table 1)."""
    grid = Grid(14, 14, prefix=1)
    found = [Buckets(mapping, grid, grid) for mapping in irpe(method, grid).mappings.values()]
    assert sum(buckets.count for buckets in found) == allocated
    assert sum(buckets.dense().unique().numel() for buckets in found) == used


@pytest.mark.parametrize(("ratio", "allocated", "used"), [(2.5, 122, 82), (3.0, 170, 122)])
def test_products_of_large_ratios_do_not_use_all(ratio: float, allocated: int, used: int) -> None:
    g = Piecewise(ratio, 2 * ratio, 8 * ratio)
    grid = Grid(14, 14, prefix=1)
    buckets = Buckets(Separable(g, g), grid, grid)
    assert (buckets.count, buckets.dense().unique().numel()) == (allocated, used)


@pytest.mark.parametrize("mapping", [Euclidean(RELEASED), Quantization(RELEASED, "squared")], ids=str)
def test_distances_use_the_upper_half(mapping: Mapping) -> None:
    assert mapping.count == 7
    assert ids(mapping, 14, 14).unique().tolist() == [3, 4, 5, 6]


def test_rank_numbers_the_distances_of_the_plane_whatever_the_grid() -> None:
    ranks = {d: n for n, d in enumerate(sorted({a * a + b * b for a in range(40) for b in range(40)}))}
    for height, width in ((1, 1), (1, 9), (9, 1), (3, 5), (14, 14)):
        found = ids(Quantization(Clip(400), "rank"), height, width) - 400
        places = list(itertools.product(range(height), range(width)))
        expected = [[ranks[(a - c) ** 2 + (b - d) ** 2] for c, d in places] for a, b in places]
        assert found.tolist() == expected


def test_rank_of_keys_on_a_larger_grid() -> None:
    found = Buckets(Quantization(Clip(400), "rank"), Grid(1, 2), Grid(6, 7)).dense() - 400
    large = ids(Quantization(Clip(400), "rank"), 6, 7) - 400
    assert torch.equal(found, large[:2])


@pytest.mark.parametrize("rounded", [True, False])
def test_distances_are_rounded_before_g_or_not(rounded: bool) -> None:
    """√13 = 3.61 is rounded to 4, whose bucket is 3; by itself it falls in 2."""
    places = list(itertools.product(range(4), range(5)))
    distances = [[math.hypot(a - c, b - d) for c, d in places] for a, b in places]
    expected = [[piecewise(round(x) if rounded else x, 1.9, 3.8, 15.2) for x in row] for row in distances]
    assert (ids(Euclidean(RELEASED, rounded), 4, 5) - 3).tolist() == expected
    assert expected[0][places.index((2, 3))] == (3 if rounded else 2)


def test_buckets_of_queries_and_keys_on_two_grids() -> None:
    mapping = Separable(Clip(2), Clip(3))
    queries, keys = Grid(2, 3, prefix=1), Grid(4, 2)
    found = Buckets(mapping, queries, keys).dense()
    assert found.shape == (7, 8)
    assert (found[0] == mapping.count).all()
    for i, (a, b) in enumerate(itertools.product(range(2), range(3))):
        for j, (c, d) in enumerate(itertools.product(range(4), range(2))):
            assert found[1 + i, j] == (clip(a - c, 2) + 2) * 7 + clip(b - d, 3) + 3


@pytest.mark.parametrize(("height", "width"), list(itertools.product(range(1, 7), range(1, 7))))
def test_flattened_offsets_do_not_collide(height: int, width: int) -> None:
    rows, columns = 2 * height - 1, 2 * width - 1
    count = rows * columns
    grid = Grid(height, width)
    found = OffsetBias(torch.arange(count, dtype=torch.float64).view(1, rows, columns), grid, grid).dense()[0]
    assert found.unique().numel() == count
    assert (found + found.T == count - 1).all()


def test_flattened_offsets_of_a_2_by_3_window() -> None:
    grid = Grid(2, 3)
    found = OffsetBias(torch.arange(15.0).view(1, 3, 5), grid, grid).dense()[0]
    assert found[0].tolist() == [7, 6, 5, 2, 1, 0]


@pytest.mark.parametrize("beta", [0, 0.5, -1, math.inf, math.nan])
def test_clip_refuses(beta: float) -> None:
    with pytest.raises(InputError, match=f"beta={beta!r}"):
        Clip(beta)


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma"),
    [(0, 2, 8), (-1, 2, 8), (3, 2, 8), (2, 4, 2), (2, 4, 1), (0.3, 0.6, 2.4), (1, math.inf, 8), (1, 2, math.nan)],
)
def test_piecewise_refuses(alpha: float, beta: float, gamma: float) -> None:
    with pytest.raises(InputError, match="expected"):
        Piecewise(alpha, beta, gamma)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 3, 0), "height=0"),
        ((3, -1, 0), "width=-1"),
        ((3, 3, -1), "prefix=-1"),
        ((3.0, 3, 0), "height=3.0"),
        ((True, 3, 0), "height=True"),
        (("3", 3, 0), "height='3'"),
    ],
)
def test_grid_refuses(values: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Grid(*values)


def test_grid_counts_its_tokens() -> None:
    grid = Grid(3, 6)
    grid.check(18, "x")
    with pytest.raises(InputError, match=r"x has 19 tokens, .* holds 0 \+ 3 \* 6 = 18"):
        grid.check(19, "x")
