"""From an offset to a bucket: the index functions and mappings of relative encodings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import InputError, check_positive
from whereformer.grid import Grid


class Index(Protocol):
    """A function from offsets or distances, in patches, to the integers -reach ... reach."""

    @property
    def reach(self) -> int: ...

    @property
    def far(self) -> int:
        """From this distance on, all offsets of one sign fall together."""
        ...

    def __call__(self, offset: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Clip:
    """h(x) = max(-β, min(β, [x])).   Shaw et al. 2018, eq. 9; iRPE, eq. 9.

    >>> Clip(2)(torch.arange(-4, 5)).tolist()
    [-2, -2, -2, -1, 0, 1, 2, 2, 2]
    """

    beta: float

    def __post_init__(self) -> None:
        check_positive("Clip: beta", self.beta)
        if self.beta < 1:
            raise InputError(f"Clip: beta={self.beta!r}, expected a number of at least 1, in patches")

    @property
    def reach(self) -> int:
        return int(self.beta)

    @property
    def far(self) -> int:
        return math.ceil(self.beta)

    def __call__(self, offset: Tensor) -> Tensor:
        return offset.float().round().clamp(-self.reach, self.reach).long()


@dataclass(frozen=True)
class Piecewise:
    """g(x) = [x] for |x| <= α, else sign(x) min(β, [α + ln(|x|/α) / ln(γ/α) (β − α)]).   iRPE, eq. 18.

    Fine near, coarse far. β need not be whole: like the released code, ids are cut towards zero, so that
    g lies in -int(β) ... int(β).

    >>> Piecewise(1.9, 3.8, 15.2)(torch.arange(8)).tolist()
    [0, 1, 2, 2, 3, 3, 3, 3]
    """

    alpha: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta), ("gamma", self.gamma)):
            check_positive(f"Piecewise: {name}", value)
        if not (self.alpha <= self.beta and self.alpha < self.gamma):
            raise InputError(f"{self}: expected alpha <= beta and alpha < gamma, in patches")
        if self.beta < 1:
            raise InputError(f"{self}: expected a beta of at least 1 patch: below it all offsets fall together")

    @property
    def reach(self) -> int:
        return int(self.beta)

    @property
    def far(self) -> int:
        return math.ceil(self.gamma)

    def __call__(self, offset: Tensor) -> Tensor:
        offset = offset.float()
        size = offset.abs()
        far = (size.clamp(min=self.alpha) / self.alpha).log() / math.log(self.gamma / self.alpha)
        far = (self.alpha + far * (self.beta - self.alpha)).round().clamp(max=self.beta)
        return torch.where(size <= self.alpha, offset.round(), offset.sign() * far).long()


class Mapping(Protocol):
    """A function from offsets, one tensor per axis as `Grid.offsets` gives them, to buckets 0 ... count - 1."""

    @property
    def count(self) -> int: ...

    def __call__(self, *offsets: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Euclidean:
    """I = g(sqrt(dy² + dx²)).   iRPE, eq. 19-20.

    `rounded`: the distance is rounded to whole patches before g, as the released code does (eq. 20 does not).
    Ids below g(0) = reach are never used: a distance has no sign.
    """

    index: Index
    rounded: bool = True

    @property
    def count(self) -> int:
        return 2 * self.index.reach + 1

    def __call__(self, *offsets: Tensor) -> Tensor:
        distance = _squared(offsets).float().sqrt()
        return self.index(distance.round() if self.rounded else distance) + self.index.reach


@dataclass(frozen=True)
class Quantization:
    """I = g(quant(sqrt(dy² + dx²))).   iRPE, eq. 21.

    `by="rank"`: quant numbers the distances that occur between points of a plane, {0, 1, 1.41, 2, 2.24, ...}
    -> {0, 1, 2, 3, 4, ...}, whatever the size of the grid (the paper). `by="squared"`: quant(x) = x² (the
    released code).
    """

    index: Index
    by: Literal["rank", "squared"] = "rank"

    @property
    def count(self) -> int:
        return 2 * self.index.reach + 1

    def __call__(self, *offsets: Tensor) -> Tensor:
        squared = _squared(offsets)
        if self.by == "rank":
            occurring = torch.tensor(_sums_of_two_squares(self.index.far + 1), device=squared.device)
            squared = torch.searchsorted(occurring, squared.contiguous())  # how many are smaller
        return self.index(squared) + self.index.reach


@dataclass(frozen=True)
class Separable:
    """I = rows(dy) + columns(dx): one map per axis, so that no kernel needs the map of all pairs.

    Both axes: the product mapping, p_{g(dy), g(dx)} (iRPE, eq. 25). One axis: a half of the cross mapping,
    p_{g(dy)} or p_{g(dx)} (eq. 23-24).
    """

    rows_index: Index | None
    columns_index: Index | None
    count: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _ids(self.rows_index) * _ids(self.columns_index))

    def rows(self, dy: Tensor) -> Tensor:
        return _place(self.rows_index, dy) * _ids(self.columns_index)

    def columns(self, dx: Tensor) -> Tensor:
        return _place(self.columns_index, dx)

    def __call__(self, *offsets: Tensor) -> Tensor:
        dy, dx = offsets
        return self.rows(dy) + self.columns(dx)


def _squared(offsets: Sequence[Tensor]) -> Tensor:
    squares = [offset.square() for offset in offsets]
    return sum(squares[1:], start=squares[0])


def _sums_of_two_squares(count: int) -> list[int]:
    """The first so many: 0, 1, 2, 4, 5, 8, ..."""
    side = 1
    while (
        len(found := {y * y + x * x for y in range(side) for x in range(side) if y * y + x * x < side * side})
        < count
    ):
        side *= 2
    return sorted(found)[:count]


def _ids(index: Index | None) -> int:
    return 1 if index is None else 2 * index.reach + 1


def _place(index: Index | None, offset: Tensor) -> Tensor:
    return torch.zeros_like(offset, dtype=torch.int64) if index is None else index(offset) + index.reach


@dataclass(frozen=True)
class Buckets:
    """Which bucket each pair of a query and a key falls in.

    Pairs of patches fall where `mapping` puts the offset query − key; every pair with a prefix token falls in
    one extra bucket, the last.

    >>> grid = Grid(1, 3, prefix=1)
    >>> Buckets(Separable(None, Clip(1)), grid, grid).dense().tolist()
    [[3, 3, 3, 3], [3, 1, 0, 0], [3, 2, 1, 0], [3, 2, 2, 1]]
    """

    mapping: Mapping
    queries: Grid
    keys: Grid

    @property
    def count(self) -> int:
        return self.mapping.count + bool(self.queries.prefix or self.keys.prefix)

    def dense(self, device: torch.device | None = None) -> Tensor:
        """[queries.tokens, keys.tokens], int64; from `Points` with a batch before."""
        patches = self.queries.flatten(self.keys, self.mapping(*self.queries.offsets(self.keys, device)))
        last = self.mapping.count  # added, as a padding value would bind an exported program to it
        return F.pad(patches - last, (self.keys.prefix, 0, self.queries.prefix, 0)) + last
