"""timm's Twins and PVT v2."""

from collections.abc import Sequence
from typing import Any, cast

from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.twins import PosConv, Twins
from torch import Tensor, nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Sized, Stage
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
        found = [Block(block, start=_going_on_from(own) if n == 1 else None) for n, block in enumerate(blocks)]
        attention = blocks[0].attn
        stages.append(Stage(attention.dim, attention.num_heads, Grid(embed.H, embed.W), found, Sized()))
    silent = nn.ModuleList(Silent() for _ in stages).train(model.training)
    return Host(stages, own=[Own(model, "pos_block", silent)])


def pvt_v2(model: PyramidVisionTransformerV2) -> Host:
    _, height, width = (cast(Any, model).pretrained_cfg or {}).get("input_size", (3, 224, 224))
    stages = []
    for number, stage in enumerate(cast(Any, model.stages)):
        stride = 2 if number else 4
        height, width = -(-height // stride), -(-width // stride)
        attention = stage.blocks[0].attn
        blocks = [Block(block) for block in stage.blocks]
        stages.append(Stage(attention.dim, attention.num_heads, Grid(height, width), blocks, Sized()))
    return Host(stages)


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
