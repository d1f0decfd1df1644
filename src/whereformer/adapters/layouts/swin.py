"""Swin and Swin V2 (Liu et al. 2021, 2022): microsoft/Swin-Transformer."""

from whereformer.adapters.layouts.layout import Layout
from whereformer.adapters.layouts.rules import Rule

_RULES = (
    Rule("layers.{n}.downsample.{rest}", "layers.{n+1}.downsample.{rest}"),  # at the end of a stage, or the start
    Rule("head.{rest}", "head.fc.{rest}"),
)

SWIN = Layout(
    name="swin",
    source="microsoft/Swin-Transformer",
    marks=("layers.0.downsample.reduction.weight", "layers.{n}.blocks.{m}.attn.relative_position_bias_table"),
    without=("layers.{n}.blocks.{m}.attn.rope_freqs",),
    rules=_RULES,
    modules=("swin_transformer",),
    encoding=lambda entries: "swin",
    resize="bicubic",
)

SWIN_V2 = Layout(
    name="swinv2",
    source="microsoft/Swin-Transformer, swin_transformer_v2.py",
    marks=("layers.0.downsample.reduction.weight", "layers.{n}.blocks.{m}.attn.cpb_mlp.0.weight"),
    rules=_RULES,
    modules=("swin_transformer_v2",),
    encoding=lambda entries: "log_cpb",
    note="The window is not in the weights, unless the file kept its derived buffers.",
)
