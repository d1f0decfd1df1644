"""Attention within windows: a grid cut into small ones, shifted or not."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import InputError
from whereformer.grid import Grid


@dataclass(frozen=True)
class Windows:
    """A grid cut into windows: padded below and to the right, then shifted, then cut.   Swin, section 3.2.

    Args:
        grid: an image or video without prefix tokens.
        window: the size of a window, (height, width) or (frames, height, width), in patches.
        shift: by how much the grid is moved up and to the left, around its ends, before it is cut; each less than
            the window. None: not at all.

    >>> windows = Windows(Grid(5, 6), (2, 3), shift=(1, 1))
    >>> windows.split(torch.zeros(2, 30, 8)).shape  # 2 images, 3 x 2 windows
    torch.Size([12, 6, 8])
    """

    grid: Grid
    window: tuple[int, ...]
    shift: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Grid) or not self.grid.regular or self.grid.prefix:
            raise InputError(f"Windows: grid={self.grid!r}, expected a whole Grid without prefix tokens")
        axes, shift = self.grid.axes, self.shift or (0,) * self.grid.axes
        if not _are(self.window, axes) or min(self.window) < 1:
            raise InputError(f"Windows: window={self.window!r}, expected {axes} positive integers")
        if not _are(shift, axes) or any(not 0 <= s < n for s, n in zip(shift, self.window, strict=True)):
            raise InputError(
                f"Windows: shift={self.shift!r}, expected {axes} integers from 0 to below {self.window}"
            )
        object.__setattr__(self, "shift", tuple(shift))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many windows along each axis."""
        return tuple(-(-n // w) for n, w in zip(self.grid.size, self.window, strict=True))

    @property
    def one(self) -> Grid:
        """The grid of one window."""
        frames = self.window[0] if len(self.window) == 3 else None
        return Grid(self.window[-2], self.window[-1], 0, frames)

    def split(self, x: Tensor) -> Tensor:
        """[b, tokens, d] -> [b windows, tokens of a window, d], windows of an image side by side, row by row."""
        image = self.grid.lay(x)
        image = F.pad(image, (0, 0, *(p for pad in reversed(self._padding) for p in (0, pad))))
        image = image.roll([-s for s in self._shift], self._dims)
        pairs = [n for pair in zip(self.counts, self.window, strict=True) for n in pair]
        axes = self.grid.axes
        cut = image.reshape(x.shape[0], *pairs, x.shape[-1])
        order = [0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1]
        return cut.permute(order).reshape(-1, math.prod(self.window), x.shape[-1])

    def merge(self, windows: Tensor) -> Tensor:
        """The reverse of `split`: [b windows, tokens of a window, d] -> [b, tokens, d]."""
        axes, count, one = self.grid.axes, math.prod(self.counts), math.prod(self.window)
        if windows.ndim != 3 or windows.shape[0] % count or windows.shape[1] != one:
            raise InputError(
                f"merge: {tuple(windows.shape)}, expected [batch * {count} windows, {one} tokens, dim]"
            )
        cut = windows.reshape(-1, *self.counts, *self.window, windows.shape[-1])
        order = [0, *(n for axis in range(1, axes + 1) for n in (axis, axes + axis)), 2 * axes + 1]
        whole = [n * w for n, w in zip(self.counts, self.window, strict=True)]
        image = cut.permute(order).reshape(-1, *whole, windows.shape[-1]).roll(self._shift, self._dims)
        for dim, n in zip(self._dims, self.grid.size, strict=True):
            image = image.narrow(dim, 0, n)
        return image.flatten(1, -2)

    def mask(self, batch: int, device: torch.device | None = None, *, padding: bool = True) -> Tensor:
        """Who may attend to whom: [batch windows, 1, tokens of a window, same], boolean.

        Tokens that only meet because the shift goes around the ends of the grid may not.

        Args:
            padding: forbid padding as a key. Swin's code does not: its padding takes part, as zeros.
        """
        wrapped, real = [], []
        for n, w, count, shift in zip(self.grid.size, self.window, self.counts, self._shift, strict=True):
            place = torch.arange(count * w, device=device) + shift
            wrapped.append(place >= count * w)
            real.append(place % (count * w) < n)
        sides = torch.stack(torch.meshgrid(*wrapped, indexing="ij"), -1)
        real = torch.stack(torch.meshgrid(*real, indexing="ij"), -1).all(-1, keepdim=True)
        whole = Windows(_grid(sides.shape[:-1]), self.window)
        sides, real = (whole.split(t.flatten(0, -2)[None]) for t in (sides, real))
        allowed = (sides[:, :, None] == sides[:, None]).all(-1)
        if padding:
            allowed = allowed & real.mT
        return allowed[:, None].repeat(batch, 1, 1, 1)

    @property
    def _shift(self) -> tuple[int, ...]:
        assert self.shift is not None
        return self.shift

    @property
    def _dims(self) -> tuple[int, ...]:
        return tuple(range(1, self.grid.axes + 1))

    @property
    def _padding(self) -> tuple[int, ...]:
        sizes = zip(self.grid.size, self.counts, self.window, strict=True)
        return tuple(count * w - n for n, count, w in sizes)


def _are(integers: Any, count: int) -> bool:
    whole = isinstance(integers, tuple | list) and len(integers) == count
    return whole and all(isinstance(n, int) and not isinstance(n, bool) for n in integers)


def _grid(size: tuple[int, ...]) -> Grid:
    return Grid(size[-2], size[-1], 0, size[0] if len(size) == 3 else None)
