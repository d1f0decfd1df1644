"""From an offset to a bucket: the index functions and mappings of relative encodings."""

import math
from dataclasses import dataclass
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

    def __call__(self, offset: Tensor) -> Tensor:
        offset = offset.float()
        size = offset.abs()
        far = (size.clamp(min=self.alpha) / self.alpha).log() / math.log(self.gamma / self.alpha)
        far = (self.alpha + far * (self.beta - self.alpha)).round().clamp(max=self.beta)
        return torch.where(size <= self.alpha, offset.round(), offset.sign() * far).long()


class Mapping(Protocol):
    """A function from offsets (dy, dx), in patches, to buckets 0 ... count - 1.

    The offsets are those of all pairs on two grids, shaped as `Grid.offsets` gives them: a mapping may rely on no
    offset being larger than the axes are long.
    """

    @property
    def count(self) -> int: ...

    def __call__(self, dy: Tensor, dx: Tensor) -> Tensor: ...


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

    def __call__(self, dy: Tensor, dx: Tensor) -> Tensor:
        distance = (dy.square() + dx.square()).float().sqrt()
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

    def __call__(self, dy: Tensor, dx: Tensor) -> Tensor:
        squared = dy.square() + dx.square()
        if self.by == "rank":
            squared = self._rank(squared)
        return self.index(squared) + self.index.reach

    @staticmethod
    def _rank(squared: Tensor) -> Tensor:
        """How many sums of two squares are smaller. The axes are as long as the grids, which bounds offsets."""
        side = sum(squared.shape)
        squares = torch.arange(side, device=squared.device).square()
        occurs = torch.zeros(2 * side * side, dtype=torch.long, device=squared.device)
        occurs[squares[:, None] + squares] = 1
        return (occurs.cumsum(0) - 1)[squared]


@dataclass(frozen=True)
class Separable:
    """I = rows(dy) + columns(dx): one map per axis, so that no kernel needs the map of all pairs.

    Both axes: the product mapping, p_{g(dy), g(dx)} (iRPE, eq. 25). One axis: a half of the cross mapping,
    p_{g(dy)} or p_{g(dx)} (eq. 23-24).
    """

    rows_index: Index | None
    columns_index: Index | None

    @property
    def count(self) -> int:
        return _ids(self.rows_index) * _ids(self.columns_index)

    def rows(self, dy: Tensor) -> Tensor:
        return _place(self.rows_index, dy) * _ids(self.columns_index)

    def columns(self, dx: Tensor) -> Tensor:
        return _place(self.columns_index, dx)

    def __call__(self, dy: Tensor, dx: Tensor) -> Tensor:
        return self.rows(dy) + self.columns(dx)


def _ids(index: Index | None) -> int:
    return 1 if index is None else 2 * index.reach + 1


def _place(index: Index | None, offset: Tensor) -> Tensor:
    return torch.zeros_like(offset) if index is None else index(offset) + index.reach


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
        """[queries.tokens, keys.tokens], int64."""
        dy, dx = self.queries.offsets(self.keys, device)
        patches = self.mapping(dy, dx).reshape(self.queries.patches, self.keys.patches)
        return F.pad(patches, (self.keys.prefix, 0, self.queries.prefix, 0), value=self.mapping.count)
