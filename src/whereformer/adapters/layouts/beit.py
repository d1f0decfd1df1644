"""BEiT (Bao et al. 2021): microsoft/unilm."""

from whereformer.adapters.layouts.layout import Layout
from whereformer.adapters.layouts.rules import Drop

LAYOUT = Layout(
    name="beit",
    source="microsoft/unilm, beit and beit2",
    marks=(
        "blocks.{n}.attn.q_bias",
        ("blocks.{n}.attn.relative_position_bias_table", "rel_pos_bias.relative_position_bias_table"),
    ),
    rules=(
        Drop("mask_token", "for the pre-training alone"),
        Drop("lm_head.{rest}", "for the pre-training alone"),
        Drop("cls_pt_layers.{rest}", "for the pre-training alone"),
    ),
    modules=("beit",),
    encoding=lambda entries: "beit",
    resize="geometric",
)
