"""Where the images of a padded batch are, as DETR's mask tells."""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from whereformer.adapters.behaviours import held
from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.images import Padded


@dataclass(frozen=True, eq=False, repr=False)
class Corners(Grid):
    """The grid of a batch of images of different sizes, each in the top left corner.

    Args:
        mask: [batch, height, width], True where the image is.
    """

    mask: Tensor = field(kw_only=True)

    def images(self) -> Grid | Padded:
        """The grid of each image, or of all if they fill it: found by reading the mask."""
        sizes = torch.stack([self.mask[:, :, 0].sum(1), self.mask[:, 0].sum(1)], 1)
        y, x = (torch.arange(n, device=self.mask.device) for n in self.size)
        corners = (y[:, None] < sizes[:, :1, None]) & (x < sizes[:, 1:, None])
        if not torch.equal(self.mask, corners):
            raise InputError("pixel_mask: an image that is not in the top left corner, expected padding behind it")
        if corners.all():
            return self.whole
        return Padded(tuple(Grid(h, w) for h, w in sizes.tolist()), self.whole)

    @property
    def whole(self) -> Grid:
        """The grid with its padding."""
        return Grid(self.height, self.width)


def on_images(attention: nn.Module, grid: Grid) -> tuple[Grid, Grid]:
    """The padded grid, and the mask does the rest; each image's for encodings that go by the size of an image."""
    if isinstance(grid, Corners):
        by_size = any(encoding.by_size for encoding in held(attention))
        grid = cast(Grid, grid.images()) if by_size else grid.whole
    return grid, grid
