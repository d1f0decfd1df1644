"""Encodings that go on from what a model has itself, of their own kind."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whereformer.adapters.host import Start
from whereformer.encoding import PositionEncoding
from whereformer.encodings import Learned, LogCPB, Swin


def from_table(table: Tensor | None) -> Start:
    """`learned` from a model's own table [prefix rows + patches, dim]."""

    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, Learned) or table is None:
            return False
        encoding.start_from(table)
        return True

    return start


def from_bias_table(table: Tensor) -> Start:
    """`swin` from a table [(2 height - 1) (2 width - 1), heads], offset by offset in raster order."""
    return from_tables(Swin, table=table.mT)


def from_bias_mlp(first: nn.Linear, second: nn.Linear, window: Sequence[int]) -> Start:
    """`log_cpb` from SwinV2's two layers, trained on windows of such a size."""

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, LogCPB) or encoding.w1.shape != first.weight.shape:
            return False
        encoding.pretrained = tuple(window)
        for ours, theirs in ((encoding.w1, first.weight), (encoding.b1, first.bias), (encoding.w2, second.weight)):
            ours.copy_(theirs)
        return True

    return start


def from_tables(kind: type[PositionEncoding], **tables: Tensor) -> Start:
    """An encoding of a kind from tables as large as its own, in the same order, by the names of these."""

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
