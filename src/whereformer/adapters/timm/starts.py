"""Encodings that go on from what a timm model has in attention, of their own kind."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from timm.layers.pos_embed_rel import RelPosBias, RelPosBiasTf, RelPosMlp
from torch import Tensor, nn

from whereformer.adapters.host import TOKENS, Layout, Start
from whereformer.encoding import PositionEncoding
from whereformer.encodings import AbsWin, BoTNet, Decomposed, Learned, LeViT, LogCPB, MaxViT, Swin


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
        if not isinstance(encoding, LogCPB) or encoding.pretrained != tuple(pretrained):
            return False
        if encoding.w1.shape != first.weight.shape:
            return False
        for ours, theirs in ((encoding.w1, first.weight), (encoding.b1, first.bias), (encoding.w2, second.weight)):
            ours.copy_(theirs)
        return True

    return start


def from_decomposed(rows: Tensor, columns: Tensor, shift: int = 0) -> Start:
    """`decomposed` from tables [2 n − 1, head_dim], whose row t + shift is our row t."""

    return _from_lines(Decomposed, rows, columns, False, shift)


def from_botnet(rows: Tensor, columns: Tensor, *, scaled: bool, shift: int = 0) -> Start:
    """`botnet` from the same."""
    return _from_lines(BoTNet, rows, columns, scaled, shift)


def from_abs_win(table: Tensor, window: Tensor, *, antialias: bool) -> Start:
    """`abs_win` from tables [1, dim, height, width] for the image and for a window."""

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, AbsWin) or encoding.antialias != antialias:
            return False
        theirs = [t[0].permute(1, 2, 0) for t in (table, window)]
        if [encoding.table.shape, encoding.window.shape] != [t.shape for t in theirs]:
            return False
        for ours, t in zip((encoding.table, encoding.window), theirs, strict=True):
            ours.copy_(t)
        return True

    return start


def from_rel_pos(rel_pos: Any) -> Start | None:
    """From one of timm's three modules of `pos_embed_rel`."""
    if isinstance(rel_pos, RelPosBias) and not rel_pos.prefix_tokens:
        return from_swin(rel_pos.relative_position_bias_table, rel_pos.window_size)
    if isinstance(rel_pos, RelPosBiasTf):
        return _from_table(MaxViT, rel_pos.relative_position_bias_table)
    if type(rel_pos) is RelPosMlp and rel_pos.mode == "swin":
        pretrained = rel_pos.pretrained_window_size
        size = pretrained if pretrained[0] > 0 else rel_pos.window_size
        return from_log_cpb(cast(Any, rel_pos).mlp.fc1, cast(Any, rel_pos).mlp.fc2, size)
    return None


def _from_lines(
    kind: type[Decomposed] | type[BoTNet], rows: Tensor, columns: Tensor, scaled: bool, shift: int
) -> Start:
    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, kind) or encoding.scaled != scaled:
            return False
        if (encoding.rows.shape, encoding.columns.shape) != (rows.shape, columns.shape):
            return False
        for ours, theirs in ((encoding.rows, rows), (encoding.columns, columns)):
            at = torch.arange(len(theirs), device=theirs.device) + shift
            ours.copy_(theirs[at.clamp(0, len(theirs) - 1)])
        return True

    return start


def _from_table(kind: type[PositionEncoding], table: Tensor) -> Start:
    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        if not isinstance(encoding, kind) or encoding.table.shape != table.shape:
            return False
        encoding.table.copy_(table)  # pyright: ignore[reportCallIssue]
        return True

    return start
