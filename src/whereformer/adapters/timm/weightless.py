"""timm's XCiT and CoaT: their attention has no weights between patches, so that encodings of tokens alone can speak.

XCiT's is between channels; CoaT's is factorised, q (softmax(k)ᵀ v), in which pairs of patches never meet. XCiT's last
blocks have weights, but there the class token alone asks, which has no place.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from timm.models.coat import CoaT, ConvPosEnc, ConvRelPosEnc
from timm.models.xcit import ConvPatchEmbed, PositionalEncodingFourier, Xcit
from torch import Tensor, nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Place, Sized, Stage, Start
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.parts import EquippedPlain
from whereformer.encoding import PositionEncoding
from whereformer.encodings import XCiT
from whereformer.grid import Grid


def xcit(model: Xcit) -> Host:
    embed, own = model.patch_embed, model.pos_embed
    stride = embed.patch_size
    blocks = [Block(block, start=_features(own) if n == 0 else None) for n, block in enumerate(model.blocks)]
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

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x, size = super().forward(x)
        self.place.grid = Grid(*size)
        return x, size


def _features(own: PositionalEncodingFourier | None) -> Start | None:
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
        stages.append(Stage(embed.proj.out_channels, heads, grid, [Block(b) for b in blocks], Sized(prefix=1)))
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
