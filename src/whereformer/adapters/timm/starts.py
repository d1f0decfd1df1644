"""Encodings that go on from what a timm model has in attention, of their own kind."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers.pos_embed_rel import RelPosBias, RelPosBiasTf, RelPosMlp
from torch import Tensor, nn

from whereformer.adapters.host import TOKENS, Layout, Start
from whereformer.encoding import PositionEncoding
from whereformer.encodings import Decomposed, Learned, LeViT, LogCPB, MaxViT, Swin


def from_learned(table: Tensor, layout: Layout = TOKENS) -> Start:
    """`learned` from a table [1, tokens, dim], or one that tokens in that layout are given."""

    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, Learned):
            return False
        encoding.start_from(layout.tokens(table)[0])
        return True

    return start


def from_swin(table: Tensor, size: Sequence[int]) -> Start:
    """`swin` from a table [(2 height − 1) (2 width − 1), heads] of a window of that size."""
    return _from_table(Swin, table.mT.unflatten(-1, [2 * n - 1 for n in size]))


def from_levit(table: Tensor, size: Sequence[int], stride: int = 1) -> Start:
    """`levit` from a table [heads, height width], of queries on every `stride`-th row and column of the keys."""

    def start(encoding: PositionEncoding) -> bool:
        fits = isinstance(encoding, LeViT) and encoding.stride == stride
        return fits and _from_table(LeViT, table.unflatten(-1, list(size)))(encoding)

    return start


def from_log_cpb(first: nn.Linear, second: nn.Linear, pretrained: Sequence[int]) -> Start:
    """`log_cpb` from the two layers of Swin V2, trained on windows of that size."""

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        fits = isinstance(encoding, LogCPB) and encoding.pretrained == tuple(pretrained)
        if not fits or encoding.w1.shape != first.weight.shape:
            return False
        for ours, theirs in ((encoding.w1, first.weight), (encoding.b1, first.bias), (encoding.w2, second.weight)):
            ours.copy_(theirs)
        return True

    return start


def from_decomposed(rows: Tensor, columns: Tensor) -> Start:
    """`decomposed` from tables [2 n − 1, head_dim]."""

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, Decomposed) or encoding.scaled:
            return False
        if (encoding.rows.shape, encoding.columns.shape) != (rows.shape, columns.shape):
            return False
        encoding.rows.copy_(rows)
        encoding.columns.copy_(columns)
        return True

    return start


def from_rel_pos(rel_pos: Any) -> Start | None:
    """From one of timm's three modules of `pos_embed_rel`."""
    if isinstance(rel_pos, RelPosBias) and not rel_pos.prefix_tokens:
        return from_swin(rel_pos.relative_position_bias_table, rel_pos.window_size)
    if isinstance(rel_pos, RelPosBiasTf):
        return _from_table(MaxViT, rel_pos.relative_position_bias_table)
    if isinstance(rel_pos, RelPosMlp) and rel_pos.mode == "swin":
        pretrained = rel_pos.pretrained_window_size
        size = pretrained if pretrained[0] > 0 else rel_pos.window_size
        return from_log_cpb(rel_pos.mlp.fc1, rel_pos.mlp.fc2, size)
    return None


def _from_table(kind: type[PositionEncoding], table: Tensor) -> Start:
    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, kind) or encoding.table.shape != table.shape:
            return False
        encoding.table.copy_(table)  # pyright: ignore[reportCallIssue]
        return True

    return start
