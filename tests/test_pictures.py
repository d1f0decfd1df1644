"""Pictures show what encodings do."""

import math
from collections.abc import Iterable
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from whereformer import AddedValues, DenseBias, Grid, OffsetBias, PositionEncoding, Rotation
from whereformer.catalog import CATALOG
from whereformer.encodings import IRPE, PEG, NoPositions, SinCos2D
from whereformer.lab.pictures import GRID, MARKS, Map, Picture, Row, picture, svg

PLACES = [(y, x) for y in range(GRID.height) for x in range(GRID.width)]


class Far(PositionEncoding):
    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[OffsetBias | DenseBias]:
        slopes = torch.arange(1.0, 7)[:, None, None] / 8
        yield OffsetBias.of(lambda offsets: -slopes * offsets.square().sum(-1), queries, keys)


class Waves(PositionEncoding):
    def rotations(self, grid: Grid) -> Iterable[Rotation]:
        yield Rotation((grid.coords()[:, 1] * 0.5)[None, :, None])


class Zeros(PositionEncoding):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.number = nn.Parameter(torch.zeros(()))

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[OffsetBias | DenseBias]:
        yield OffsetBias.of(lambda offsets: self.number * offsets[None, ..., 0], queries, keys)


class Twice(PositionEncoding):
    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterable[AddedValues]:
        yield AddedValues(2 * v)


def test_a_bias_is_shown_from_the_marked_patch() -> None:
    first, heads = picture(Far).rows
    for one, mark in zip(first.maps, MARKS, strict=True):
        assert one.mark == mark
        for y, x in PLACES:
            assert one.values[y, x] == (-((y - mark[0]) ** 2) - (x - mark[1]) ** 2) / 8
    assert first.ends == (-(8**2 + 12**2) / 8, (8**2 + 12**2) / 8)
    assert [one.values[0, 6].item() for one in heads.maps] == [-2.0 * h for h in range(1, 7)]


def test_turned_features_are_shown_as_cosines() -> None:
    mean, single = picture(Waves).rows
    y, x = MARKS[1]
    assert mean.maps[1].values[y + 3, x + 4].item() == pytest.approx((31 + math.cos(2)) / 32)
    steepest = single.maps[0]
    assert steepest.label == "feature 1"
    assert steepest.values[0, MARKS[0][1] + 3].item() == pytest.approx(math.cos(1.5), abs=1e-6)


def test_added_tokens_are_compared() -> None:
    similarity, features = picture(SinCos2D).rows
    table = SinCos2D(384, 6, GRID).table(GRID).double()
    for one, (y, x) in zip(similarity.maps, MARKS, strict=True):
        for (other_y, other_x), row in zip(PLACES, table, strict=True):
            mine = table[y * GRID.width + x]
            expected = (mine @ row / (mine.norm() * row.norm())).item()
            assert one.values[other_y, other_x].item() == pytest.approx(expected, abs=1e-5)
    for one in features.maps:
        feature = int(one.label.split()[1]) - 1
        torch.testing.assert_close(one.values.flatten().double(), table[:, feature])
    assert similarity.ends[1] == 1


def test_a_convolution_is_shown_by_what_one_patch_reaches() -> None:
    impulse, ones = picture(PEG).rows
    for one, (y, x) in zip(impulse.maps, MARKS, strict=True):
        for place in PLACES:
            near = max(abs(place[0] - y), abs(place[1] - x)) <= 1
            assert (one.values[place] > 0.3) == near
    for one in ones.maps:
        assert one.values[1:-1, 1:-1].std() < 1e-5
        assert one.values.std() > 1e-3


def test_a_local_value_term_is_shown_likewise() -> None:
    impulse, _ = picture(Twice).rows
    y, x = MARKS[2]
    assert impulse.maps[2].values[y, x].item() == pytest.approx(2)
    assert impulse.maps[2].values.sum().item() == pytest.approx(2)


def test_buckets_are_shown_as_they_are() -> None:
    *_, buckets = picture(IRPE).rows
    assert buckets.kind == "buckets"
    values = buckets.maps[0].values
    assert values[4, 6] == 24  # (0, 0) is the middle of 7 x 7
    assert values[4, 5] == 25
    assert values[3, 6] == 24 + 7


def test_tables_that_start_at_zero_are_drawn() -> None:
    shown = picture(Zeros)
    assert "start such that nothing is said" in shown.caption
    assert any(one.values.abs().max() > 0 for one in shown.rows[0].maps)
    assert "start such" not in picture(Far).caption


def test_queries_are_no_rows_of_tables() -> None:
    class Table(PositionEncoding):
        def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
            super().__init__(dim, num_heads, grid)
            self.rows = nn.Parameter(torch.randn(grid.patches, self.head_dim))

        def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[DenseBias]:
            yield DenseBias(q @ self.rows.mT)

    for row in picture(Table).rows:
        for one in row.maps:
            assert one.values.abs().max() < 5 * one.values.std()  # equal ones would be at 8 in one place


def test_nothing_is_shown_as_nothing() -> None:
    (row,) = picture(NoPositions).rows
    assert all(not one.values.any() for one in row.maps)


def test_forbidden_keys_stretch_no_scale() -> None:
    values = torch.zeros(GRID.size)
    values[0] = -torch.inf
    values[1] = -1000
    values[2] = -3
    row = Row("biases", "masked", "signed", (Map(values, "one"),))
    assert row.ends == (-3, 3)
    drawn = svg(Picture((row,), ""), "masked")
    assert "grey: kept out" in drawn
    assert '<path stroke="#c4c9d1" d="M0 0h13M0 1h13"/>' in drawn


def test_what_no_softmax_sees_hides_nothing() -> None:
    class High(PositionEncoding):
        def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[OffsetBias | DenseBias]:
            yield OffsetBias.of(lambda offsets: 50 + 0.01 * offsets[None, ..., 0], queries, keys)

    row = picture(High).rows[0]
    assert row.title.endswith("less its mean")
    assert row.maps[0].values[0, 0].item() == pytest.approx(0.04, abs=1e-4)


@pytest.mark.parametrize("name", CATALOG)
def test_every_encoding_has_a_picture_that_is_always_the_same(name: str) -> None:
    drawn = svg(picture(CATALOG[name]), name)
    torch.manual_seed(1)
    assert svg(picture(CATALOG[name]), name) == drawn
    root = ElementTree.fromstring(drawn)
    assert len(drawn.encode()) < 40_000
    assert root.findall(".//{http://www.w3.org/2000/svg}path")
