"""timm's CrossViT, PiT and VOLO: ordinary attention in branches, on pooled grids, behind a stem."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from timm.layers.attention import Attention
from timm.models.crossvit import CrossVit
from timm.models.pit import ConvEmbedding, Pooling, PoolingVisionTransformer
from timm.models.volo import VOLO, Transformer
from torch import Tensor, nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Fixed, Host, Image, Own, Place, Stage
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.parts import EquippedStemmed, attends, fused, rows
from whereformer.adapters.timm.vit import EquippedVisionAttention
from whereformer.grid import Grid


def crossvit(model: CrossVit) -> Host:
    """Each branch is a stage. Between branches class tokens alone ask: they have no place."""
    stages, own = [], []
    for number, embed in enumerate(cast(Sequence[Any], model.patch_embed)):
        name = f"pos_embed_{number}"
        size = (n // p for n, p in zip(embed.img_size, embed.patch_size, strict=True))
        grid = Grid(*size, prefix=1)
        found = [block for several in cast(Any, model.blocks) for block in several.blocks[number]]
        blocks = [_block(block, getattr(model, name) if n == 0 else None) for n, block in enumerate(found)]
        stages.append(Stage(model.embed_dim[number], found[0].attn.num_heads, grid, blocks, Fixed(grid)))
        own.append(Own(model, name, 0.0))
    return Host(stages, own=own, equal="learned")


def pit(model: PoolingVisionTransformer) -> Host:
    stages, swaps = [], [(cast(nn.Module, model.patch_embed), EquippedMap)]
    height, width = model.patch_embed.grid_size
    for number, transformer in enumerate(cast(Any, model.transformers)):
        if number:
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
            swaps.append((transformer.pool, EquippedMap))
        table = model.pos_embed.movedim(1, -1) if number == 0 else None
        blocks = [_block(block, table if n == 0 else None) for n, block in enumerate(transformer.blocks)]
        heads, grid = transformer.blocks[0].attn.num_heads, Grid(height, width, model.num_tokens)
        stages.append(Stage(model.base_dims[number] * heads, heads, grid, blocks))
    first = len(stages[0].blocks)
    return Host(stages, own=[Own(model, "pos_embed", 0.0)], swaps=swaps, equal={range(first): "learned"})


class EquippedMap(Equipped, *((ConvEmbedding, Pooling) if TYPE_CHECKING else ())):
    """Tells where the patches are that it makes: an image of them, alone or with class tokens beside it."""

    place: Place

    def forward(self, *args: Any) -> Any:
        out = super().forward(*args)
        image: Tensor = out[0] if isinstance(out, tuple) else out
        self.place.grid = Grid(image.shape[2], image.shape[3], self.place.home.prefix)
        return out


def volo(model: VOLO) -> Host:
    """Outlookers are its stem: they attend by a linear layer of the patch in the middle, without keys.

    So are they for its own table, which comes after them. In the last blocks the class token alone asks.
    """
    table = cast(Tensor, model.pos_embed)
    found = [block for stage in model.network for block in stage.modules() if isinstance(block, Transformer)]
    attentions = [block.attn for block in found]
    blocks = [
        Block(block, [attends(attention)], rows(table) if n == 0 else None)
        for n, (block, attention) in enumerate(zip(found, attentions, strict=True))
    ]
    heads, dim = attentions[0].num_heads, attentions[0].proj.out_features
    return Host(
        [Stage(dim, heads, Grid(*table.shape[1:3]), blocks, Image())],
        own=[Own(model, "pos_embed", 0.0)],
        switches=fused(attentions),
        behaviour=EquippedStemmed,
        first=model.pos_drop,
        equal="learned",
    )


def _block(block: Any, table: Tensor | None) -> Block:
    """timm's ordinary block."""
    kind = EquippedVisionAttention if type(block.attn) is Attention else None
    return Block(block, [attends(block.attn, behaviour=kind)], rows(table))


HOSTS: Hosts = {CrossVit: crossvit, PoolingVisionTransformer: pit, VOLO: volo}
