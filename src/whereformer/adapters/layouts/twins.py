"""Twins, and PEG as in CPVT (Chu et al. 2021): Meituan-AutoML/Twins. The names are timm's."""

from whereformer.adapters.layouts.layout import Layout

LAYOUT = Layout(
    name="twins",
    source="Meituan-AutoML/Twins",
    marks=("pos_block.{n}.proj.0.weight", "patch_embeds.{n}.proj.weight"),
    modules=("twins",),
    encoding=lambda entries: "peg",
)
