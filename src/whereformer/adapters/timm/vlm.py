"""timm's encoders out of language models: Qwen3-VL, DeepSeek, Gemma 4, alone or with a classifier around them."""

from typing import TYPE_CHECKING, Any, cast

from timm.models.deepseek_vit import DeepseekVitClassifier, DeepseekVitEncoder
from timm.models.gemma4_vit import Gemma4PatchEmbed, Gemma4VitClassifier, Gemma4VitEncoder
from timm.models.qwen3_vit import Qwen3VitClassifier, Qwen3VitEncoder
from torch import Tensor, nn

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Place, Stage
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.naflex import Rows
from whereformer.adapters.timm.parts import EquippedPlain, attends, fused, joined, rotations, rows, swaps
from whereformer.grid import Grid


def rotating(model: Qwen3VitEncoder | Qwen3VitClassifier | DeepseekVitEncoder | DeepseekVitClassifier) -> Host:
    """Qwen3-VL's or DeepSeek's: tokens get a table, or nothing, and turn."""
    encoder: Any = getattr(model, "encoder", model)
    table: Tensor | None = getattr(encoder, "pos_embed", None)
    side = getattr(encoder, "pos_embed_grid_size", None)
    height, width = (side, side) if side else encoder.patch_embed.grid_size
    attentions = [block.attn for block in encoder.blocks]
    blocks = [
        Block(block, [attends(block.attn)], rows(table) if number == 0 else None)
        for number, block in enumerate(encoder.blocks)
    ]
    own = [Own(encoder, "rope"), Own(encoder, "_pos_embed", tokens_alone, counts=False)]
    return Host(
        [Stage(encoder.embed_dim, attentions[0].num_heads, Grid(height, width), blocks)],
        own=own if table is None else [Own(encoder, "pos_embed"), *own],
        switches=fused(attentions),
        swaps=swaps(encoder),
        behaviour=EquippedPlain,
        equal=joined(["" if table is None else "learned", rotations(encoder.rope)]),
    )


def tokens_alone(x: Tensor) -> tuple[Tensor, None]:
    """In the place of `_pos_embed`: tokens of an image, without a table, and no rotation."""
    return x.flatten(1, 2), None


# ---------------------------------------------------------------------------------------------------------------


def gemma(model: Gemma4VitEncoder | Gemma4VitClassifier) -> Host:
    encoder: Any = getattr(model, "encoder", model)
    configured = (cast(Any, model).pretrained_cfg or {}).get("input_size", (3, 768, 768))
    grid = Grid(*(n // p for n, p in zip(configured[-2:], encoder.patch_size, strict=True)))
    attentions = [block.attn for block in encoder.blocks]
    blocks = [
        Block(block, [attends(attention)]) for block, attention in zip(encoder.blocks, attentions, strict=True)
    ]
    return Host(
        [Stage(encoder.embed_dim, attentions[0].num_heads, grid, blocks)],
        own=[
            Own(encoder.patch_embed, "position_embedding_table"),
            Own(encoder.patch_embed, "_position_embeddings", nothing, counts=False),
            Own(encoder, "rotary_emb", Still(attentions[0].head_dim).train(model.training)),
        ],
        switches=fused(attentions),
        swaps=[(encoder.patch_embed, EquippedGemmaPatchEmbed)],
        behaviour=EquippedPlain,
    )


def nothing(*args: Any) -> float:
    """In the place of `_position_embeddings`: what is added to tokens."""
    return 0.0


class Still(nn.Module):
    """In the place of a rotation: cosines of 1, sines of 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_ones(1, 1, self.head_dim), x.new_zeros(1, 1, self.head_dim)


class EquippedGemmaPatchEmbed(Equipped, *((Gemma4PatchEmbed,) if TYPE_CHECKING else ())):
    """Tells where the patches are that it makes."""

    place: Place

    def forward(self, x: Any, patch_coord: Tensor | None = None, patch_valid: Tensor | None = None) -> Any:
        out = super().forward(x, patch_coord, patch_valid)
        if isinstance(x, Tensor) and x.ndim == 4 and patch_coord is None:
            (height, width), (down, right) = x.shape[-2:], self.patch_size
            self.place.grid = Grid(height // down, width // right)
        else:
            self.place.grid = cast(Any, Rows.of(out[1].flip(-1), 0))
        return out


HOSTS: Hosts = {
    Qwen3VitEncoder: rotating,
    Qwen3VitClassifier: rotating,
    DeepseekVitEncoder: rotating,
    DeepseekVitClassifier: rotating,
    Gemma4VitEncoder: gemma,
    Gemma4VitClassifier: gemma,
}
