"""torchvision's VisionTransformer and SwinTransformer (V1 and V2)."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.swin_transformer import (
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
    SwinTransformerBlock,
)
from torchvision.models.vision_transformer import VisionTransformer

from whereformer.adapters.behaviours import EquippedAttention, attend
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Block, Host, Image, Own, Stage
from whereformer.adapters.starts import from_bias_mlp, from_bias_table, from_table
from whereformer.grid import Grid
from whereformer.windows import Windows


def vit(model: VisionTransformer) -> Host:
    encoder: Any = model.encoder
    side = model.image_size // model.patch_size
    start = from_table(encoder.pos_embedding[0]) if isinstance(encoder.pos_embedding, Tensor) else None
    layers = list(encoder.layers)
    blocks = [Block(layer, [layer.self_attention], None if n else start) for n, layer in enumerate(layers)]
    stage = Stage(model.hidden_dim, layers[0].num_heads, Grid(side, side, prefix=1), blocks)
    return Host([stage], own=[Own(encoder, "pos_embedding", 0.0)], entry=(model.conv_proj, _behind_a_class_token))


def swin(model: SwinTransformer) -> Host:
    side, stages, own = 224, [], []  # the classes do not say for which images they were built
    for layer in model.features:
        blocks: list[Any] = [block for block in layer.children() if isinstance(block, SwinTransformerBlock)]
        if not blocks:
            side = -(-side // (2 if stages else 4))
            continue
        attentions = [block.attn for block in blocks]
        dim, heads = attentions[0].qkv.in_features, attentions[0].num_heads
        found = [Block(b, [_attention(a)]) for b, a in zip(blocks, attentions, strict=True)]
        stages.append(Stage(dim, heads, Grid(side, side), found, Image()))
        for attention in attentions:
            name = "cpb_mlp" if isinstance(attention, ShiftedWindowAttentionV2) else "relative_position_bias_table"
            own += [
                Own(attention, name),
                Own(attention, "get_relative_position_bias", _no_bias, counts=False),
            ]
    return Host(stages, own=own)


def _attention(module: ShiftedWindowAttention) -> Attention:
    if isinstance(module, ShiftedWindowAttentionV2):
        mlp: Any = module.cpb_mlp
        start = from_bias_mlp(mlp[0], mlp[2], module.window_size) if mlp else None
    else:
        start = from_bias_table(module.relative_position_bias_table)
    return Attention(module, grids=_in_windows, start=start, behaviour=EquippedWindowAttention)


class EquippedWindowAttention(EquippedAttention, *((ShiftedWindowAttention,) if TYPE_CHECKING else ())):
    """Attention within windows, plain or cosine (V2), its own projections around ours."""

    def forward(self, x: Tensor) -> Tensor:
        grid, window = Grid(x.shape[1], x.shape[2]), tuple(self.window_size)
        fits = [n <= w for n, w in zip(grid.size, window, strict=True)]
        shift = tuple(0 if one else s for one, s in zip(fits, self.shift_size, strict=True))
        windows = Windows(grid, window, shift)
        qkv = self._projected(windows.split(x.flatten(1, 2)))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mask = windows.mask(x.shape[0], x.device, padding=False) if any(shift) else None
        if isinstance(own := self.get_relative_position_bias(), Tensor):
            mask = own if mask is None else torch.where(mask, own, -torch.inf)
        scale = None
        if isinstance(self, ShiftedWindowAttentionV2):
            scale = 1.0
            q = F.normalize(q, dim=-1) * self.logit_scale.clamp(max=math.log(100)).exp()
            k = F.normalize(k, dim=-1)
        out = attend(self, q, k, v, mask, self.attention_dropout if self.training else 0.0, scale=scale)
        out = F.dropout(self.proj(out.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return windows.merge(out).reshape(x.shape)

    def _projected(self, x: Tensor) -> Tensor:
        if not isinstance(self, ShiftedWindowAttentionV2) or self.qkv.bias is None:
            return self.qkv(x)
        q, k, v = self.qkv.bias.chunk(3)  # keys have none
        return F.linear(x, self.qkv.weight, torch.cat([q, torch.zeros_like(k), v]))


def _in_windows(module: Any, grid: Grid) -> tuple[Grid, Grid]:
    window = Grid(*module.window_size)
    return window, window


def _behind_a_class_token(images: Tensor, patches: Tensor) -> Grid:
    return Grid(patches.shape[2], patches.shape[3], prefix=1)


def _no_bias() -> float:
    """In the place of a relative position bias."""
    return 0.0


HOSTS: Hosts = {VisionTransformer: vit, SwinTransformer: swin}
