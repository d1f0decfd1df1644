"""SAM (Kirillov et al. 2023): facebookresearch/segment-anything."""

from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Drop, Rule

LAYOUT = Layout(
    name="sam",
    source="facebookresearch/segment-anything",
    marks=("image_encoder.patch_embed.proj.weight", "image_encoder.blocks.{n}.attn.rel_pos_h"),
    rules=(
        Rule("image_encoder.blocks.{n}.mlp.lin{m}.{rest}", "blocks.{n}.mlp.fc{m}.{rest}"),
        Rule("image_encoder.{rest}", "{rest}"),
        Drop("prompt_encoder.{rest}", "timm has the image encoder alone"),
        Drop("mask_decoder.{rest}", "timm has the image encoder alone"),
        Drop("pixel_mean", "timm has the image encoder alone"),
        Drop("pixel_std", "timm has the image encoder alone"),
    ),
    modules=("vision_transformer_sam",),
    encoding=lambda entries: said(learned(entries), "decomposed"),
    resize="bilinear",
)
