"""timm's CaiT: heads that talk, before and after the softmax; then blocks in which the class token alone asks.

The class token has no place, so that there is nothing relative to say of what it asks: encodings stand in the
blocks of the patches.
"""

from typing import TYPE_CHECKING, Any, cast

from timm.models.cait import Cait, TalkingHeadAttn
from torch import Tensor

from whereformer.adapters.behaviours import EquippedAttention
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Stage
from whereformer.adapters.timm.parts import EquippedPlain, attends, rows, swaps
from whereformer.attention import logits_of, said, weighted
from whereformer.grid import Grid


def cait(model: Cait) -> Host:
    attentions: list[Any] = [block.attn for block in cast(Any, model.blocks)]
    blocks = [
        Block(
            block,
            [attends(attention, behaviour=EquippedTalkingHeads)] if type(attention) is TalkingHeadAttn else [],
            rows(model.pos_embed) if number == 0 else None,
        )
        for number, (block, attention) in enumerate(zip(cast(Any, model.blocks), attentions, strict=True))
    ]
    return Host(
        [Stage(model.embed_dim, attentions[0].num_heads, Grid(*cast(Any, model.patch_embed).grid_size), blocks)],
        own=[Own(model, "pos_embed", 0.0)],
        swaps=swaps(model),
        behaviour=EquippedPlain,
        first=model.pos_drop,
        equal="learned",
    )


class EquippedTalkingHeads(EquippedAttention, *((TalkingHeadAttn,) if TYPE_CHECKING else ())):
    """Rotations and biases of each head speak before heads are mixed, values with the weights mixed again."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        grid = self.place.grid
        assert isinstance(grid, Grid)
        forms, _ = said(q, k, v, grid, grid, tuple(self.inside()), None, 0.0)
        weights = self.proj_l(logits_of(q, k, forms).movedim(1, -1)).softmax(-2)
        weights = self.attn_drop(self.proj_w(weights).movedim(-1, 1))
        out = weighted(weights, v, forms)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


HOSTS: Hosts = {Cait: cait}
