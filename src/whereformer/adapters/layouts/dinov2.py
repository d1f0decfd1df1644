"""DINOv2 (Oquab et al. 2023; with registers Darcet et al. 2024): facebookresearch/dinov2."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from whereformer.adapters.files import Entries
from whereformer.adapters.layouts.layout import Layout, has, learned, said
from whereformer.adapters.layouts.rules import Drop, Rule, Shape, under


def into_the_token(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """The class token with its row of the table added, and the table without that row."""
    token, table = tensors
    return [token + table[:, :1], table[:, 1:]]


def out_of_the_token(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """A row of zeros for the class token: the sum is the same."""
    token, table = tensors
    return [token, torch.cat([torch.zeros_like(table[:, :1]), table], 1)]


def gated(entries: Entries) -> bool:
    """Whether the first layer of a block's MLP makes gates too (SwiGLU, in the giant)."""
    first, second = (entries.get(f"blocks.0.mlp.fc{n}.weight") for n in (1, 2))
    return first is not None and second is not None and first.shape[0] == 2 * second.shape[1]


_CHUNKS = ("blocks.{n}", "blocks.{c}.{n}")  # training with FSDP puts blocks into chunks
_RULES = (
    Rule(
        ("cls_token", "pos_embed"),
        ("cls_token", "pos_embed"),
        there=into_the_token,
        back=out_of_the_token,
        when=lambda entries: has(entries, "register_tokens", "backbone.register_tokens"),
        back_when=lambda entries: "reg_token" in entries,
    ),
    Rule("register_tokens", "reg_token"),
    *(
        Rule(f"{block}.mlp.{theirs}.{{rest}}", f"blocks.{{n}}.mlp.{timm}.{{rest}}", back_when=gated)
        for block in _CHUNKS
        for theirs, timm in (("w12", "fc1"), ("w3", "fc2"))
    ),
    Rule("blocks.{c}.{n}.{rest}", "blocks.{n}.{rest}"),
    Drop("mask_token", "for the pre-training alone"),
)

LAYOUT = Layout(
    name="dinov2",
    source="facebookresearch/dinov2",
    marks=("mask_token", "pos_embed", ("blocks.{n}.ls1.gamma", "blocks.{c}.{n}.ls1.gamma")),
    without=("decoder_embed.weight",),
    rules=_RULES,
    modules=("vision_transformer",),
    encoding=lambda entries: said(learned(entries, ["antialias=False"])),
    resize="dinov2",
)

WITH_REGISTERS = replace(LAYOUT, name="dinov2-reg", marks=(*LAYOUT.marks, "register_tokens"), resize="dinov2-reg")

TEACHER = Layout(
    name="dinov2-training",
    source="facebookresearch/dinov2, a file of its training",
    marks=("backbone.mask_token", "backbone.pos_embed", "dino_head.{rest}"),
    rules=(
        *under("backbone.", _RULES),
        Rule("backbone.{rest}", "{rest}"),
        Drop("dino_head.{rest}", "for the pre-training alone"),
        Drop("ibot_head.{rest}", "for the pre-training alone"),
    ),
    modules=("vision_transformer",),
    encoding=lambda entries: said(learned(entries, ["antialias=False"])),
    resize="dinov2",
)
