"""timm's Twins and PVT v2 as hosts: pyramids, each stage a transformer with a width and a grid of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.twins import PosConv, Twins
from torch import Tensor, nn

from whereformer.adapters.shared import attach, build, held, names_of_parameters
from whereformer.adapters.swap import Equipped, swap_class
from whereformer.attention import encode
from whereformer.catalog import Factory, spell
from whereformer.encoding import PositionEncoding
from whereformer.encodings import PEG
from whereformer.errors import InputError
from whereformer.grid import Grid

Pyramid = Twins | PyramidVisionTransformerV2


@dataclass
class Stage:
    """One stage of a pyramid, and the encodings that come before each of its blocks."""

    blocks: Sequence[nn.Module]
    dim: int
    heads: int
    grid: Grid
    placements: list[list[PositionEncoding]] = field(init=False)

    def __post_init__(self) -> None:
        self.placements = [[] for _ in self.blocks]


class EquippedPyramid(Equipped, *((Twins,) if TYPE_CHECKING else ())):
    """Knows its encodings, so that others can ask."""

    encoding: str
    home_grid: Grid
    """Of the first stage."""

    def no_weight_decay(self) -> set[str]:
        return set(super().no_weight_decay()) | names_of_parameters(self)


class EquippedStageBlock(Equipped, *((nn.Module,) if TYPE_CHECKING else ())):
    """Encodings of tokens before a block; the grid comes with each call."""

    encodings: nn.ModuleList

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return super().forward(encode(x, Grid(*size), held(self.encodings)), size)


class Silent(nn.Module):
    """In the place of a PosConv that went."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return x


def equip(model: nn.Module, factories: Sequence[Factory], *, keep_own: bool) -> None:
    """As `whereformer.equip`: first everything that can fail, then the changes, which cannot."""
    if isinstance(model, EquippedPyramid):
        raise InputError(f"equip: the model has {model.encoding!r} already; equip a fresh one")
    pyramid = cast(Pyramid, model)
    stages = list(_stages(pyramid))
    if any(len({id(block) for block in stage.blocks}) < len(stage.blocks) for stage in stages):
        raise InputError("equip: one block stands in several places of the model; each needs encodings of its own")
    for factory in factories:
        for stage in stages:
            _distribute(factory, pyramid, stage)
    if isinstance(pyramid, Twins) and not keep_own:
        for own, stage in zip(pyramid.pos_block, stages, strict=True):
            _start_from_own(cast(PosConv, own), stage)

    if isinstance(pyramid, Twins) and not keep_own:
        pyramid.pos_block = nn.ModuleList(Silent() for _ in stages).train(pyramid.training)
    for stage in stages:
        for block, encodings in zip(stage.blocks, stage.placements, strict=True):
            if encodings:
                attach(block, EquippedStageBlock, encodings)
    swap_class(pyramid, EquippedPyramid)
    equipped = cast(EquippedPyramid, pyramid)
    equipped.encoding = " + ".join(map(spell, factories))
    equipped.home_grid = stages[0].grid


def _distribute(factory: Factory, model: Pyramid, stage: Stage) -> None:
    """Build one encoding for each place in a stage that asks for it."""
    like = next(model.parameters())
    scout = build(factory, like, stage.dim, stage.heads, stage.grid)
    if set(scout.moments()) - {"tokens"}:
        raise InputError(
            f"equip: {spell(factory)} speaks in attention, but {type(model).__name__} attends within windows, or"
            " to keys that are pooled: it takes encodings of tokens only"
        )
    for number in scout.blocks(len(stage.blocks)):
        if not 0 <= number < len(stage.blocks):
            raise InputError(
                f"equip: {spell(factory)} asks for block {number} of the {len(stage.blocks)} of a stage,"
                " counted from 0"
            )
        stage.placements[number].append(build(factory, like, stage.dim, stage.heads, stage.grid))


@torch.no_grad()
def _start_from_own(own: PosConv, stage: Stage) -> None:
    """A PEG after the first block is what Twins had: it goes on from there."""
    convolution = cast(nn.Conv2d, own.proj[0])
    for encoding in stage.placements[1] if len(stage.blocks) > 1 else ():
        if isinstance(encoding, PEG) and encoding.weight.shape == convolution.weight.shape:
            encoding.load_state_dict(convolution.state_dict())
            return


def _stages(model: Pyramid) -> Iterator[Stage]:
    if isinstance(model, Twins):
        for embed, blocks in zip(cast(Any, model.patch_embeds), cast(Any, model.blocks), strict=True):
            yield Stage(blocks, blocks[0].attn.dim, blocks[0].attn.num_heads, Grid(embed.H, embed.W))
        return
    configuration = getattr(model, "pretrained_cfg", None) or {}
    _, height, width = configuration.get("input_size", (3, 224, 224))
    for number, stage in enumerate(cast(Any, model.stages)):
        stride = 2 if number else 4
        height, width = -(-height // stride), -(-width // stride)
        yield Stage(stage.blocks, stage.blocks[0].attn.dim, stage.blocks[0].attn.num_heads, Grid(height, width))
