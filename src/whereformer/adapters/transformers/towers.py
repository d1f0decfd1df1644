"""What the hosts of several families share: towers of one grid, patches in a row behind prefix tokens."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from whereformer.adapters.behaviours import EquippedEmbeddings
from whereformer.adapters.host import Block, Host, Own, Stage, Start
from whereformer.encoding import PositionEncoding
from whereformer.encodings import Learned
from whereformer.grid import Grid


def plain(
    embeddings: Any,
    blocks: Sequence[Block],
    stage: tuple[int, int, Grid],
    patch: tuple[int, int],
    own: Sequence[Own],
) -> Host:
    """The host of a tower whose `embeddings` make tokens of images, and hold the first encodings of tokens."""
    return Host(
        [Stage(*stage, blocks)],
        own,
        entry=(embeddings, partial(_grid_of, patch=patch)),
        first=(embeddings, EquippedEmbeddings),
    )


def _grid_of(images: Tensor, out: Any, *, patch: tuple[int, int]) -> Grid:
    tokens = out[0] if isinstance(out, tuple) else out
    height, width = (n // p for n, p in zip(images.shape[-2:], patch, strict=True))
    return Grid(height, width, prefix=tokens.shape[1] - height * width)


def pair(size: Any) -> tuple[int, int]:
    """(height, width), from these or from one number for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def home(config: Any, prefix: int) -> Grid:
    """The grid of the size of images that a config names."""
    sides = zip(pair(config.image_size), pair(config.patch_size), strict=True)
    height, width = (n // p for n, p in sides)
    return Grid(height, width, prefix)


def learned_from(rows: Tensor | None) -> Start | None:
    """Lets a learned table go on from rows [prefix rows + patches, dim]."""

    def start(encoding: PositionEncoding) -> bool:
        fits = isinstance(encoding, Learned)
        if fits:
            encoding.start_from(cast(Tensor, rows))
        return fits

    return None if rows is None else start


def taking(kind: type[PositionEncoding], **tables: Tensor) -> Start:
    """Lets an encoding of a kind go on from tables, if they are as large as its own, in the same order."""

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        own = dict(encoding.named_parameters())
        fits = isinstance(encoding, kind) and all(
            name in own and own[name].numel() == table.numel() for name, table in tables.items()
        )
        if fits:
            for name, table in tables.items():
                own[name].copy_(table.reshape(own[name].shape))
        return fits

    return start


def nothing(*args: Any, **kwargs: Any) -> float:
    """In the place of what computed positions to add."""
    return 0.0
