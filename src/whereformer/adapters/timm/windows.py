"""timm's models with attention in windows: Swin, Swin V2, MaxViT and CoAtNet, DaViT, NesT, GC ViT, TinyViT."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.models import davit, gcvit, maxxvit, nest, swin_transformer, swin_transformer_v2, tiny_vit
from timm.models import swin_transformer_v2_cr as swin_cr
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, EquippedOnImage, EquippedOnMap, attend
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Host, Layout, Own, Place
from whereformer.adapters.timm.family import CHANNELS, IMAGE, Family, reduced
from whereformer.adapters.timm.grids import resolution, window
from whereformer.adapters.timm.starts import from_learned, from_levit, from_log_cpb, from_rel_pos, from_swin
from whereformer.grid import Grid

# ---------------------------------------------------------------------------------------------------------------
# Swin and Swin V2: attention on windows [batch windows, tokens, dim], with the mask of the shift.


def masked(mask: Tensor | None, windows: int) -> Tensor | None:
    """The mask of an image's windows, [windows, n, n], for each of a batch: [batch windows, 1, n, n]."""
    return None if mask is None else mask.repeat(windows // mask.shape[0], 1, 1).unsqueeze(1)


def added(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    return mask if bias is None else bias if mask is None else bias + mask


def nothing(module: Any, *args: Any) -> Tensor:
    """In the place of a method that made a bias."""
    return next(module.parameters()).new_zeros(1, 1)


class Zeros(nn.Module):
    """In the place of layers that made a bias: the same for all pairs, which changes no attention."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.heads)


class EquippedSwinAttention(EquippedAttention):
    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        own = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
        dropout = self.attn_drop.p if self.training else 0.0
        out = attend(self, q, k, v, added(own, masked(mask, x.shape[0])), dropout)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


def cosine(module: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose scaled dot product is the cosine times the module's learned scale."""
    scale = module.logit_scale.reshape(-1, 1, 1).clamp(max=math.log(100)).exp() * q.shape[-1] ** 0.5
    return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)


class EquippedSwinV2Attention(EquippedAttention):
    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        bias = None if self.q_bias is None else torch.cat([self.q_bias, self.k_bias, self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = cosine(self, q, k)
        dropout = self.attn_drop.p if self.training else 0.0
        out = attend(self, q, k, v, added(self.own_bias(), masked(mask, x.shape[0])), dropout)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def own_bias(self: Any) -> Tensor | None:
        if isinstance(self.cpb_mlp, Zeros):
            return None
        table = 16 * self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads).sigmoid()
        return table[self.relative_position_index].permute(2, 0, 1)


class EquippedSwinCrAttention(EquippedAttention):
    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = cosine(self, q, k)
        own = None if self.meta_mlp is None else self._relative_positional_encodings()
        dropout = self.attn_drop.p if self.training else 0.0
        out = attend(self, q, k, v, added(own, masked(mask, x.shape[0])), dropout)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


def follow(m: Any, table: nn.Parameter, size: Any) -> None:
    """In the place of `set_window_size`, when the table went: it is resized where it is kept."""
    m._parameters["relative_position_bias_table"] = table
    type(m).set_window_size(m, size)
    table.data = m.relative_position_bias_table.data
    m._parameters["relative_position_bias_table"] = None


def swin_own(m: Any) -> Iterator[Own]:
    yield Own(m, "relative_position_bias_table")
    yield Own(m, "set_window_size", partial(follow, m, m.relative_position_bias_table), counts=False)
    yield Own(m, "_get_rel_pos_bias", partial(nothing, m), counts=False)


def swin_cr_own(m: Any) -> Iterator[Own]:
    yield Own(m, "meta_mlp")
    yield Own(m, "_relative_positional_encodings", partial(nothing, m), counts=False)


def swin_attention(m: Any) -> Attention:
    dim = m.qkv.out_features // 3
    start = from_swin(m.relative_position_bias_table, m.window_size)
    return Attention(m, dim, m.num_heads, window, start=start, behaviour=EquippedSwinAttention)


def swin_v2_attention(m: Any) -> Attention:
    first, _, second = m.cpb_mlp
    pretrained = m.pretrained_window_size if m.pretrained_window_size[0] else m.window_size
    start = from_log_cpb(first, second, pretrained)
    return Attention(m, m.dim, m.num_heads, window, start=start, behaviour=EquippedSwinV2Attention)


def swin_cr_attention(m: Any) -> Attention:
    return Attention(m, m.in_features, m.num_heads, window, behaviour=EquippedSwinCrAttention)


SWIN = Family(
    blocks={swin_transformer.SwinTransformerBlock: IMAGE},
    attentions={swin_transformer.WindowAttention: swin_attention},
    own={swin_transformer.WindowAttention: swin_own},
)
SWIN_V2 = Family(
    blocks={swin_transformer_v2.SwinTransformerV2Block: IMAGE},
    attentions={swin_transformer_v2.WindowAttention: swin_v2_attention},
    own={swin_transformer_v2.WindowAttention: lambda m: [Own(m, "cpb_mlp", Zeros(m.num_heads))]},
)
SWIN_CR = Family(
    blocks={swin_cr.SwinTransformerV2CrBlock: IMAGE},
    attentions={swin_cr.WindowMultiHeadAttention: swin_cr_attention},
    own={swin_cr.WindowMultiHeadAttention: swin_cr_own},
)

# ---------------------------------------------------------------------------------------------------------------
# MaxViT and CoAtNet: windows, grids of tokens far apart (each a small grid of its own), or the whole map.


def maxxvit_attention(m: Any, behaviour: type[EquippedAttention]) -> Attention:
    start = None if m.rel_pos is None else from_rel_pos(m.rel_pos)
    return Attention(m, m.num_heads * m.dim_head, m.num_heads, start=start, behaviour=behaviour)


MAXXVIT = Family(
    blocks={
        maxxvit.PartitionAttentionCl: IMAGE,
        maxxvit.ParallelPartitionAttention: IMAGE,
        maxxvit.PartitionAttention2d: CHANNELS,
        maxxvit.TransformerBlock2d: CHANNELS,
    },
    attentions={
        maxxvit.AttentionCl: partial(maxxvit_attention, behaviour=EquippedOnImage),
        maxxvit.Attention2d: partial(maxxvit_attention, behaviour=EquippedOnMap),
    },
    own={kind: lambda m: [] if m.rel_pos is None else [Own(m, "rel_pos")]
         for kind in (maxxvit.AttentionCl, maxxvit.Attention2d)},
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------
# DaViT, TinyViT, GC ViT.

DAVIT = Family(
    blocks={davit.SpatialBlock: CHANNELS},
    attentions={davit.WindowAttention: lambda m: Attention(m, m.dim, m.num_heads, window)},
    own={kind: lambda m: [Own(m, name, nn.Identity()) for name in ("cpe1", "cpe2")]
         for kind in (davit.SpatialBlock, davit.ChannelBlock)},
)  # fmt: skip


class EquippedGlobalWindowAttention(EquippedAttention):
    """Queries are the window's own, or those of the whole image, pooled to the size of a window."""

    def forward(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        kv = self.qkv(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if self.use_global and q_global is not None:
            k, v = kv
            q = q_global.repeat_interleave(x.shape[0] // q_global.shape[0], dim=0)
            q = q.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
        else:
            q, k, v = kv
        own = None if isinstance(self.rel_pos, nn.Identity) else self.rel_pos.get_bias()
        out = attend(self, q, k, v, own, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


def gcvit_attention(m: Any) -> Attention:
    dim, start = m.num_heads * m.head_dim, from_rel_pos(m.rel_pos)
    return Attention(m, dim, m.num_heads, window, start=start, behaviour=EquippedGlobalWindowAttention)


GCVIT = Family(
    blocks={gcvit.GlobalContextVitBlock: IMAGE},
    attentions={gcvit.WindowAttentionGlobal: gcvit_attention},
    own={gcvit.WindowAttentionGlobal: lambda m: [Own(m, "rel_pos", nn.Identity())]},
    size=lambda model: reduced(model.stages[0].feat_size, model),
)


def no_biases(device: torch.device) -> None:
    """In the place of `get_attention_biases`."""


def tiny_vit_own(m: Any) -> Iterator[Own]:
    yield Own(m, "attention_biases")
    yield Own(m, "get_attention_biases", no_biases, counts=False)


def tiny_vit_attention(m: Any) -> Attention:
    start = from_levit(m.attention_biases, m.resolution)
    return Attention(m, m.num_heads * m.key_dim, m.num_heads, resolution, start=start)


TINY_VIT = Family(
    blocks={tiny_vit.TinyVitBlock: IMAGE},
    attentions={tiny_vit.Attention: tiny_vit_attention},
    own={tiny_vit.Attention: tiny_vit_own},
)

# ---------------------------------------------------------------------------------------------------------------
# NesT: blocks of a square image side by side, [batch, blocks, tokens, dim].


class Tiles(Layout):
    """[batch, tiles, tokens of a tile, dim], of a square image cut into square tiles, row by row."""

    def grid(self, place: Place, x: Tensor, *rest: Any) -> Grid:
        side = math.isqrt(x.shape[1]) * math.isqrt(x.shape[2])
        return Grid(side, side)

    def tokens(self, x: Tensor) -> Tensor:
        across, side = math.isqrt(x.shape[1]), math.isqrt(x.shape[2])
        cut = x.unflatten(2, (side, side)).unflatten(1, (across, across))
        return cut.transpose(2, 3).flatten(1, 4)

    def back(self, tokens: Tensor, like: Tensor) -> Tensor:
        across, side = math.isqrt(like.shape[1]), math.isqrt(like.shape[2])
        cut = tokens.unflatten(1, (across, side, across, side))
        return cut.transpose(2, 3).reshape(like.shape)


class OneTile(Layout):
    """The same, seen by an attention within each tile."""

    def grid(self, place: Place, x: Tensor, *rest: Any) -> Grid:
        side = math.isqrt(x.shape[2])
        return Grid(side, side)


class EquippedTileAttention(EquippedOnMap):
    layout = OneTile()
    heads_axis = 1


def nest_attention(m: Any) -> Attention:
    return Attention(m, m.proj.in_features, m.num_heads, behaviour=EquippedTileAttention)


TILES = Tiles()

NEST = Family(
    blocks={nest.TransformerLayer: TILES},
    attentions={nest.Attention: nest_attention},
    own={nest.NestLevel: lambda m: [Own(m, "pos_embed", 0.0)]},
)


def nested(model: nest.Nest) -> Host:
    """Tables of tokens, one a level, go on as learned ones."""
    host = NEST(model)
    stages = [
        replace(
            stage,
            blocks=[
                replace(stage.blocks[0], start=from_learned(cast(Any, level).pos_embed, TILES)),
                *stage.blocks[1:],
            ],
        )
        for stage, level in zip(host.stages, model.levels, strict=True)
    ]
    return replace(host, stages=stages)


HOSTS: Hosts = {
    swin_transformer.SwinTransformer: SWIN,
    swin_transformer_v2.SwinTransformerV2: SWIN_V2,
    swin_cr.SwinTransformerV2Cr: SWIN_CR,
    maxxvit.MaxxVit: MAXXVIT,
    davit.DaVit: DAVIT,
    gcvit.GlobalContextVit: GCVIT,
    tiny_vit.TinyVit: TINY_VIT,
    nest.Nest: nested,
}
