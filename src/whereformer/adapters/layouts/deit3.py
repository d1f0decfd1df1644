"""DeiT-III (Touvron et al. 2022): facebookresearch/deit."""

from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Rule

LAYOUT = Layout(
    name="deit3",
    source="facebookresearch/deit, models_v2.py",
    marks=("blocks.{n}.gamma_{m}", "cls_token", "pos_embed", "blocks.{n}.attn.qkv.bias"),
    without=(
        *("freqs", "rope.freqs", "storage_tokens", "mask_token", "reg_token"),
        "{rest}relative_position_bias_table",
    ),
    rules=(Rule("blocks.{n}.gamma_{m}", "blocks.{n}.ls{m}.gamma"),),
    modules=("deit",),
    encoding=lambda entries: said(learned(entries)),
    note="RoPE-ViT's axial models with a position table look the same: those need rope_axial too.",
)
