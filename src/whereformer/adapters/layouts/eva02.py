"""EVA-02 (Fang et al. 2023): baaivision/EVA."""

from whereformer.adapters.files import Entries
from whereformer.adapters.layouts.layout import Layout, learned, said
from whereformer.adapters.layouts.rules import Drop, Rule


def _split(entries: Entries) -> bool:
    """Whether queries and values have projections of their own (base and large), and not one with the keys."""
    return "blocks.0.attn.q_proj.weight" in entries


LAYOUT = Layout(
    name="eva02",
    source="baaivision/EVA, EVA-02",
    marks=("blocks.{n}.mlp.w{m}.weight", "pos_embed"),
    without=("storage_tokens", "blocks.{n}.ls1.gamma", "blocks.{n}.ffn.{rest}"),
    rules=(
        Rule("blocks.{n}.mlp.w12.{rest}", "blocks.{n}.mlp.fc1.{rest}"),
        Rule("blocks.{n}.mlp.w1.{rest}", "blocks.{n}.mlp.fc1_g.{rest}"),
        Rule("blocks.{n}.mlp.w2.{rest}", "blocks.{n}.mlp.fc1_x.{rest}"),
        Rule("blocks.{n}.mlp.w3.{rest}", "blocks.{n}.mlp.fc2.{rest}"),
        Rule("blocks.{n}.mlp.ffn_ln.{rest}", "blocks.{n}.mlp.norm.{rest}"),
        Rule("blocks.{n}.attn.inner_attn_ln.{rest}", "blocks.{n}.attn.norm.{rest}"),
        Rule("blocks.{n}.attn.q_bias", "blocks.{n}.attn.q_proj.bias", when=_split),
        Rule("blocks.{n}.attn.v_bias", "blocks.{n}.attn.v_proj.bias", when=_split),
        Rule(  # as timm starts from a pre-trained one
            "norm.{rest}",
            "fc_norm.{rest}",
            when=lambda entries: "mask_token" in entries,
            back_when=lambda entries: False,
        ),
        Drop("mask_token", "for the pre-training alone"),
        Drop("lm_head.{rest}", "for the pre-training alone"),
    ),
    modules=("eva",),
    encoding=lambda entries: said(learned(entries), "eva02"),
)
