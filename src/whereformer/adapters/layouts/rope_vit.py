"""RoPE-ViT (Heo et al. 2024): naver-ai/rope-vit, on DeiT-III and on Swin, mixed and axial."""

from collections.abc import Sequence

from torch import Tensor

from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Rule, Shape, each
from whereformer.adapters.layouts.swin import SWIN

HEAD_DIM = 64
"""Features of a head in all released models: the names do not tell."""


def by_head(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """[2, blocks, heads · d/2] to [2, blocks, heads, d/2]."""
    shape = shapes[0]
    pairs = HEAD_DIM // 2 if shape is None else shape[-1]
    freqs = tensors[0]
    return [freqs.unflatten(-1, (-1, pairs)) if freqs.shape[-1] % pairs == 0 else freqs]


MIXED = Layout(
    name="rope-vit-mixed",
    source="naver-ai/rope-vit, models/vit_rope.py",
    marks=("freqs", "blocks.{n}.gamma_{m}"),
    rules=(Rule("freqs", "rope.freqs", there=by_head, back=each(lambda freqs: freqs.flatten(2))),),
    modules=("eva",),
    encoding=lambda entries: said(learned(entries), "rope_mixed"),
    hosts=("deit",),
    resize="deit",
)

AXIAL = Layout(
    name="rope-vit-axial",
    source="naver-ai/rope-vit, models/vit_rope.py",
    marks=("blocks.{n}.gamma_{m}", "cls_token", "blocks.{n}.attn.qkv.bias"),
    without=(
        "pos_embed",
        "freqs",
        "rope.freqs",
        "storage_tokens",
        "reg_token",
        "{rest}relative_position_bias_table",
    ),
    modules=("eva",),
    encoding=lambda entries: "rope_axial",
    hosts=("deit",),
    note="Frequencies follow from the names of the layout alone: θ = 100.",
)

SWIN_ROPE = Layout(
    name="rope-swin",
    source="naver-ai/rope-vit, models/swin_transformer_rope.py",
    marks=("layers.{n}.blocks.{m}.attn.rope_freqs", "layers.0.downsample.reduction.weight"),
    rules=SWIN.rules,
    modules=("swin_transformer",),
    encoding=lambda entries: "rope_mixed",
    note="Axial models keep their frequencies in the same place; rope_mixed with these is the same.",
)
