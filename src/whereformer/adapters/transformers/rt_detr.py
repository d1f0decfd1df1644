"""The encoder of RT-DETR: attention on the smallest of its feature maps."""

from typing import Any

from transformers import RTDetrModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Channels, Host, Own, Stage
from whereformer.adapters.transformers.dispatch import dispatched
from whereformer.adapters.transformers.towers import pair
from whereformer.grid import Grid

HOME = 640
"""The side of the images that it was published for, in pixels: its config names none."""


def rt_detr(model: RTDetrModel) -> Host:
    """What attends within a feature map is a block; encodings of tokens come before it."""
    config, encoder = model.config, model.encoder
    dim, heads = config.encoder_hidden_dim, config.encoder_attention_heads
    height, width = pair(config.anchor_image_size or config.eval_size or HOME)
    stages = []
    for layer, number in zip(encoder.aifi, config.encode_proj_layers, strict=True):
        stride = config.feat_strides[number]
        parts: Any = layer.layers
        block = Block(layer, [dispatched(part.self_attn, dim, heads) for part in parts])
        stages.append(Stage(dim, heads, Grid(height // stride, width // stride), [block], Channels()))
    return Host(stages, own=[Own(layer, "position_embedding", no_positions) for layer in encoder.aifi])


def no_positions(**where: Any) -> None:
    """In the place of what computes what to add to queries and keys."""


TOWERS: Hosts = {RTDetrModel: rt_detr}
