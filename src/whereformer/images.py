"""Several images, of several sizes, in one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whereformer.errors import InputError
from whereformer.grid import Grid


@dataclass(frozen=True)
class Images:
    """Where several images lie in one tensor: `Packed` or `Padded`.

    Attention and encodings take them apart, so that each image gets what it gets alone, whatever the encoding.
    """

    grids: tuple[Grid, ...]

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "grids", tuple(self.grids))
        if not self.grids:
            raise InputError(f"{name}: no grids, expected one for each image")
        for grid in self.grids:
            if not isinstance(grid, Grid):
                raise InputError(f"{name}: {grid!r}, expected a whereformer.Grid for each image")

    @property
    def tokens(self) -> int:
        """How long the axis of tokens is."""
        raise NotImplementedError

    def parts(self, device: torch.device | None = None) -> list[tuple[slice, Tensor]]:
        """For each image: which rows of the batch, and which tokens of these [its tokens], int64."""
        raise NotImplementedError

    def split(self, x: Tensor, what: str = "x") -> list[Tensor]:
        """[batch, ..., tokens, d] to one such tensor for each image, without the others and without padding."""
        if x.shape[-2] != self.tokens:
            raise InputError(f"{what} has {x.shape[-2]} tokens, but {self} has {self.tokens}")
        self._check_batch(x.shape[0], what)
        return [x[rows].index_select(-2, tokens) for rows, tokens in self.parts(x.device)]

    def split_mask(self, mask: Tensor, keys: "Images", shape: Sequence[int]) -> list[Tensor]:
        """A mask broadcastable to `shape`, [batch, heads, queries, keys], to one for each image."""
        try:
            whole = mask.expand(shape)
        except RuntimeError:
            raise InputError(
                f"mask {tuple(mask.shape)}, expected a shape that broadcasts to {tuple(shape)}"
            ) from None
        pairs = zip(self.parts(mask.device), keys.parts(mask.device), strict=True)
        return [whole[rows].index_select(-2, i).index_select(-1, j) for (rows, i), (_, j) in pairs]

    def _check_batch(self, batch: int, what: str) -> None:
        """Raise unless so many rows can hold the images."""

    def merge(self, images: Sequence[Tensor]) -> Tensor:
        """The reverse of `split`, with zeros where no image has a token."""
        first = images[0]
        parts = self.parts(first.device)
        batch = first.shape[0] if parts[0][0] == slice(None) else len(images)
        x = first.new_zeros(batch, *first.shape[1:-2], self.tokens, first.shape[-1])
        for (rows, tokens), image in zip(parts, images, strict=True):
            x[rows] = x[rows].index_copy(-2, tokens, image)
        return x


@dataclass(frozen=True)
class Packed(Images):
    """Images one after another in one sequence, each with prefix tokens of its own (NaViT, section 2.1).

    Args:
        grids: where the tokens of each image are, in the order of the sequence.

    >>> pack = Packed((Grid(2, 3, prefix=1), Grid(1, 2)))
    >>> [part.shape[1] for part in pack.split(torch.zeros(1, 9, 4))]
    [7, 2]
    """

    @property
    def tokens(self) -> int:
        return sum(grid.tokens for grid in self.grids)

    def parts(self, device: torch.device | None = None) -> list[tuple[slice, Tensor]]:
        found, start = [], 0
        for grid in self.grids:
            found.append((slice(None), torch.arange(start, start + grid.tokens, device=device)))
            start += grid.tokens
        return found


@dataclass(frozen=True)
class Padded(Images):
    """A batch of images in the top left corners of one larger grid (DETR), padding below and to the right.

    Args:
        grids: the grid of each image of the batch, without padding; all with as many prefix tokens.
        grid: the larger one; the least that holds all images if not given.

    >>> batch = Padded((Grid(2, 3), Grid(4, 1)))
    >>> batch.grid
    Grid(height=4, width=3, prefix=0)
    >>> [part.shape[1] for part in batch.split(torch.zeros(2, 12, 4))]
    [6, 4]
    """

    grid: Grid = None  # pyright: ignore[reportAssignmentType]  # filled below

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid is None:
            if len({grid.axes for grid in self.grids}) > 1:
                raise InputError(f"Padded: {self.grids}, expected images alone or videos alone")
            size = [max(n) for n in zip(*(grid.size for grid in self.grids), strict=True)]
            frames = size[0] if len(size) == 3 else None
            object.__setattr__(self, "grid", Grid(size[-2], size[-1], self.grids[0].prefix, frames))
        for grid in self.grids:
            fits = grid.axes == self.grid.axes and all(
                n <= m for n, m in zip(grid.size, self.grid.size, strict=True)
            )
            if not (fits and grid.regular and grid.prefix == self.grid.prefix):
                raise InputError(
                    f"Padded: {grid} does not fit into the corner of {self.grid} with the same prefix"
                )

    @property
    def tokens(self) -> int:
        return self.grid.tokens

    def _check_batch(self, batch: int, what: str) -> None:
        if batch != len(self.grids):
            raise InputError(f"{what} has a batch of {batch}, but Padded has {len(self.grids)} images")

    def parts(self, device: torch.device | None = None) -> list[tuple[slice, Tensor]]:
        prefix = torch.arange(self.grid.prefix, device=device)
        whole = self.grid.raster(device).reshape(self.grid.size) + self.grid.prefix
        corners = [whole[tuple(slice(n) for n in grid.size)].flatten() for grid in self.grids]
        return [(slice(row, row + 1), torch.cat([prefix, corner])) for row, corner in enumerate(corners)]
