"""ViT, DeiT, DINOv2 and DINOv2 with registers."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeiTModel,
    Dinov2Backbone,
    Dinov2Model,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersModel,
    ViTModel,
)

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own
from whereformer.adapters.starts import from_table
from whereformer.adapters.transformers.dispatch import EquippedLayer, dispatched
from whereformer.adapters.transformers.towers import home, nothing, plain


def vit(model: ViTModel) -> Host:
    return _host(model, model.layers, 1, model.embeddings.position_embeddings)


def deit(model: DeiTModel) -> Host:
    return _host(model, model.layers, 2, model.embeddings.position_embeddings)


def dinov2(model: Dinov2Model | Dinov2Backbone) -> Host:
    return _host(model, model.encoder.layer, 1, model.embeddings.position_embeddings)


def dinov2_with_registers(model: Dinov2WithRegistersModel | Dinov2WithRegistersBackbone) -> Host:
    """Registers come behind the class token, and have no rows of their own."""
    rows, registers = model.embeddings.position_embeddings, model.config.num_register_tokens
    zeros = torch.zeros_like(rows[:, :1]).expand(-1, registers, -1)
    rows = torch.cat([rows[:, :1], zeros, rows[:, 1:]], 1)
    return _host(model, model.encoder.layer, 1 + registers, rows, equal="learned")


def _host(model: Any, layers: Any, prefix: int, rows: Tensor, equal: str = "learned(antialias=False)") -> Host:
    config, embeddings = model.config, model.embeddings
    blocks = []
    for number, layer in enumerate(layers):
        attention = layer.attention
        heads = attention.num_attention_heads
        found = dispatched(attention, heads * attention.head_dim, heads)
        blocks.append(Block(layer, [found], None if number else from_table(rows[0]), EquippedLayer))
    own = [Own(embeddings, "position_embeddings", 0.0)]
    own += [Own(embeddings, "interpolate_pos_encoding", nothing, counts=False)]
    stage = (config.hidden_size, config.num_attention_heads, home(config, prefix))
    return plain(embeddings.patch_embeddings, blocks, stage, own, first=embeddings.dropout, equal=equal)


TOWERS: Hosts = {
    ViTModel: vit,
    DeiTModel: deit,
    Dinov2Model: dinov2,
    Dinov2Backbone: dinov2,
    Dinov2WithRegistersModel: dinov2_with_registers,
    Dinov2WithRegistersBackbone: dinov2_with_registers,
}
