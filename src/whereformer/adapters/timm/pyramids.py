"""timm's Twins and PVT v2."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.twins import LocallyGroupedAttn, PosConv, Twins
from torch import Tensor, nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Block, Host, Own, Sized, Stage
from whereformer.adapters.timm.grids import placed, pooled
from whereformer.encoding import PositionEncoding
from whereformer.encodings import PEG
from whereformer.grid import Grid


class Silent(nn.Module):
    """In the place of a PosConv that went."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return x


def twins(model: Twins) -> Host:
    stages = []
    for embed, blocks, own in zip(model.patch_embeds, model.blocks, model.pos_block, strict=True):
        embed, blocks = cast(Any, embed), cast(Sequence[Any], blocks)
        found = [
            Block(block, [_twin(block.attn)], start=_going_on_from(own) if n == 1 else None)
            for n, block in enumerate(blocks)
        ]
        attention = blocks[0].attn
        stages.append(Stage(attention.dim, attention.num_heads, Grid(embed.H, embed.W), found, Sized()))
    silent = nn.ModuleList(Silent() for _ in stages).train(model.training)
    return Host(stages, own=[Own(model, "pos_block", silent)], switches=_fused(stages))


def pvt_v2(model: PyramidVisionTransformerV2) -> Host:
    _, height, width = (cast(Any, model).pretrained_cfg or {}).get("input_size", (3, 224, 224))
    stages = []
    for number, stage in enumerate(cast(Any, model.stages)):
        stride = 2 if number else 4
        height, width = -(-height // stride), -(-width // stride)
        attention = stage.blocks[0].attn
        blocks = [Block(block, [_pooling(block.attn)]) for block in stage.blocks]
        stages.append(Stage(attention.dim, attention.num_heads, Grid(height, width), blocks, Sized()))
    return Host(stages, switches=_fused(stages))


def _twin(m: Any) -> Attention:
    in_groups = isinstance(m, LocallyGroupedAttn)
    return Attention(m, cast(Any, m).dim, cast(Any, m).num_heads, _groups if in_groups else _reduced)


def _pooling(m: Any) -> Attention:
    return Attention(m, m.dim, m.num_heads, _reduced if m.pool is None else _adapted)


def _groups(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    one = Grid(m.ws, m.ws)
    return one, one


def _reduced(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Keys of patches that a convolution has put together, as many as fit."""
    if m.sr is None:
        return grid, grid
    stride = m.sr.stride
    return grid, pooled(grid, [n // s for n, s in zip(grid.size, stride, strict=True)], stride, m)


def _adapted(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Keys pooled to one size whatever the map's; each from the patches between two cuts."""
    device = m.q.weight.device
    middles = []
    for n, count in zip(grid.size, (m.pool.output_size,) * 2, strict=True):
        bins = torch.arange(count, device=device)
        first, end = bins * n // count, -(-(bins + 1) * n // count)
        middles.append((first + end - 1) // 2)
    return grid, placed(grid, *middles)


def _fused(stages: Sequence[Stage]) -> list[Own]:
    attentions = [a.module for stage in stages for block in stage.blocks for a in cast(Any, block.attentions)]
    return [Own(m, "fused_attn", True) for m in attentions if not cast(Any, m).fused_attn]


def _going_on_from(own: Any):
    """A PEG after the first block is what Twins had: it goes on from there."""

    def start(encoding: PositionEncoding) -> bool:
        convolution = cast(PosConv, own).proj[0]
        fits = isinstance(encoding, PEG) and encoding.weight.shape == convolution.weight.shape
        if fits:
            encoding.load_state_dict(convolution.state_dict())
        return fits

    return start


HOSTS: Hosts = {Twins: twins, PyramidVisionTransformerV2: pvt_v2}
