"""What the hosts of several families share: towers of one grid, patches in a row behind prefix tokens."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from whereformer.adapters.host import Block, Host, Own, Stage
from whereformer.grid import Grid


def plain(
    patches: nn.Module, blocks: Sequence[Block], stage: tuple[int, int, Grid], own: Sequence[Own], **more: Any
) -> Host:
    """The host of a tower whose module `patches` makes patches of images [batch, channels, height, width]."""
    dim, heads, home = stage
    kernel: Any = getattr(patches, "projection", patches)
    entry = (patches, partial(_grid_of, patch=kernel.stride, prefix=home.prefix))
    return Host([Stage(dim, heads, home, blocks)], own, entry=entry, **more)


def _grid_of(images: Tensor, out: Any, *, patch: tuple[int, int], prefix: int) -> Grid:
    height, width = (n // p for n, p in zip(images.shape[-2:], patch, strict=True))
    return Grid(height, width, prefix)


def pair(size: Any) -> tuple[int, int]:
    """(height, width), from these or from one number for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def home(config: Any, prefix: int) -> Grid:
    """The grid of the size of images that a config names."""
    sides = zip(pair(config.image_size), pair(config.patch_size), strict=True)
    height, width = (n // p for n, p in sides)
    return Grid(height, width, prefix)


def nothing(*args: Any, **kwargs: Any) -> float:
    """In the place of what computed positions to add."""
    return 0.0
