"""ViTDet (Li et al. 2022): facebookresearch/detectron2."""

from collections.abc import Sequence
from math import isqrt

from torch import Tensor

from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Drop, Rule, Shape, each

_DETECTOR = "a part of the detector"


def as_a_map(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """[1, (1 +) H · W, D] of a square grid, whose row of the class token is not used, to [1, H, W, D]."""
    rows = tensors[0].shape[1]
    prefix = next((p for p in (1, 0) if isqrt(rows - p) ** 2 == rows - p), None)
    if prefix is None:
        raise ValueError(f"{rows} rows are those of no square grid")
    side = isqrt(rows - prefix)
    return [tensors[0][:, prefix:].unflatten(1, (side, side))]


LAYOUT = Layout(
    name="detectron2",
    source="facebookresearch/detectron2, ViTDet",
    marks=("backbone.net.patch_embed.proj.weight", "backbone.net.blocks.{n}.attn.qkv.weight"),
    rules=(
        Rule("backbone.net.pos_embed", "pos_embed", there=as_a_map, back=each(lambda table: table.flatten(1, 2))),
        Rule("backbone.net.{rest}", "{rest}"),
        Drop("backbone.simfp_{rest}", _DETECTOR),
        Drop("proposal_generator.{rest}", _DETECTOR),
        Drop("roi_heads.{rest}", _DETECTOR),
        Drop("pixel_mean", _DETECTOR),
        Drop("pixel_std", _DETECTOR),
    ),
    modules=("vision_transformer_sam",),
    encoding=lambda entries: said(learned(entries), "decomposed"),
    resize="bicubic",
    note="The table is that of the pre-training; detectron2 stretches it bicubically. There is no neck.",
)
