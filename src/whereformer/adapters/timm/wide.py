"""timm's models with values wider than keys, written out: LeViT, EfficientFormer, EfficientViT (MSRA), SHViT."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from timm.models import efficientformer, efficientformer_v2, efficientvit_msra, levit, shvit
from torch import Tensor

from whereformer.adapters.behaviours import EquippedAttention, attend
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Fixed, Own
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.family import CHANNELS, Family
from whereformer.adapters.timm.grids import device_of, pooled, resolution
from whereformer.adapters.timm.starts import from_levit
from whereformer.grid import Grid

NARROW = ("rotations", "biases")
"""At what an encoding may speak that knows the width of keys, not that of values."""


def no_biases(device: torch.device) -> Tensor:
    """In the place of `get_attention_biases`."""
    return torch.zeros((), device=device)


def own_biases(m: Any) -> Iterator[Own]:
    """A number for each head and undirected offset."""
    yield Own(m, "attention_biases")
    yield Own(m, "get_attention_biases", no_biases, counts=False)


def biases(m: Any, x: Tensor) -> Tensor | None:
    return None if m.attention_biases is None else m.get_attention_biases(x.device)


# ---------------------------------------------------------------------------------------------------------------
# LeViT: tokens [batch, tokens, dim], or a map; between stages an attention whose queries are fewer.


class EquippedLevitAttention(EquippedAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        qkv = qkv.flatten(2).mT if self.use_conv else qkv
        q, k, v = (
            qkv.unflatten(-1, (self.num_heads, -1))
            .transpose(1, 2)
            .split([self.key_dim, self.key_dim, self.val_dim], -1)
        )
        out = attend(self, q, k, v, biases(self, x)).transpose(1, 2).flatten(2)
        return self.proj(out.mT.unflatten(-1, x.shape[2:]) if self.use_conv else out)


class EquippedLevitDownsample(EquippedAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        q, kv = self.q(x), self.kv(x)
        size = q.shape[2:]
        q, kv = (t.flatten(2).mT if self.use_conv else t for t in (q, kv))
        q, kv = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, kv))
        k, v = kv.split([self.key_dim, self.val_dim], -1)
        out = attend(self, q, k, v, biases(self, x)).transpose(1, 2).flatten(2)
        return self.proj(out.mT.unflatten(-1, size) if self.use_conv else out)


def shrinking(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    keys = Grid(*m.resolution)
    size = tuple(-(-n // m.stride) for n in keys.size)
    return pooled(keys, size, (m.stride, m.stride), device_of(m)), keys


def key_dims(m: Any) -> tuple[int, int]:
    return m.num_heads * m.key_dim, m.num_heads


def levit_layout(m: Any) -> Any:
    attention = m.attn if isinstance(m, levit.LevitBlock) else m.attn_downsample
    return CHANNELS if attention.use_conv else Fixed(Grid(*attention.resolution))


def levit_attention(m: Any) -> Attention:
    start = from_levit(m.attention_biases, m.resolution)
    return Attention(
        m, *key_dims(m), resolution, takes=NARROW, start=start, behaviour=EquippedLevitAttention
    )


def levit_downsample(m: Any) -> Attention:
    start = from_levit(m.attention_biases, m.resolution)
    return Attention(m, *key_dims(m), shrinking, takes=NARROW, start=start, behaviour=EquippedLevitDownsample)


LEVIT = Family(
    blocks={levit.LevitBlock: levit_layout, levit.LevitDownsample: levit_layout},
    attentions={levit.Attention: levit_attention, levit.AttentionDownsample: levit_downsample},
    own={levit.Attention: own_biases, levit.AttentionDownsample: own_biases},
)

# ---------------------------------------------------------------------------------------------------------------
# EfficientFormer: the last blocks attend, on the 7 x 7 tokens of a home image.


class EquippedFormerAttention(EquippedAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.val_dim], -1)
        return self.proj(attend(self, q, k, v, biases(self, x)).transpose(1, 2).flatten(2))


def former_grid(m: Any) -> Grid:
    """The module keeps the offsets of all pairs, and their count; it is always square."""
    side = math.isqrt(m.attention_bias_idxs.shape[0])
    return Grid(side, side)


def former_attention(m: Any) -> Attention:
    grid = former_grid(m)
    start = from_levit(m.attention_biases, grid.size)
    return Attention(m, *key_dims(m), takes=NARROW, start=start, behaviour=EquippedFormerAttention)


EFFICIENTFORMER = Family(
    blocks={efficientformer.MetaBlock1d: lambda m: Fixed(former_grid(m.token_mixer))},
    attentions={efficientformer.Attention: former_attention},
    own={efficientformer.Attention: own_biases},
)

# ---------------------------------------------------------------------------------------------------------------
# EfficientFormer V2: attention on maps; within a stage heads are mixed before and after the softmax.


class EquippedMapDownsample(EquippedAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        heads = (t.unflatten(1, (self.num_heads, -1)).flatten(3).mT for t in (q, k, v))
        out = attend(self, *heads, biases(self, x))
        return self.proj(self.act(out.mT.flatten(1, 2).unflatten(-1, q.shape[2:]) + self.v_local(v)))


def map_downsample(m: Any) -> Attention:
    start = from_levit(m.attention_biases, m.resolution)
    return Attention(m, *key_dims(m), halving, takes=NARROW, start=start, behaviour=EquippedMapDownsample)


def halving(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    keys = Grid(*m.resolution)
    return pooled(keys, m.resolution2, (2, 2), device_of(m)), keys


EFFICIENTFORMER_V2 = Family(
    blocks={efficientformer_v2.EfficientFormerV2Block: CHANNELS, efficientformer_v2.Downsample: CHANNELS},
    attentions={efficientformer_v2.Attention2dDownsample: map_downsample},
    own={kind: own_biases for kind in (efficientformer_v2.Attention2d, efficientformer_v2.Attention2dDownsample)},
)

# ---------------------------------------------------------------------------------------------------------------
# EfficientViT: head after head, each on what the head before it gave; each holds encodings of its own.


class EquippedHead(EquippedAttention):
    """The convolution of a head's queries, where its encodings are held; the cascade calls them."""

    def forward(self, x: Tensor) -> Tensor:
        return super(EquippedAttention, self).forward(x)


class EquippedCascade(Equipped, *((nn.Module,) if TYPE_CHECKING else ())):
    def forward(self: Any, x: Tensor) -> Tensor:
        own, outs, last = biases(self, x), [], 0
        for head, (part, qkv, dws) in enumerate(zip(x.chunk(len(self.qkvs), 1), self.qkvs, self.dws, strict=True)):
            q, k, v = qkv(part + last).split([self.key_dim, self.key_dim, self.val_dim], 1)
            heads = (t.flatten(2).mT.unsqueeze(1) for t in (dws(q), k, v))
            mask = None if own is None else own[head]
            speaks = isinstance(dws, EquippedHead)
            out = attend(dws, *heads, mask) if speaks else F.scaled_dot_product_attention(*heads, attn_mask=mask)
            last = out.squeeze(1).mT.unflatten(-1, x.shape[2:])
            outs.append(last)
        return self.proj(torch.cat(outs, 1))


def cascade_heads(m: Any) -> list[Attention]:
    def on(dws: nn.Module, grid: Grid) -> tuple[Grid, Grid]:
        return resolution(m, grid)

    return [
        Attention(dws, m.key_dim, 1, on, takes=NARROW, behaviour=EquippedHead) for dws in m.dws
    ]
