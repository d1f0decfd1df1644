"""Swin."""

from functools import partial
from typing import Any

from torch import nn
from transformers import SwinBackbone, SwinModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Sized, Stage, Start
from whereformer.adapters.starts import from_bias_table, from_table
from whereformer.adapters.transformers.dispatch import EquippedLayer, dispatched, dispatching
from whereformer.adapters.transformers.towers import nothing
from whereformer.grid import Grid


def swin(model: SwinModel) -> Host:
    return _host(model, always=False)


def swin_backbone(model: SwinBackbone) -> Host:
    return _host(model.swin, always=True)


def _host(model: Any, always: bool) -> Host:
    embeddings, window = model.embeddings, model.config.window_size
    rows = embeddings.position_embeddings
    stages, own = [], [] if rows is None else [Own(embeddings, "position_embeddings")]
    height, width = embeddings.patch_grid
    grids = partial(windows, size=window, always=always)
    for stage in model.encoder.layers:
        attentions = [layer.attention for layer in stage.blocks]
        heads, head_dim = attentions[0].num_attention_heads, attentions[0].head_dim
        start = None if stages or rows is None else from_table(rows[0])
        blocks = [
            Block(
                layer,
                [dispatched(layer.attention, heads * head_dim, heads, grids=grids, start=_start(layer.attention))],
                None if number else start,
                EquippedLayer,
            )
            for number, layer in enumerate(stage.blocks)
        ]
        stages.append(Stage(heads * head_dim, heads, Grid(height, width), blocks, Sized()))
        own += [Own(attention, "relative_position_bias", nothing) for attention in attentions]
        own += [dispatching(attention) for attention in attentions]  # the others take no number for a mask
        height, width = (height + 1) // 2, (width + 1) // 2
    if rows is None:
        return Host(stages, own, equal="swin")
    first = len(stages[0].blocks)
    rest = sum(len(stage.blocks) for stage in stages)
    equal = {range(first): "learned + swin", range(first, rest): "swin"}
    return Host(stages, own, equal=equal if rest > first else "learned + swin")


def windows(attention: nn.Module, grid: Grid, *, size: int, always: bool) -> tuple[Grid, Grid]:
    """Windows are square, and no larger than the grid unless `always` of one size."""
    side = size if always else min(size, *grid.size)
    return Grid(side, side), Grid(side, side)


def _start(attention: Any) -> Start:
    return from_bias_table(attention.relative_position_bias.relative_position_bias_table)


TOWERS: Hosts = {SwinModel: swin, SwinBackbone: swin_backbone}
