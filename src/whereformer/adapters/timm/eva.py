"""timm's Eva: EVA, EVA-02, DINOv3, RoPE-ViT, Perception Encoders ...: a table, a rotation, or both."""

from typing import Any

from timm.models.eva import Eva

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Stage
from whereformer.adapters.timm.parts import (
    EquippedPlain,
    attends,
    frequencies,
    fused,
    joined,
    rotations,
    rows,
    swaps,
)
from whereformer.grid import Grid


def eva(model: Eva) -> Host:
    attentions: list[Any] = [block.attn for block in model.blocks]
    blocks = [
        Block(block, [attends(block.attn, frequencies(model.rope, number))])
        for number, block in enumerate(model.blocks)
    ]
    blocks[0] = Block(model.blocks[0], blocks[0].attentions, rows(model.pos_embed))
    grid = Grid(*model.patch_embed.grid_size, prefix=model.num_prefix_tokens)
    return Host(
        [Stage(model.embed_dim, attentions[0].num_heads, grid, blocks)],
        own=[Own(model, "pos_embed"), Own(model, "rope")],
        switches=fused(attentions),
        swaps=swaps(model),
        behaviour=EquippedPlain,
        first=model.pos_drop,
        equal=joined(["" if model.pos_embed is None else "learned", rotations(model.rope)]),
    )


HOSTS: Hosts = {Eva: eva}
