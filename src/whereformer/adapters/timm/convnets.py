"""timm's convolutional networks that attend in some blocks (`ByobNet`): BoTNet, HaloNet, LambdaNet, MobileViT."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention as VisionAttention
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.layers.lambda_layer import LambdaLayer
from timm.models.byobnet import ByobNet, SelfAttnBlock
from timm.models.mobilevit import MobileVitBlock
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, EquippedOnMap, attend
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Own
from whereformer.adapters.timm.family import CHANNELS, NARROW, Family
from whereformer.adapters.timm.grids import between, placed
from whereformer.adapters.timm.starts import from_botnet
from whereformer.grid import Grid


class Nowhere(nn.Module):
    """In the place of a table of offsets that queries read."""

    def __init__(self, height: int = 0, width: int = 0) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, q: Tensor) -> Tensor:
        return q.new_zeros(1)


def own_logits(m: Any, q: Tensor) -> Tensor | None:
    """What queries [..., tokens, head_dim] read of the module's own table."""
    if isinstance(m.pos_embed, Nowhere):
        return None
    read = m.pos_embed(q)
    return read * m.scale if m.scale_pos_embed else read


def takes(m: Any) -> tuple[str, ...]:
    return ("rotations", "biases", "values") if m.dim_head_qk == m.dim_head_v else NARROW


class EquippedBottleneck(EquippedOnMap):
    def forward(self: Any, x: Tensor) -> Tensor:
        self.place.grid = Grid(*x.shape[2:])
        parts = self.qkv(x).split([self.dim_out_qk, self.dim_out_qk, self.dim_out_v], 1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)).flatten(3).mT for part in parts)
        own = own_logits(self, q.flatten(0, 1))
        out = attend(self, q, k, v, None if own is None else own.unflatten(0, q.shape[:2]))
        return self.pool(out.mT.flatten(1, 2).unflatten(-1, x.shape[2:]))


class EquippedHalo(EquippedAttention):
    """Queries of a block, keys of the block and of what lies around it; beyond the map, keys are zeros."""

    def forward(self: Any, x: Tensor) -> Tensor:
        batch, down, across = x.shape[0], *(n // self.block_size for n in x.shape[2:])
        size = (batch, self.num_heads, -1, down, self.block_size_ds, across, self.block_size_ds)
        q = self.q(x).reshape(size).permute(0, 3, 5, 1, 4, 6, 2).flatten(4, 5).flatten(0, 2)
        kv = F.pad(self.kv(x), [self.halo_size] * 4)
        kv = kv.unfold(2, self.win_size, self.block_size).unfold(3, self.win_size, self.block_size)
        kv = kv.unflatten(1, (self.num_heads, -1)).permute(0, 3, 4, 1, 5, 6, 2).flatten(4, 5).flatten(0, 2)
        k, v = kv.split([self.dim_head_qk, self.dim_head_v], -1)
        out = attend(self, q, k, v, own_logits(self, q))
        out = out.reshape(batch, down, across, self.num_heads, self.block_size_ds, self.block_size_ds, -1)
        out = out.permute(0, 3, 6, 1, 4, 2, 5).flatten(1, 2).flatten(2, 3).flatten(3, 4)
        return self.pool(out)


def halo(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    keys = Grid(m.win_size, m.win_size)
    at = m.halo_size + m.block_stride * torch.arange(m.block_size_ds, device=m.q.weight.device)
    return placed(keys, at, at), keys


def patches(m: Any, grid: Grid, size: tuple[int, int]) -> tuple[Grid, Grid]:
    """Tokens at one place of each patch attend to one another."""
    return between(m, grid, size, size)


def bottleneck_attention(m: Any) -> Attention:
    table = m.pos_embed
    start = from_botnet(table.height_rel, table.width_rel, scaled=m.scale_pos_embed)
    return Attention(m, m.dim_out_qk, m.num_heads, takes=takes(m), start=start, behaviour=EquippedBottleneck)


def halo_attention(m: Any) -> Attention:
    table, start = m.pos_embed, None
    if m.block_stride == 1:  # timm counts from the corner of the keys to that of the block
        start = from_botnet(table.height_rel, table.width_rel, scaled=m.scale_pos_embed, shift=m.halo_size)
    return Attention(m, m.dim_out_qk, m.num_heads, halo, takes=takes(m), start=start, behaviour=EquippedHalo)


def unfolded_attentions(block: Any) -> list[Attention]:
    grids = partial(patches, size=tuple(block.patch_size))
    found = [m for m in block.transformer.modules() if type(m) is VisionAttention]
    return [Attention(m, m.attn_dim, m.num_heads, grids) for m in found]


def deaf(block: Any) -> str:
    summed = isinstance(getattr(block, "self_attn", None), LambdaLayer)
    return "is a lambda layer: keys are summed up before queries come, and pairs have no logits" if summed else ""


BYOB = Family(
    blocks={SelfAttnBlock: CHANNELS, MobileVitBlock: CHANNELS},
    attentions={
        BottleneckAttn: bottleneck_attention,
        HaloAttn: halo_attention,
        MobileVitBlock: unfolded_attentions,
    },
    own={
        BottleneckAttn: lambda m: [Own(m, "pos_embed", Nowhere(m.pos_embed.height, m.pos_embed.width))],
        HaloAttn: lambda m: [Own(m, "pos_embed", Nowhere())],
    },
    deaf=deaf,
)

HOSTS: Hosts = {ByobNet: BYOB}
