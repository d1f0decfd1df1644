"""timm's models that pool queries: Hiera, whose tokens come mask unit by mask unit, SAM 2's Hiera, and MViT V2."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from timm.models import hiera, hieradet_sam2, mvitv2
from torch import Tensor

from whereformer.adapters.behaviours import EquippedAttention, EquippedOnImage, attend
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Host, Layout, Own, Place, Sized, Start
from whereformer.adapters.timm.family import IMAGE, Family, reduced
from whereformer.adapters.timm.grids import between
from whereformer.adapters.timm.starts import from_abs_win, from_decomposed, from_learned
from whereformer.errors import InputError
from whereformer.grid import Grid, Points


def same(x: Tensor) -> Tensor:
    """In the place of `_pos_embed`."""
    return x


# ---------------------------------------------------------------------------------------------------------------
# SAM 2's Hiera: maps, and windows of them.


def pooled_queries(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    return (grid, grid) if m.q_pool is None else between(m, grid, tuple(m.q_pool.stride), (1, 1))


def sam_attention(m: Any) -> Attention:
    return Attention(m, m.dim_out, m.num_heads, pooled_queries, behaviour=EquippedOnImage)


SAM = Family(
    blocks={hieradet_sam2.MultiScaleBlock: IMAGE},
    attentions={hieradet_sam2.MultiScaleAttention: sam_attention},
    own={
        hieradet_sam2.HieraDet: lambda m: [
            Own(m, "pos_embed"),
            Own(m, "pos_embed_window"),
            Own(m, "_pos_embed", same, counts=False),
        ]
    },
)


def sam(model: hieradet_sam2.HieraDet) -> Host:
    return starting(SAM(model), from_abs_win(model.pos_embed, model.pos_embed_window, antialias=False))


def starting(host: Host, start: Start) -> Host:
    """With what lets encodings of tokens go on, before the first block of all."""
    first, *others = host.stages
    blocks = [replace(first.blocks[0], start=start), *first.blocks[1:]]
    return replace(host, stages=[replace(first, blocks=blocks), *others])


# ---------------------------------------------------------------------------------------------------------------
# Hiera: tokens [batch, tokens, dim], in such an order that each pooling takes the maximum over the first axis.


@dataclass(frozen=True)
class Unrolled(Layout):
    """Tokens of an image in another order.

    Args:
        at: their grid.
        order: which patch of it, row by row, comes first, second, ...
    """

    at: Grid
    order: tuple[int, ...]

    def grid(self, place: Place, x: Tensor, *rest: Any, **named: Any) -> Grid:
        if x.shape[1] != len(self.order):
            raise InputError(f"Hiera with some of its mask units: expected all {len(self.order)} tokens")
        return self.at

    def tokens(self, x: Tensor) -> Tensor:
        return x[:, torch.tensor(self.order, device=x.device).argsort()]

    def back(self, tokens: Tensor, like: Tensor) -> Tensor:
        return tokens[:, torch.tensor(self.order, device=like.device)]


def unrolled(model: Any, tokens: int) -> Unrolled:
    """The order of so many tokens, which is that of as many first ones before poolings, in coarser patches."""
    height, width = model.tokens_spatial_shape
    first = model.unroll(torch.arange(height * width)[None, :, None])[0, :tokens, 0]
    factor = round((height * width / tokens) ** 0.5)
    rows, columns = first // width // factor, first % width // factor
    order = rows * (width // factor) + columns
    return Unrolled(Grid(height // factor, width // factor), tuple(order.tolist()))


@dataclass(frozen=True)
class UnitGrids:
    """Where queries and keys of a mask unit, or of the whole image, are; as `Attention.grids`.

    Args:
        size: of the keys' grid.
        keys: which of its patches, row by row, comes first, second, ...
        queries: the same for queries, in the middle of those they are pooled from.
    """

    size: tuple[int, int]
    keys: tuple[int, ...]
    queries: tuple[int, ...]

    def __call__(self, module: Any, grid: Grid) -> tuple[Grid, Grid]:
        keys = self._points(self.keys, module.qkv.weight.device)
        if self.queries == self.keys:
            return keys, keys
        return self._points(self.queries, module.qkv.weight.device), keys

    def _points(self, order: tuple[int, ...], device: torch.device) -> Points:
        return Grid(*self.size).keep(torch.tensor(order, device=device)[None])


def unit_grids(m: Any, layout: Unrolled) -> UnitGrids:
    width = layout.at.width
    order = torch.tensor(layout.order)
    count = len(order) // (m.q_stride * m.window_size) if m.use_mask_unit_attn else 1
    rows, columns = order[::count] // width, order[::count] % width  # the first unit: its tokens lie so far apart
    rows, columns = rows - rows.min(), columns - columns.min()
    size = (int(rows.max()) + 1, int(columns.max()) + 1)
    keys = rows * size[1] + columns
    queries = keys.reshape(m.q_stride, -1).amin(0)  # the first row and column of each pool
    return UnitGrids(size, tuple(keys.tolist()), tuple(queries.tolist()))


class EquippedUnits(EquippedAttention):
    heads_axis = 1


def hiera_host(model: hiera.Hiera) -> Host:
    if model.pos_embed is None:
        raise InputError("equip: a Hiera of videos (sep_pos_embed) is not known; describe it: host=Host(...)")
    layouts: dict[Any, Unrolled] = {}
    tokens = model.tokens_spatial_shape[0] * model.tokens_spatial_shape[1]
    for block in cast("Iterable[Any]", model.blocks):
        layouts[block] = unrolled(model, tokens)
        tokens //= block.attn.q_stride

    def attention(block: Any) -> Attention:
        m, grids = block.attn, unit_grids(block.attn, layouts[block])
        return Attention(m, m.dim_out, m.heads, grids, behaviour=EquippedUnits)

    own = [Own(model, "pos_embed"), Own(model, "_pos_embed", same, counts=False)]
    if model.pos_embed_win is not None:
        own.append(Own(model, "pos_embed_win"))
    family = Family(
        blocks={hiera.HieraBlock: layouts.__getitem__},
        attentions={hiera.HieraBlock: attention},
        own={hiera.Hiera: lambda m: own},
        size=lambda model: tuple(
            n * s for n, s in zip(model.tokens_spatial_shape, model.patch_stride, strict=True)
        ),
    )
    if model.pos_embed_win is None:
        start = from_learned(model.pos_embed)
    else:
        start = from_abs_win(model.pos_embed, model.pos_embed_win, antialias=True)
    return starting(family(model), start)


# ---------------------------------------------------------------------------------------------------------------
# MViT V2: queries and keys pooled by strided convolutions, behind a class token or not.


class EquippedPoolingAttention(EquippedAttention):
    def forward(self: Any, x: Tensor, feat_size: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        (q, size), (k, key_size), (v, _) = (
            self._pooled(t, feat_size, pool, norm)
            for t, pool, norm in (
                (q, self.pool_q, self.norm_q),
                (k, self.pool_k, self.norm_k),
                (v, self.pool_v, self.norm_v),
            )
        )
        own = None
        if self.rel_pos_type == "spatial":
            own = mvitv2.cal_rel_pos_type(
                q.new_zeros(*q.shape[:-1], k.shape[-2]),
                q,
                self.has_cls_token,
                size,
                key_size,
                self.rel_pos_h,
                self.rel_pos_w,
            )
        out = attend(self, q, k, v, own)
        out = out + q if self.residual_pooling else out
        return self.proj(out.transpose(1, 2).flatten(2)), size

    def _pooled(self: Any, x: Tensor, size: Sequence[int], pool: Any, norm: Any) -> tuple[Tensor, Sequence[int]]:
        if pool is not None:
            x, token = mvitv2.reshape_pre_pool(x, list(size), self.has_cls_token)
            x, size = mvitv2.reshape_post_pool(pool(x), self.num_heads, token)
        return (x if norm is None else norm(x)), size


def pooling(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    return between(m, grid, _stride(m.pool_q), _stride(m.pool_k))


def _stride(pool: Any) -> tuple[int, int]:
    if pool is None:
        return 1, 1
    height, width = (pool.stride,) * 2 if isinstance(pool.stride, int) else pool.stride
    return height, width


def mvit_attention(m: Any) -> Attention:
    queries, keys = _stride(m.pool_q)[0], _stride(m.pool_k)[0]
    start = None
    if m.rel_pos_type == "spatial":
        # timm counts from key 0 in its first patch, and we from its middle one
        ratio = max(queries // keys, keys // queries)
        middle = (ratio - 1) // 2
        shift = middle + 1 - ratio if keys > queries else -middle
        start = from_decomposed(m.rel_pos_h, m.rel_pos_w, shift)
    return Attention(m, m.dim_out, m.num_heads, pooling, start=start, behaviour=EquippedPoolingAttention)


def mvit_own(m: Any) -> list[Own]:
    if m.rel_pos_type != "spatial":
        return []
    switch = Own(m, "rel_pos_type", "", counts=False)
    return [Own(m, "rel_pos_h"), Own(m, "rel_pos_w"), switch]


SIZED = {prefix: Sized(prefix) for prefix in (0, 1)}

MVIT = Family(
    blocks={mvitv2.MultiScaleBlock: lambda block: SIZED[int(block.has_cls_token)]},
    attentions={mvitv2.MultiScaleAttention: mvit_attention},
    own={
        mvitv2.MultiScaleAttention: mvit_own,
        mvitv2.MultiScaleVit: lambda m: [] if m.pos_embed is None else [Own(m, "pos_embed")],
    },
    size=lambda model: reduced(model.stages[0].feat_size, model),
)


def mvit(model: mvitv2.MultiScaleVit) -> Host:
    host = MVIT(model)
    return host if model.pos_embed is None else starting(host, from_learned(model.pos_embed))


HOSTS: Hosts = {hieradet_sam2.HieraDet: sam, hiera.Hiera: hiera_host, mvitv2.MultiScaleVit: mvit}
