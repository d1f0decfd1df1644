"""Where tokens are."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from whereformer.errors import InputError


@dataclass(frozen=True, repr=False)
class Grid:
    """Tokens in the order a vision transformer sees them: prefix tokens, then patches row by row.

    Args:
        height: rows of patches. A sequence is one row.
        width: columns of patches.
        prefix: tokens before the patches that have no place (class, distillation, registers).
        frames: how many such images follow one another, patches frame by frame: a video. None: an image.

    >>> grid = Grid(2, 3, prefix=1)
    >>> grid.tokens
    7
    >>> grid.coords().tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """

    height: int
    width: int
    prefix: int = 0
    frames: int | None = None

    regular: ClassVar[bool] = True
    """Whether every patch of the grid is there."""

    def __post_init__(self) -> None:
        for name, least in (("height", 1), ("width", 1), ("prefix", 0), ("frames", 1)):
            value = getattr(self, name)
            if name == "frames" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
                raise InputError(f"Grid: {name}={value!r}, expected an integer of at least {least}")

    @property
    def size(self) -> tuple[int, ...]:
        """(height, width), or (frames, height, width)."""
        image = (self.height, self.width)
        return image if self.frames is None else (self.frames, *image)

    @property
    def axes(self) -> int:
        """How many numbers say where a patch is: 2, or 3 in a video."""
        return len(self.size)

    @property
    def patches(self) -> int:
        return math.prod(self.size)

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    def coords(self, device: torch.device | None = None) -> Tensor:
        """(y, x), or (t, y, x), of each patch, in patches: [patches, axes], int64."""
        return _lattice([(0, n) for n in self.size], device).flatten(0, -2)

    def raster(self, device: torch.device | None = None) -> Tensor:
        """The number of each patch in row-by-row order: [patches], int64."""
        return torch.arange(self.patches, device=device)

    def offsets(self, keys: "Grid", device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Query minus key along each axis, in patches, this grid holding the queries.

        Returns (dy, dx), or (dt, dy, dx), which broadcast together to the offsets of all pairs of patches: int64,
        dy [height, 1, keys.height, 1] and dx [1, width, 1, keys.width], whose first and last axes flatten to
        patches. If one of the two is a `Points`: [b or 1, patches, keys.patches] each.
        """
        self._check_axes(keys)
        if not (self.regular and keys.regular):
            ours, theirs = self.coords(device), keys.coords(device)
            offsets = ours[..., :, None, :] - theirs[..., None, :, :]
            return offsets.unbind(-1)
        found = []
        for axis, (n, m) in enumerate(zip(self.size, keys.size, strict=True)):
            shape = [1] * (2 * self.axes)
            shape[axis], shape[axis + self.axes] = n, m
            ours, theirs = torch.arange(n, device=device), torch.arange(m, device=device)
            found.append((ours[:, None] - theirs).reshape(shape))
        return tuple(found)

    def pairs(self, keys: "Grid", device: torch.device | None = None) -> Tensor:
        """`offsets` of all pairs, written out: [patches, keys.patches, axes], from `Points` [b or 1, ...]."""
        return self.flatten(keys, torch.stack(torch.broadcast_tensors(*self.offsets(keys, device)), -1))

    def flatten(self, keys: "Grid", pairs: Tensor) -> Tensor:
        """What was made of `offsets`, with axes of its own or none behind: [(b,) patches, keys.patches, ...]."""
        if not (self.regular and keys.regular):
            return pairs
        return pairs.reshape(self.patches, keys.patches, *pairs.shape[2 * self.axes :])

    def span(self, keys: "Grid", device: torch.device | None = None) -> Tensor:
        """Every offset that occurs, in order: [height + keys.height − 1, width + keys.width − 1, axes], int64."""
        self._check_axes(keys)
        return _lattice([(1 - m, n) for n, m in zip(self.size, keys.size, strict=True)], device)

    def lay(self, x: Tensor) -> Tensor:
        """The patches among tokens [..., tokens, d] as an image [..., *size, d]; zeros where one is missing."""
        self.check(x.shape[-2], "x")
        return x[..., self.prefix :, :].unflatten(-2, self.size)

    def pick(self, image: Tensor) -> Tensor:
        """What an image [..., *size, d] holds at each patch: [..., patches, d]."""
        return image.flatten(-1 - self.axes, -2)

    def keep(self, index: Tensor) -> "Points":
        """This grid with only some of its patches, as with token dropping or in a masked autoencoder.

        Args:
            index: [b or 1, kept], int64: the numbers, in row-by-row order, of the patches that are kept, in the
                order in which the tokens come; none of them twice.

        >>> Grid(2, 3).keep(torch.tensor([[4, 0]])).coords().tolist()
        [[[1, 1], [0, 0]]]
        """
        self._check_index(index)
        at, rest = [], index
        for n in reversed(self.size):
            at.append(rest % n)
            rest = rest // n
        return Points(self.height, self.width, self.prefix, self.frames, at=torch.stack(at[::-1], -1))

    def as_row(self, device: torch.device | None = None) -> "Grid":
        """The same tokens as a sequence: one row, in row-by-row order."""
        return Grid(1, self.patches, self.prefix)

    def _check_index(self, index: Tensor) -> None:
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim != 2:
            found = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else repr(index)
            raise InputError(f"keep: index {found}, expected [batch or 1, kept] of torch.int64")
        if _can_be_read(index):
            least, most = index.min().item(), index.max().item()
            if least < 0 or most >= self.patches:
                raise InputError(
                    f"keep: index from {least} to {most}, but {self} has patches 0 to {self.patches - 1}"
                )

    def check(self, tokens: int, what: str) -> None:
        """Raise unless `tokens` tokens lie on this grid."""
        if tokens != self.tokens:
            patches = " * ".join(map(str, self.size)) if self.regular else self.patches
            raise InputError(
                f"{what} has {tokens} tokens, but {self} holds {self.prefix} + {patches} = {self.tokens}"
            )

    def _check_axes(self, keys: "Grid") -> None:
        if self.axes != keys.axes:
            raise InputError(f"queries on {self} and keys on {keys}: expected two images or two videos")

    def __repr__(self) -> str:
        frames = "" if self.frames is None else f", frames={self.frames}"
        return f"Grid(height={self.height}, width={self.width}, prefix={self.prefix}{frames})"


@dataclass(frozen=True, eq=False, repr=False)
class Points(Grid):
    """Tokens that do not fill their grid: what `Grid.keep` leaves of it, or points of any coordinates.

    Args:
        at: [b or 1, points, axes]: (y, x), or (t, y, x), of each token behind the prefix, in patches. Whole
            (int64) ones are patches of the grid. Others (floating) lie between them, 0 being the centre of the
            first patch; then only encodings that are functions of coordinates can serve.
        height, width, prefix, frames: as in `Grid`: the image they lie in.
    """

    at: Tensor = field(kw_only=True)

    regular: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at = self.at
        whole = isinstance(at, Tensor) and at.dtype == torch.int64
        if not (whole or (isinstance(at, Tensor) and at.dtype.is_floating_point)):
            raise InputError(f"Points: at is {getattr(at, 'dtype', at)!r}, expected a tensor, int64 or floating")
        if at.ndim != 3 or at.shape[-1] != self.axes:
            raise InputError(f"Points: at {tuple(at.shape)}, expected [batch or 1, points, {self.axes}]")
        if whole and _can_be_read(at):
            least, most = at.amin((0, 1)).tolist(), at.amax((0, 1)).tolist()
            if min(least) < 0 or any(m >= n for m, n in zip(most, self.size, strict=True)):
                raise InputError(
                    f"Points: at from {least} to {most}, but the grid has {self.size} patches; between or beyond"
                    " patches, coordinates are floating"
                )

    @property
    def patches(self) -> int:
        return self.at.shape[1]

    @property
    def whole(self) -> bool:
        """Whether the points are patches of the grid."""
        return self.at.dtype == torch.int64

    def coords(self, device: torch.device | None = None) -> Tensor:
        """(y, x), or (t, y, x), of each token, in patches: [b or 1, points, axes], int64 or floating."""
        return self.at if device is None else self.at.to(device)

    def keep(self, index: Tensor) -> "Points":
        """Only some of these tokens; `index` counts them in their order here: [b or 1, kept], int64."""
        self._check_index(index)
        batch = torch.broadcast_shapes(index.shape[:1], self.at.shape[:1])
        at = self.coords(index.device).expand(*batch, -1, -1)
        at = at.gather(1, index.expand(*batch, -1)[..., None].expand(-1, -1, self.axes))
        return Points(self.height, self.width, self.prefix, self.frames, at=at)

    def check_batch(self, batch: int, what: str) -> None:
        """Raise unless there is a choice of tokens for each of `batch` images, or one for all."""
        if self.at.shape[0] not in (1, batch):
            raise InputError(f"{what} has a batch of {batch}, but {self} has one of {self.at.shape[0]}")

    def raster(self, device: torch.device | None = None) -> Tensor:
        """The number of each patch in row-by-row order of the whole grid: [b or 1, points], int64."""
        if not self.whole:
            raise InputError(f"{self} lies between patches: expected whole (int64) coordinates for this encoding")
        number = 0
        for n, place in zip(self.size, self.coords(device).unbind(-1), strict=True):
            number = number * n + place
        assert isinstance(number, Tensor)
        return number

    def as_row(self, device: torch.device | None = None) -> "Points":
        number = self.raster(device)
        at = torch.stack([torch.zeros_like(number), number], -1)
        return Points(1, math.prod(self.size), self.prefix, at=at)

    def lay(self, x: Tensor) -> Tensor:
        self.check(x.shape[-2], "x")
        index = self._index(x)
        patches = x[..., self.prefix :, :]
        image = x.new_zeros(*x.shape[:-2], math.prod(self.size), x.shape[-1])
        return image.scatter(-2, index.expand_as(patches), patches).unflatten(-2, self.size)

    def pick(self, image: Tensor) -> Tensor:
        index, patches = self._index(image, self.axes), image.flatten(-1 - self.axes, -2)
        batch = torch.broadcast_shapes(index.shape[:-2], patches.shape[:-2])
        return patches.expand(*batch, -1, -1).gather(-2, index.expand(*batch, -1, patches.shape[-1]))

    def _index(self, like: Tensor, axes: int = 1) -> Tensor:
        """`raster`, with axes put in for what `like` has between its batch and its `axes` axes of patches."""
        index = self.raster(like.device)
        between = like.ndim - axes - 2
        return index.reshape(index.shape[0], *[1] * between, index.shape[1], 1)

    def __repr__(self) -> str:
        return f"Points({self.patches} of {super().__repr__()})"


def _can_be_read(index: Tensor) -> bool:
    """Whether looking at numbers costs nothing: not if it would wait for a device, or bind a graph to them."""
    return not torch.compiler.is_compiling() and index.device.type == "cpu" and index.numel() > 0


def _lattice(ranges: list[tuple[int, int]], device: torch.device | None) -> Tensor:
    """All whole points of a box: [n, m, ..., axes]."""
    axes = [torch.arange(start, stop, device=device) for start, stop in ranges]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
