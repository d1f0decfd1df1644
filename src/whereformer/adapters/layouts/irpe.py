"""iRPE (Wu et al. 2021): microsoft/Cream, DeiT and DETR."""

import re

from whereformer.adapters.files import Entries
from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Drop, Rule, joined, split

RELEASED = {49: ("product", 1.9), 81: ("product", 2.0), 121: ("product", 2.5), 169: ("product", 3.0)}
RELEASED |= {133: ("quantization", 33.0)}
"""Buckets without that of the prefix, and the released method and ratio that make them."""

TABLE = re.compile(r".*\.rpe_(?P<side>[qkv])\.(?P<cross>rp_rows\.|rp_cols\.)?lookup_table_(?P<kind>weight|bias)")


def irpe(entries: Entries) -> str:
    """The text of the encoding, from the names and shapes of its tables.

    Tables do not tell method and ratio, only how many buckets there are: the released ones are assumed.
    """
    tables = [(match, entries[name].shape) for name in entries if (match := TABLE.fullmatch(name))]
    on = "".join(side for side in "qkv" if any(match["side"] == side for match, _ in tables))
    match, shape = tables[0]
    bias = match["kind"] == "bias"
    buckets = shape[-2] if match["side"] == "v" and not bias else shape[-1]
    buckets -= 1 if "cls_token" in entries else 0
    method, ratio = RELEASED.get(buckets, ("euclidean", buckets // 2 / 2))
    if match["cross"]:
        method, ratio = "cross", buckets // 2 / 2
    options = [f"ratio={ratio:g}"] * (ratio != 1.9) + [f"method={method!r}"] * (method != "product")
    options += ["mode='bias'"] * bias + ["shared=False"] * (shape[0] > 1) + [f"on={on!r}"] * (on != "k")
    return f"irpe({', '.join(options)})" if options else "irpe"


DEIT = Layout(
    name="irpe-deit",
    source="microsoft/Cream, iRPE, DeiT-with-iRPE",
    marks=(
        tuple(
            f"blocks.{{n}}.attn.rpe_{side}.{part}lookup_table_{kind}"
            for side in "qkv"
            for part in ("", "rp_rows.")
            for kind in ("weight", "bias")
        ),
    ),
    modules=("deit", "vision_transformer"),
    encoding=lambda entries: said(learned(entries), irpe(entries)),
    resize="deit",
    note="Tables tell how many buckets there are, not the ratio: one from 1.5 to 2 makes 49, 1.9 was released.",
)

_ATTENTION = {
    "encoder.layers.{n}.self_attn": "encoder.layers.{n}.self_attn",
    "decoder.layers.{n}.self_attn": "decoder.layers.{n}.self_attn",
    "decoder.layers.{n}.multihead_attn": "decoder.layers.{n}.encoder_attn",
}
_NAMES = {
    "transformer.{rest}coder.layers.{n}.linear{m}.": "model.{rest}coder.layers.{n}.mlp.fc{m}.",
    "transformer.{rest}coder.layers.{n}.norm1.": "model.{rest}coder.layers.{n}.self_attn_layer_norm.",
    "transformer.encoder.layers.{n}.norm2.": "model.encoder.layers.{n}.final_layer_norm.",
    "transformer.decoder.layers.{n}.norm2.": "model.decoder.layers.{n}.encoder_attn_layer_norm.",
    "transformer.decoder.layers.{n}.norm3.": "model.decoder.layers.{n}.final_layer_norm.",
    "transformer.decoder.norm.": "model.decoder.layernorm.",
    "query_embed.": "model.query_position_embeddings.",
    "input_proj.": "model.input_projection.",
    "class_embed.": "class_labels_classifier.",
    "bbox_embed.layers.{n}.": "bbox_predictor.layers.{n}.",
}

DETR = Layout(
    name="irpe-detr",
    source="microsoft/Cream, iRPE, DETR-with-iRPE; facebookresearch/detr",
    marks=("transformer.encoder.layers.{n}.self_attn.in_proj_weight", "query_embed.weight"),
    rules=(
        *(
            Rule(
                f"transformer.{theirs}.in_proj_{kind}",
                tuple(f"model.{ours}.{side}_proj.{kind}" for side in "qkv"),
                there=split(3),
                back=joined,
            )
            for theirs, ours in _ATTENTION.items()
            for kind in ("weight", "bias")
        ),
        *(
            Rule(f"transformer.{theirs}.out_proj.{kind}", f"model.{ours}.o_proj.{kind}")
            for theirs, ours in _ATTENTION.items()
            for kind in ("weight", "bias")
        ),
        Rule(
            "transformer.encoder.layers.{n}.self_attn.rpe_{rest}", "model.encoder.layers.{n}.self_attn.rpe_{rest}"
        ),
        *(Rule(theirs + kind, ours + kind) for theirs, ours in _NAMES.items() for kind in ("weight", "bias")),
        Rule("backbone.1.row_embed.weight", "model.position_embedding.row_embeddings.weight"),
        Rule("backbone.1.col_embed.weight", "model.position_embedding.column_embeddings.weight"),
        Rule("backbone.0.body.{rest}", "model.backbone.model.{rest}"),
        Drop("backbone.0.body.fc.{rest}", "the classifier of the backbone"),
    ),
    encoding=lambda entries: irpe(entries) if any(map(TABLE.fullmatch, entries)) else "none",
    note="The target is transformers' DetrForObjectDetection; its sinusoids are not in the file.",
)
