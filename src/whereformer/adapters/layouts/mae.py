"""MAE (He et al. 2022): facebookresearch/mae, as pre-trained; fine-tuned ones have timm's names."""

from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Drop

LAYOUT = Layout(
    name="mae",
    source="facebookresearch/mae",
    marks=("decoder_embed.weight", "decoder_blocks.{n}.attn.qkv.weight", "pos_embed"),
    rules=(
        Drop("decoder_{rest}", "for the pre-training alone"),
        Drop("mask_token", "for the pre-training alone"),
    ),
    modules=("vision_transformer",),
    encoding=lambda entries: said(learned(entries)),
    resize="mae",
)
