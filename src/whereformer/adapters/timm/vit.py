"""timm's VisionTransformer and its distilled kind: ViT, DeiT, DeiT-III, CLIP, SigLIP and DINOv2 towers ..."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from timm.layers.attention import Attention
from timm.layers.diff_attention import DiffAttention
from timm.layers.patch_dropout import PatchDropout
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn

from whereformer.adapters import host
from whereformer.adapters.behaviours import (
    EquippedAttention,
    EquippedBlock,
    EquippedBlockThatAttends,
    EquippedModel,
    attend,
    held,
)
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Stage
from whereformer.adapters.starts import from_table
from whereformer.adapters.timm.parts import EquippedPatchDropout, attends, fused
from whereformer.attention import encode
from whereformer.errors import InputError
from whereformer.grid import Grid


def vit(model: VisionTransformer) -> Host:
    if type(model)._pos_embed not in (
        VisionTransformer._pos_embed,
        VisionTransformerDistilled._pos_embed,
        EquippedVisionTransformer._pos_embed,
    ):
        raise InputError(f"equip: {type(model).__name__} adds positions in a way of its own (_pos_embed)")
    if model.patch_embed.grid_size is None:
        raise InputError("equip: the model has no home grid; build it with an img_size")
    if not (model.dynamic_img_size or getattr(model.patch_embed, "strict_img_size", True)):
        raise InputError(
            "equip: the patch embedding takes any size without telling which (strict_img_size=False);"
            " build the model with dynamic_img_size=True"
        )

    start = None if model.pos_embed is None else from_table(model.pos_embed[0])
    attentions = [[_attention(m) for m in block.modules() if type(m) in KINDS] for block in model.blocks]
    heads = next((found[0].heads for found in attentions if found), None) or 1
    blocks = [
        Block(block, found, start if number == 0 else None, _behaviour(block, found))
        for number, (block, found) in enumerate(zip(model.blocks, attentions, strict=True))
    ]
    dropout = [(model.patch_drop, EquippedPatchDropout)] if isinstance(model.patch_drop, PatchDropout) else []
    return Host(
        [Stage(model.embed_dim, heads, home_grid(model), blocks)],
        own=[Own(model, "pos_embed")],
        swaps=dropout,
        behaviour=EquippedVisionTransformer,
        switches=fused(m.module for found in attentions for m in found),
        holds_first=True,
        equal="none" if model.pos_embed is None else "learned",
    )


KINDS = {
    Attention: ("rotations", "biases", "values"),
    ParallelScalingBlock: ("rotations", "biases", "values"),
    DiffAttention: ("rotations", "biases"),
    DiffParallelScalingBlock: ("rotations", "biases"),
}
"""The attentions that are known, exactly these, as a subclass may do something else; and what each takes.

The last two are differences of two attentions, with queries and keys of half the features of values: encodings
speak in both of them.
"""


def _behaviour(block: nn.Module, found: list[host.Attention]) -> type[EquippedBlock] | None:
    return EquippedBlockThatAttends if any(attention.module is block for attention in found) else None


def _attention(module: nn.Module) -> host.Attention:
    behaviour = EquippedVisionAttention if type(module) is Attention else None
    return attends(module, takes=KINDS[type(module)], behaviour=behaviour)


class EquippedVisionTransformer(EquippedModel, *((VisionTransformer,) if TYPE_CHECKING else ())):
    """Encodings of tokens before the first block; the grid for all layers."""

    encodings: nn.ModuleList

    def _pos_embed(self, x: Tensor) -> Tensor:
        self.place.grid = grid = _grid_of(self, x)
        if self.pos_embed is not None:
            x = super()._pos_embed(x)
        else:
            x = torch.cat([*_prefix_tokens(self, x.shape[0]), x.flatten(1, -2)], 1)
        x = encode(x, grid, held(self))
        return x if self.pos_embed is not None else self.pos_drop(x)

    @property
    def home_grid(self) -> Grid:
        return home_grid(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Each block computes itself again, on the grid it was computed on; timm's own way knows no grid."""
        super().set_grad_checkpointing(enable)
        self.grad_checkpointing = False
        for block in self.blocks:
            block.grad_checkpointing = enable  # pyright: ignore[reportAttributeAccessIssue]

    def group_matcher(self, coarse: bool = False) -> dict:
        groups = super().group_matcher(coarse)
        return {**groups, "stem": f"{groups['stem']}|encodings"}


class EquippedVisionAttention(EquippedAttention, *((Attention,) if TYPE_CHECKING else ())):
    """As the general one, written out: for the most common attention of all, compiled and checkpointed at once."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        dropout = self.attn_drop.p if self.training else 0.0
        out = attend(self, q, k, v, attn_mask, dropout, is_causal)
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


def home_grid(model: VisionTransformer) -> Grid:
    """Where tokens are at the size the model was built for."""
    return Grid(*model.patch_embed.grid_size, prefix=model.num_prefix_tokens)


def _grid_of(model: VisionTransformer, x: Tensor) -> Grid:
    """From the patch embedding's output: [batch, height, width, dim] (dynamic size) or [batch, patches, dim]."""
    if x.ndim == 3:
        return home_grid(model)
    return Grid(x.shape[1], x.shape[2], model.num_prefix_tokens)


def _prefix_tokens(model: VisionTransformer, batch: int) -> Iterator[Tensor]:
    for name in ("cls_token", "dist_token", "reg_token"):
        token = getattr(model, name, None)
        if token is not None:
            yield token.expand(batch, -1, -1)


HOSTS: Hosts = {VisionTransformer: vit}
