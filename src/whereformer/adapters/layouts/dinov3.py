"""DINOv3 (Siméoni et al. 2025): facebookresearch/dinov3."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whereformer.adapters.files import Entries
from whereformer.adapters.layouts.layout import Layout
from whereformer.adapters.layouts.rules import Drop, Rule, Shape


def without_keys(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """The bias of queries and that of values: the code masks that of keys."""
    q, _, v = tensors[0].chunk(3)
    return [q, v]


def with_keys(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    q, v = tensors
    return [torch.cat([q, torch.zeros_like(q), v])]


def gated(entries: Entries) -> bool:
    """Whether a block's MLP has gates (SwiGLU)."""
    return "blocks.0.mlp.fc1_g.weight" in entries


LAYOUT = Layout(
    name="dinov3",
    source="facebookresearch/dinov3",
    marks=("storage_tokens", "blocks.{n}.ls{m}.gamma"),
    rules=(
        Rule("storage_tokens", "reg_token"),
        Rule("blocks.{n}.ls{m}.gamma", "blocks.{n}.gamma_{m}"),
        Rule("blocks.{n}.mlp.w1.{rest}", "blocks.{n}.mlp.fc1_g.{rest}"),
        Rule("blocks.{n}.mlp.w2.{rest}", "blocks.{n}.mlp.fc1_x.{rest}"),
        Rule("blocks.{n}.mlp.w3.{rest}", "blocks.{n}.mlp.fc2.{rest}", back_when=gated),
        Rule(
            "blocks.{n}.attn.qkv.bias",
            ("blocks.{n}.attn.q_bias", "blocks.{n}.attn.v_bias"),
            there=without_keys,
            back=with_keys,
        ),
        Drop("mask_token", "for the pre-training alone"),
        Drop("local_cls_norm.{rest}", "for the pre-training alone"),
    ),
    modules=("eva",),
    encoding=lambda entries: "dinov3",
)
