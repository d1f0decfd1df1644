"""timm's image encoder of Segment Anything: windows, and between them blocks that see the whole image."""

from functools import partial
from typing import Any, cast

from timm.layers.patch_dropout import PatchDropout
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Grids, Host, Image, Own, Stage, Start, on_the_whole
from whereformer.adapters.timm.parts import EquippedPlain, attends, fused, joined, rotations, rows, swaps
from whereformer.adapters.timm.starts import from_decomposed
from whereformer.errors import InputError
from whereformer.grid import Grid


def sam(model: VisionTransformerSAM) -> Host:
    if isinstance(model.patch_drop, PatchDropout):
        raise InputError(
            "equip: the model drops patches of an image that stays one; build it with patch_drop_rate=0"
        )
    blocks = [
        Block(
            block,
            [attends(block.attn, _strips(block.attn), grids=_grids(block.window_size))],
            rows(model.pos_embed) if number == 0 else None,
        )
        for number, block in enumerate(cast(Any, model.blocks))
    ]
    attentions: list[Any] = [block.attentions[0].module for block in blocks]  # pyright: ignore
    own = [Own(attention, name) for attention in attentions for name in ("rel_pos_h", "rel_pos_w", "rope")]
    own = [one for one in own if hasattr(one.module, one.name)]
    first = attentions[0]
    relative = "decomposed" if first.use_rel_pos else rotations(first.rope)
    if model.rope_global is not None and rotations(model.rope_global) != rotations(model.rope_window):
        relative = None  # two rotations
    return Host(
        [Stage(model.embed_dim, first.num_heads, Grid(*cast(Any, model.patch_embed).grid_size), blocks, Image())],
        own=[
            Own(model, "pos_embed"),
            Own(model, "rope_global"),
            Own(model, "rope_window"),
            *own,
            *(Own(attention, "use_rel_pos", False, counts=False) for attention in attentions),
        ],
        switches=fused(attentions),
        swaps=swaps(model),
        behaviour=EquippedPlain,
        first=model.pos_drop,
        equal=joined(["" if model.pos_embed is None else "learned", relative]),
    )


def _grids(window: int) -> Grids:
    return partial(_window, window) if window else on_the_whole


def _window(size: int, attention: nn.Module, grid: Grid) -> tuple[Grid, Grid]:
    """Windows are filled up with zeros where the image ends: all of them have all their patches."""
    window = Grid(size, size)
    return window, window


def _strips(attention: Any) -> Start | None:
    return from_decomposed(attention.rel_pos_h, attention.rel_pos_w) if attention.use_rel_pos else None


HOSTS: Hosts = {VisionTransformerSAM: sam}
