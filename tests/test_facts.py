"""What is said of each encoding is what it does."""

import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whereformer import (
    AddedValues,
    Buckets,
    BucketValues,
    DenseBias,
    Grid,
    InputError,
    LowRankBias,
    OffsetBias,
    PositionEncoding,
    Rotation,
)
from whereformer.catalog import CATALOG, FAMILIES, options
from whereformer.encoding import MOMENTS
from whereformer.facts import FAMILY, MASKS, SIZES, Entry, docstring, entries, entry, in_words
from whereformer.index import Clip, Separable
from whereformer.resample import resample


@pytest.fixture(scope="module")
def catalog() -> dict[str, Entry]:
    return {found.name: found for found in entries()}


def test_every_encoding_has_facts(catalog: dict[str, Entry]) -> None:
    assert list(catalog) == list(CATALOG)
    for name, found in catalog.items():
        assert found.formula
        assert found.paper
        assert name in FAMILIES[found.family]
        assert set(found.moments) <= set(MOMENTS)
        assert found.options == options(CATALOG[name])
        assert found.sizes in SIZES
        assert found.mask in MASKS
        assert in_words(found)


def test_families_are_what_they_say(catalog: dict[str, Entry]) -> None:
    assert list(FAMILY) == list(FAMILIES)
    for name, found in catalog.items():
        if found.family == "absolute":
            assert set(found.moments) <= {"tokens"}, name
            assert not found.contextual, name
        assert ("rotations" in found.moments) == (found.family == "rotary"), name
        if found.family in ("biases", "contextual"):
            assert "biases" in found.moments, name
        if found.family == "conditional":
            assert found.contextual, name
            assert found.moments, name


def test_every_option_is_explained() -> None:
    for name, cls in CATALOG.items():
        told = {option: text for names, text in docstring(cls).options.items() for option in names.split(", ")}
        assert set(told) == set(options(cls)), name
        assert all(told.values()), name


def test_docstrings_are_taken_apart_whole() -> None:
    for name, cls in CATALOG.items():
        taken = docstring(cls)
        assert taken.body, name
        parts = [taken.body, *taken.sections.values(), *taken.options, *taken.options.values()]
        got = sorted(re.findall(r"\w+", " ".join([*parts, *taken.sections])))
        whole = re.sub(r"^ *>>> .*\n.*$", "", inspect.cleandoc(cls.__doc__ or ""), flags=re.MULTILINE)
        assert got == sorted(re.findall(r"\w+", whole.replace("Args:", ""))), name


def test_counts_of_deit_s(catalog: dict[str, Entry]) -> None:
    assert catalog["learned"].parameters == (1 + 14 * 14) * 384
    assert catalog["irpe"].parameters == 12 * 64 * 50
    assert catalog["irpe"].macs == 12 * 197 * 384 * 50  # Table 5: 4659 M, without 4613 M
    assert catalog["peg"].parameters == 384 * 9 + 384
    assert (catalog["none"].parameters, catalog["none"].macs, catalog["none"].moments) == (0, 0, ())
    assert [(t.name, t.shape, t.learned) for t in catalog["irpe"].tensors] == [("tables.k", (1, 64, 50), True)]


def test_options_change_the_facts() -> None:
    qkv = entry("irpe(on='qkv', shared=False)")
    assert qkv.name == "irpe(on='qkv', shared=False)"
    assert qkv.family == "contextual"
    assert (qkv.moments, qkv.forms) == (("biases", "values"), ("BucketBias", "BucketValues"))
    assert qkv.backends == ("cpu",)
    assert qkv.parameters == 12 * 3 * 6 * 64 * 50
    assert (qkv.options["on"], qkv.options["method"]) == ("qkv", "product")
    assert qkv.mask == "per head and image"
    bias = entry("irpe(mode='bias')")
    assert (bias.contextual, bias.mask, bias.macs) == (False, "one", 0)


def test_one_at_a_time() -> None:
    with pytest.raises(InputError, match="names 2, expected one"):
        entry("learned + irpe")


class Mine(PositionEncoding):
    def _table(self, *shape: int) -> None:
        self.table = nn.Parameter(torch.zeros(*shape))


class ByNumber(Mine):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return x + (grid.raster() / 7).sin()[..., None]


class Stretched(Mine):
    def rotations(self, grid: Grid) -> Iterable[Rotation]:
        yield Rotation((grid.coords() / grid.height).sum(-1)[None, :, None])


class Shifted(Mine):  # by half the grid: relative angles stay
    def rotations(self, grid: Grid) -> Iterable[Rotation]:
        yield Rotation((grid.coords() - grid.height / 2).sum(-1)[None, :, None])


class Resampled(Mine):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self._table(grid.height, grid.width, dim)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return x + grid.pick(resample(self.table, (grid.height, grid.width))[None])


class Limited(Mine):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, most: int = 40) -> None:
        super().__init__(dim, num_heads, grid)
        self.most = most
        self._table(most, dim)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        if grid.height > self.most:
            raise InputError(f"height={grid.height}")
        return x + self.table[grid.coords()[..., 0]]


class Whole(Mine):
    crosses = False

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[DenseBias]:
        if not queries.regular:
            raise InputError("not on a part")
        yield DenseBias((q * k).sum(-1).mean(1)[:, None, :, None])


class Far(Mine):
    axes = (2, 3)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[OffsetBias | DenseBias]:
        yield OffsetBias.of(lambda offsets: -offsets.square().sum(-1)[None].float(), queries, keys)


class Thin(Mine):
    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[LowRankBias]:
        yield LowRankBias(q, k)


class Convolved(Mine):
    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterable[AddedValues]:
        yield AddedValues(v)


class Summed(Mine):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self._table(1, 9, self.head_dim)

    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterable[BucketValues]:
        yield BucketValues(self.table, Buckets(Separable(Clip(1), Clip(1)), queries, keys))


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (ByNumber, {"sizes": "by number", "contextual": False, "forms": (), "video": False}),
        (Stretched, {"sizes": "stretched", "contextual": False, "forms": ("Rotation",), "mask": ""}),
        (Shifted, {"sizes": "exact", "copies": 12}),
        (Resampled, {"sizes": "resampled", "parameters": 14 * 14 * 384, "copies": 1, "keeps": True}),
        (Limited, {"sizes": "limited"}),
        (functools.partial(Limited, most=8), {"sizes": "home", "options": {"most": 8}}),
        (Whole, {"crosses": False, "keeps": False, "contextual": True, "mask": "per image"}),
        (Far, {"sizes": "exact", "contextual": False, "mask": "one", "video": True, "family": ""}),
        (Thin, {"contextual": True, "mask": "", "backends": ("cpu", "sdpa")}),
        (Convolved, {"contextual": True, "moments": ("values",), "backends": ("cpu", "sdpa")}),
        (Summed, {"contextual": True, "backends": ("cpu",), "sizes": "exact"}),
    ],
)
def test_what_is_asked_is_found(cls: Any, expected: dict[str, object]) -> None:
    found = entry(cls)
    assert {name: getattr(found, name) for name in expected} == expected


def test_asking_leaves_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    entry("learned")
    assert torch.equal(torch.random.get_rng_state(), before)
