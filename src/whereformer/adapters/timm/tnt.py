"""timm's TNT: the transformer of patches. That within a patch is a part of its embedding, and stays as it is."""

from typing import TYPE_CHECKING, Any, cast

from timm.models import tnt as timm_tnt
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, attend, held
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Fixed, Host, Own, Place, Stage
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.parts import EquippedStemmed, attends, rows
from whereformer.attention import encode
from whereformer.grid import Grid


def tnt(model: timm_tnt.TNT) -> Host:
    grid = Grid(*model.pixel_embed.grid_size, prefix=1)
    attentions: list[Any] = [cast(Any, block).attn_out for block in model.blocks]
    blocks = [
        Block(
            block,
            [attends(attention, behaviour=EquippedTNTAttention)],
            rows(model.patch_pos) if number == 0 else None,
            EquippedTNTBlock,
        )
        for number, (block, attention) in enumerate(zip(model.blocks, attentions, strict=True))
    ]
    return Host(
        [Stage(model.embed_dim, attentions[0].num_heads, grid, blocks, Fixed(grid))],
        own=[Own(model, "patch_pos", 0.0)],
        behaviour=EquippedStemmed,
        first=model.pos_drop,
        equal="learned",
    )


class EquippedTNTBlock(Equipped, nn.Module if TYPE_CHECKING else object):
    """Its patches come second; their grid is always the same."""

    encodings: nn.ModuleList
    place: Place

    def forward(self, pixel_embed: Tensor, patch_embed: Tensor) -> tuple[Tensor, Tensor]:
        patch_embed = encode(patch_embed, self.place.grid, held(self))
        return super().forward(pixel_embed, patch_embed)


class EquippedTNTAttention(EquippedAttention, *((timm_tnt.Attention,) if TYPE_CHECKING else ())):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = attend(self, q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


HOSTS: Hosts = {timm_tnt.TNT: tnt}
