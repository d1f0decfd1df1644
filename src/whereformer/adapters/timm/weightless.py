"""timm's XCiT and CoaT: their attention has no weights between patches, only encodings of tokens can speak.

XCiT's last blocks have weights, but there the class token alone asks, which has no place.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from timm.models.coat import CoaT, ConvPosEnc, ConvRelPosEnc
from timm.models.xcit import ConvPatchEmbed, Xcit
from torch import Tensor, nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Place, Sized, Stage, Start
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.parts import EquippedPlain
from whereformer.encoding import PositionEncoding
from whereformer.encodings import XCiT
from whereformer.grid import Grid

CHANNELS = "is between channels: patches never meet in pairs"
FACTORISED = "is factorised, q (softmax(k)ᵀ v): patches never meet in pairs"


def xcit(model: Xcit) -> Host:
    embed, own = cast(Any, model.patch_embed), cast(Any, model.pos_embed)
    stride = embed.patch_size
    blocks = [
        Block(block, start=_features(own) if n == 0 else None, deaf=CHANNELS)
        for n, block in enumerate(model.blocks)
    ]
    heads = cast(Any, model.blocks[0]).attn.num_heads
    grid = Grid(embed.img_size[0] // stride, embed.img_size[1] // stride)
    fourier = own and f"xcit(channels={own.hidden_dim}, temperature={float(own.temperature)})"
    return Host(
        [Stage(model.embed_dim, heads, grid, blocks)],
        own=[Own(model, "pos_embed")],
        swaps=[(embed, EquippedConvPatchEmbed)],
        behaviour=EquippedPlain,
        first=model.pos_drop,
        equal=fourier or "none",
    )


class EquippedConvPatchEmbed(Equipped, *((ConvPatchEmbed,) if TYPE_CHECKING else ())):
    """Tells where the patches are that it makes."""

    place: Place

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        self.place.grid = Grid(*out[1])
        return out


def _features(own: Any) -> Start | None:
    if own is None:
        return None

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        weight, bias = own.token_projection.weight[..., 0, 0], own.token_projection.bias
        fits = isinstance(encoding, XCiT) and encoding.weight.shape == weight.shape and bias is not None
        if fits:
            encoding.load_state_dict({"weight": weight, "bias": bias})
        return fits

    return start


# ---------------------------------------------------------------------------------------------------------------


def coat(model: CoaT) -> Host:
    stages = []
    for number in range(1, 5):
        embed: Any = getattr(model, f"patch_embed{number}")
        blocks: Any = getattr(model, f"serial_blocks{number}")
        heads = blocks[0].factoratt_crpe.num_heads
        grid = Grid(*embed.grid_size, prefix=1)
        stages.append(
            Stage(
                embed.proj.out_channels, heads, grid, [Block(b, deaf=FACTORISED) for b in blocks], Sized(prefix=1)
            )
        )
    own = [
        Own(holder, name, silent.train(model.training), counts=holder is model)
        for holder in model.modules()
        for name, module in holder.named_children()
        if (silent := _silent(module)) is not None
    ]
    return Host(stages, own=own)


class Pass(nn.Module):
    """In the place of a ConvPosEnc that went."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return x


class Nothing(nn.Module):
    """In the place of a ConvRelPosEnc that went: adds nothing to what it is added to."""

    def forward(self, q: Tensor, v: Tensor, size: tuple[int, int]) -> float:
        return 0.0


def _silent(module: nn.Module) -> nn.Module | None:
    match module:
        case ConvPosEnc():
            return Pass()
        case ConvRelPosEnc():
            return Nothing()
    return None


HOSTS: Hosts = {Xcit: xcit, CoaT: coat}
