"""timm's transformers with tables of offsets, one in each block or one for all: BEiT, BEiT v2, ViT-RelPos."""

from typing import Any, cast

from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp
from timm.models.beit import Beit
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Stage, Start
from whereformer.adapters.timm.parts import EquippedPlain, attends, fused, joined, offsets, rows, swaps
from whereformer.adapters.timm.starts import from_rel_pos
from whereformer.grid import Grid


def beit(model: Beit) -> Host:
    attentions: list[Any] = [cast(Any, block).attn for block in model.blocks]
    shared = None if model.rel_pos_bias is None else model.rel_pos_bias.relative_position_bias_table
    blocks = [
        Block(
            block,
            [attends(attention, offsets(attention.relative_position_bias_table, shared))],
            rows(model.pos_embed) if number == 0 else None,
        )
        for number, (block, attention) in enumerate(zip(model.blocks, attentions, strict=True))
    ]
    own = [Own(attention, "relative_position_bias_table") for attention in attentions if attention.window_size]
    own += [Own(attention, "window_size", counts=False) for attention in attentions]
    says_offsets = shared is not None or attentions[0].window_size
    return Host(
        [Stage(model.embed_dim, attentions[0].num_heads, Grid(*model.patch_embed.grid_size, prefix=1), blocks)],
        own=[Own(model, "pos_embed"), Own(model, "rel_pos_bias"), *own],
        switches=fused(attentions),
        swaps=swaps(model),
        behaviour=EquippedPlain,
        first=model.pos_drop,
        equal=joined(["" if model.pos_embed is None else "learned", "beit" if says_offsets else ""]),
    )


def relpos(model: VisionTransformerRelPos) -> Host:
    attentions: list[Any] = [cast(Any, block).attn for block in model.blocks]
    prefix = model.num_prefix_tokens
    own = [attention.rel_pos if model.shared_rel_pos is None else model.shared_rel_pos for attention in attentions]
    blocks = [
        Block(block, [attends(attention, _same(said))])
        for block, attention, said in zip(model.blocks, attentions, own, strict=True)
    ]
    grid = Grid(*cast(Any, model.patch_embed).grid_size, prefix=prefix)
    return Host(
        [Stage(model.embed_dim, attentions[0].num_heads, grid, blocks)],
        own=[Own(model, "shared_rel_pos"), *(Own(attention, "rel_pos") for attention in attentions)],
        switches=fused(attentions),
        swaps=swaps(model),
        behaviour=EquippedPlain,
        equal=_name(own[0], prefix),
    )


def _name(said: nn.Module | None, prefix: int) -> str | None:
    if isinstance(said, RelPosBias):
        return "beit" if prefix else "swin"
    if isinstance(said, RelPosMlp) and said.mode == "swin":
        return f"log_cpb(hidden={said.mlp.fc1.out_features})"
    return None if said is not None else "none"


def _same(said: nn.Module | None) -> Start | None:
    return offsets(said.relative_position_bias_table) if isinstance(said, RelPosBias) else from_rel_pos(said)


HOSTS: Hosts = {Beit: beit, VisionTransformerRelPos: relpos}
