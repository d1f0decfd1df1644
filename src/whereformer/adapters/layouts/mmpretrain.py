"""mmpretrain, mmdet and mmseg (OpenMMLab): plain vision transformers, BEiT, Swin and Swin V2."""

from torch import Tensor

from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Drop, Rule, each, under

_HEADS = ("neck", "rpn_head", "roi_head", "bbox_head", "mask_head", "decode_head", "auxiliary_head")
_OTHER = (
    *(Drop(f"{part}.{{rest}}", "a part of the detector, or segmenter") for part in _HEADS),
    Drop("data_preprocessor.{rest}", "not weights"),
)


def bare(*rules: Rule | Drop) -> tuple[Rule | Drop, ...]:
    """With "backbone." before the names, and, in a file of the backbone alone, without."""
    return (*under("backbone.", rules), *rules)


_VIT = bare(
    Rule("patch_embed.projection.{rest}", "patch_embed.proj.{rest}"),
    Rule("layers.{n}.ln{m}.{rest}", "blocks.{n}.norm{m}.{rest}"),
    Rule("layers.{n}.attn.gamma1.weight", "blocks.{n}.ls1.gamma"),
    Rule("layers.{n}.ffn.gamma2.weight", "blocks.{n}.ls2.gamma"),
    Rule("layers.{n}.ffn.layers.0.0.{rest}", "blocks.{n}.mlp.fc1.{rest}"),
    Rule("layers.{n}.ffn.layers.1.{rest}", "blocks.{n}.mlp.fc2.{rest}"),
    Rule("layers.{n}.{rest}", "blocks.{n}.{rest}"),
    Rule("ln1.{rest}", "norm.{rest}"),
    Rule("ln2.{rest}", "fc_norm.{rest}"),
    Rule("pos_embed", "pos_embed"),
    Rule("cls_token", "cls_token"),
    Rule("dist_token", "dist_token"),
)
_FIRST_LAYER = ("layers.{n}.ln1.weight", "backbone.layers.{n}.ln1.weight")
_HEAD = (Rule("head.layers.head.{rest}", "head.{rest}"), Rule("head.fc.{rest}", "head.{rest}"))


VIT = Layout(
    name="mmpretrain",
    source="open-mmlab/mmpretrain, VisionTransformer",
    marks=(_FIRST_LAYER,),
    without=("{rest}q_bias",),
    rules=(*_VIT, *_HEAD, *_OTHER),
    modules=("vision_transformer", "deit"),
    encoding=lambda entries: said(learned(entries)),
    resize="bicubic",
)

BEIT = Layout(
    name="mmpretrain-beit",
    source="open-mmlab/mmpretrain, BEiTViT",
    marks=(_FIRST_LAYER, "{rest}.attn.q_bias"),
    rules=(
        *_VIT,
        *bare(
            Rule("rel_pos_bias.{rest}", "rel_pos_bias.{rest}"),
            Drop("mask_token", "for the pre-training alone"),
        ),
        *_HEAD,
        *_OTHER,
    ),
    modules=("beit",),
    encoding=lambda entries: "beit",
    resize="geometric",
)


def regrouped(features: Tensor) -> Tensor:
    """Four patches' features in one: from nn.Unfold's (feature, row, column) to (column, row, feature)."""
    return features.unflatten(-1, (-1, 2, 2)).transpose(-1, -3).flatten(-3)


def grouped(features: Tensor) -> Tensor:
    """The way back."""
    return features.unflatten(-1, (2, 2, -1)).transpose(-1, -3).flatten(-3)


def _swin(norm_of_four: bool) -> tuple[Rule | Drop, ...]:
    """Names of Swin; in V2 the norm comes after four patches have become one."""
    there, back = each(regrouped), each(grouped)
    norm = Rule("stages.{n}.downsample.norm.{rest}", "layers.{n+1}.downsample.norm.{rest}")
    if norm_of_four:
        norm = Rule(norm.theirs, norm.timm, there, back)
    return bare(
        Rule("patch_embed.projection.{rest}", "patch_embed.proj.{rest}"),
        Rule("patch_embed.norm.{rest}", "patch_embed.norm.{rest}"),
        Rule("stages.{n}.downsample.reduction.{rest}", "layers.{n+1}.downsample.reduction.{rest}", there, back),
        norm,
        Rule("stages.{n}.blocks.{m}.attn.w_msa.{rest}", "layers.{n}.blocks.{m}.attn.{rest}"),
        Rule("stages.{n}.blocks.{m}.ffn.layers.0.0.{rest}", "layers.{n}.blocks.{m}.mlp.fc1.{rest}"),
        Rule("stages.{n}.blocks.{m}.ffn.layers.1.{rest}", "layers.{n}.blocks.{m}.mlp.fc2.{rest}"),
        Rule("stages.{n}.{rest}", "layers.{n}.{rest}"),
        Rule("norm3.{rest}", "norm.{rest}"),
        Drop("norm{n}.{rest}", "of a stage's output, for a detector"),
    )


_BLOCK = ("{rest}stages.{n}.blocks.{m}.attn.w_msa.qkv.weight", "stages.{n}.blocks.{m}.attn.w_msa.qkv.weight")

SWIN = Layout(
    name="mmpretrain-swin",
    source="open-mmlab/mmpretrain, mmdet, mmseg, SwinTransformer",
    marks=(_BLOCK,),
    without=("{rest}.cpb_mlp.0.weight",),
    rules=(*_swin(True), Rule("head.fc.{rest}", "head.fc.{rest}"), *_OTHER),
    modules=("swin_transformer",),
    encoding=lambda entries: "swin",
    resize="bicubic",
)

SWIN_V2 = Layout(
    name="mmpretrain-swinv2",
    source="open-mmlab/mmpretrain, SwinTransformerV2",
    marks=(_BLOCK, "{rest}.cpb_mlp.0.weight"),
    rules=(*_swin(False), Rule("head.fc.{rest}", "head.fc.{rest}"), *_OTHER),
    modules=("swin_transformer_v2",),
    encoding=lambda entries: "log_cpb",
    note="The window is not in the weights, unless the file kept its derived buffers.",
)
