"""timm's models with values wider than keys, written out: LeViT, EfficientFormer, EfficientViT (MSRA), SHViT."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.models import efficientformer, efficientformer_v2, efficientvit_msra, levit, shvit
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, attend, held
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Fixed, Grids, Own
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.family import CHANNELS, NARROW, Family, reduced
from whereformer.adapters.timm.grids import between, resolution
from whereformer.adapters.timm.starts import from_levit
from whereformer.attention import logits_of, said
from whereformer.grid import Grid


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
    return between(m, Grid(*m.resolution), (m.stride, m.stride), (1, 1))


def key_dims(m: Any) -> tuple[int, int]:
    return m.num_heads * m.key_dim, m.num_heads


def levit_layout(m: Any) -> Any:
    attention = getattr(m, "attn", None) or m.attn_downsample
    return CHANNELS if attention.use_conv else Fixed(Grid(*attention.resolution))


def with_biases(behaviour: type[EquippedAttention], grids: Grids) -> Callable[[Any], Attention]:
    """Attentions with a number for each head and undirected offset."""

    def attention(m: Any) -> Attention:
        start = from_levit(m.attention_biases, m.resolution)
        return Attention(m, *key_dims(m), grids, takes=NARROW, start=start, behaviour=behaviour)

    return attention


LEVIT = Family(
    blocks={levit.LevitBlock: levit_layout, levit.LevitDownsample: levit_layout},
    attentions={
        levit.Attention: with_biases(EquippedLevitAttention, resolution),
        levit.AttentionDownsample: with_biases(EquippedLevitDownsample, shrinking),
    },
    own={levit.Attention: own_biases, levit.AttentionDownsample: own_biases},
    size=lambda model: reduced(model.stages[0].blocks[0].attn.resolution, model),
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

# EfficientFormer V2: attention on maps. Within a stage heads are mixed, before and after the softmax.


def heads_of_map(m: Any, x: Tensor) -> Tensor:
    """[batch, dim, height, width] as [batch, heads, tokens, head_dim]."""
    return x.unflatten(1, (m.num_heads, -1)).flatten(3).mT


class EquippedMapDownsample(EquippedAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        heads = [heads_of_map(self, t) for t in (q, k, v)]
        out = attend(self, heads[0], heads[1], heads[2], biases(self, x))
        return self.proj(self.act(out.mT.flatten(1, 2).unflatten(-1, q.shape[2:]) + self.v_local(v)))


class EquippedMapTalkingHeads(EquippedAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x if self.stride_conv is None else self.stride_conv(x)
        v = self.v(x)
        q, k, values = (heads_of_map(self, t) for t in (self.q(x), self.k(x), v))
        queries, keys = self.grids(self, self.place.grid)
        forms, _ = said(q, k, values, queries, keys, tuple(held(self)), None, 0.0)
        logits = logits_of(q, k, forms)
        if (own := biases(self, x)) is not None:
            logits = logits + own
        weights = self.talking_head2(self.talking_head1(logits).softmax(-1))
        out = (weights @ values).mT.flatten(1, 2).unflatten(-1, v.shape[2:]) + self.v_local(v)
        return self.proj(self.act(out if self.upsample is None else self.upsample(out)))


def halving(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    return between(m, Grid(*m.resolution), (2, 2), (1, 1))


EFFICIENTFORMER_V2 = Family(
    blocks={efficientformer_v2.EfficientFormerV2Block: CHANNELS, efficientformer_v2.Downsample: CHANNELS},
    attentions={
        efficientformer_v2.Attention2d: with_biases(EquippedMapTalkingHeads, resolution),
        efficientformer_v2.Attention2dDownsample: with_biases(EquippedMapDownsample, halving),
    },
    own=dict.fromkeys((efficientformer_v2.Attention2d, efficientformer_v2.Attention2dDownsample), own_biases),
    size=lambda model: reduced(model.stages[-1].blocks[-1].token_mixer.resolution, model, -1),
)

# ---------------------------------------------------------------------------------------------------------------
# EfficientViT: head after head, each on what the head before it gave; each holds encodings of its own.


class EquippedHead(EquippedAttention):
    """The convolution of a head's queries, where its encodings are held; the cascade calls them."""

    def forward(self, x: Tensor) -> Tensor:
        return super(EquippedAttention, self).forward(x)  # pyright: ignore[reportAttributeAccessIssue]


class EquippedCascade(Equipped, *((nn.Module,) if TYPE_CHECKING else ())):
    def forward(self: Any, x: Tensor) -> Tensor:
        self.place.grid = Grid(*x.shape[2:])
        own, outs, last = biases(self, x), [], 0
        for head, (part, qkv, dws) in enumerate(zip(x.chunk(len(self.qkvs), 1), self.qkvs, self.dws, strict=True)):
            q, k, v = qkv(part + last).split([self.key_dim, self.key_dim, self.val_dim], 1)
            q, k, v = (t.flatten(2).mT.unsqueeze(1) for t in (dws(q), k, v))
            mask = None if own is None or not own.ndim else own[head]
            if isinstance(dws.conv, EquippedHead):
                out = attend(dws.conv, q, k, v, mask)
            else:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            last = out.squeeze(1).mT.unflatten(-1, x.shape[2:])
            outs.append(last)
        return self.proj(torch.cat(outs, 1))


def cascade(m: Any) -> list[Attention]:
    home = Grid(m.resolution, m.resolution)
    starts = [from_levit(table[None], home.size) for table in m.attention_biases]
    return [
        Attention(dws.conv, m.key_dim, 1, home=home, takes=NARROW, start=start, behaviour=EquippedHead)
        for dws, start in zip(m.dws, starts, strict=True)
    ]


EFFICIENTVIT = Family(
    blocks={efficientvit_msra.EfficientVitBlock: CHANNELS},
    attentions={efficientvit_msra.CascadedGroupAttention: cascade},
    own={efficientvit_msra.CascadedGroupAttention: own_biases},
    swaps={efficientvit_msra.CascadedGroupAttention: EquippedCascade},
)

# ---------------------------------------------------------------------------------------------------------------
# SHViT: one head, on a part of the channels.


class EquippedSingleHead(EquippedAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        seen, others = x.split([self.pdim, self.dim - self.pdim], 1)
        qkv = self.qkv(self.pre_norm(seen)).flatten(2).mT.unsqueeze(1)
        out = attend(self, *qkv.split([self.qk_dim, self.qk_dim, self.pdim], -1))
        seen = out.squeeze(1).mT.unflatten(-1, x.shape[2:])
        return self.proj(torch.cat([seen, others], 1))


SHVIT = Family(
    blocks={shvit.BasicBlock: CHANNELS},
    attentions={shvit.SHSA: lambda m: Attention(m, m.qk_dim, 1, takes=NARROW, behaviour=EquippedSingleHead)},
)

HOSTS: Hosts = {
    levit.Levit: LEVIT,
    levit.LevitDistilled: LEVIT,
    efficientformer.EfficientFormer: EFFICIENTFORMER,
    efficientformer_v2.EfficientFormerV2: EFFICIENTFORMER_V2,
    efficientvit_msra.EfficientVitMsra: EFFICIENTVIT,
    shvit.SHViT: SHVIT,
}
