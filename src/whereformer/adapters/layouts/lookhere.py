"""LookHere (Fuller et al. 2024): GreenCUBIC/lookhere."""

from whereformer.adapters.layouts.layout import Layout

LAYOUT = Layout(
    name="lookhere",
    source="GreenCUBIC/lookhere",
    marks=("blocks.{n}.ls{m}.gamma", "head.fc1.weight", "head.fc2.weight", "cls_token"),
    without=("pos_embed",),
    modules=("deit",),
    encoding=lambda entries: "lookhere",
    note="Fields of view are not in the weights: LH-90 is assumed. The head is a timm Mlp with tanh.",
)
