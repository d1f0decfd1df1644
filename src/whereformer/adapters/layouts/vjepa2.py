"""V-JEPA 2 (Assran et al. 2025): facebookresearch/vjepa2, and transformers' names for it."""

from whereformer.adapters.layouts.layout import Layout
from whereformer.adapters.layouts.rules import Drop, Rule, joined, split

_NOTE = "The weights were trained with pairing='repeated', which is no rotation."

LAYOUT = Layout(
    name="vjepa2",
    source="facebookresearch/vjepa2",
    marks=("patch_embed.proj.weight", "blocks.{n}.attn.qkv.weight"),
    without=("cls_token", "blocks.{n}.attn.q_bias"),
    when=lambda entries: len(entries["patch_embed.proj.weight"].shape) == 5,
    rules=(Drop("pos_embed", "not used beside rotations"),),
    modules=("vision_transformer",),
    encoding=lambda entries: "vjepa2(pairing='repeated')",
    note=f"{_NOTE} V-JEPA 1 has the same names, and uses its pos_embed, which is dropped.",
)

_NAMES = {
    "embeddings.patch_embeddings.proj.": "patch_embed.proj.",
    "layer.{n}.norm{m}.": "blocks.{n}.norm{m}.",
    "layer.{n}.attention.proj.": "blocks.{n}.attn.proj.",
    "layer.{n}.mlp.fc{m}.": "blocks.{n}.mlp.fc{m}.",
    "layernorm.": "norm.",
}

TRANSFORMERS = Layout(
    name="vjepa2-transformers",
    source="transformers, VJEPA2Model",
    marks=("encoder.embeddings.patch_embeddings.proj.weight", "encoder.layer.{n}.attention.query.weight"),
    rules=(
        *(
            Rule(
                tuple(f"encoder.layer.{{n}}.attention.{side}.{kind}" for side in ("query", "key", "value")),
                f"blocks.{{n}}.attn.qkv.{kind}",
                there=joined,
                back=split(3),
            )
            for kind in ("weight", "bias")
        ),
        *(Rule(f"encoder.{theirs}{{rest}}", f"{ours}{{rest}}") for theirs, ours in _NAMES.items()),
        Drop("predictor.{rest}", "the encoder alone is a vision transformer"),
    ),
    when=lambda entries: len(entries["encoder.embeddings.patch_embeddings.proj.weight"].shape) == 5,
    modules=("vision_transformer",),
    encoding=lambda entries: "vjepa2(pairing='repeated')",
    note=_NOTE,
)
