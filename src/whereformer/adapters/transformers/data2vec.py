"""Data2Vec's vision model: a BEiT whose attention is written out."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Data2VecVisionModel
from transformers.models.data2vec.modeling_data2vec_vision import Data2VecVisionSelfAttention

from whereformer.adapters.behaviours import EquippedAttention, attend, held
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Host, Own
from whereformer.adapters.transformers.beit import bias_from, with_class_token
from whereformer.attention import attention_weights


def data2vec(model: Data2VecVisionModel) -> Host:
    dim, heads = model.config.hidden_size, model.config.num_attention_heads
    encoder: Any = model.encoder
    shared = encoder.relative_position_bias if encoder.has_relative_position_bias else None
    found, own = [], _bias_of(encoder)
    for layer in encoder.layer:
        attention = layer.attention.attention
        mine = attention.relative_position_bias if attention.has_relative_position_bias else None
        found.append(Attention(attention, dim, heads, start=bias_from(shared or mine), behaviour=EquippedData2Vec))
        own += _bias_of(attention)
    return with_class_token(model, encoder.layer, found, own)


def _bias_of(module: Any) -> list[Own]:
    if not module.has_relative_position_bias:
        return []
    return [
        Own(module, "relative_position_bias"),
        Own(module, "has_relative_position_bias", False, counts=False),
    ]


class EquippedData2Vec(EquippedAttention, *((Data2VecVisionSelfAttention,) if TYPE_CHECKING else ())):
    """Its own projections and biases around our attention."""

    def forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        heads = (self.num_attention_heads, self.attention_head_size)
        q, k, v = (
            project(hidden_states).unflatten(-1, heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        bias = relative_position_bias
        if self.has_relative_position_bias and resolution is not None:
            window = (resolution[0] // self.config.patch_size, resolution[1] // self.config.patch_size)
            own = self.relative_position_bias(window, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
            bias = own if bias is None else own + bias
        out = attend(self, q, k, v, bias, self.dropout.p if self.training else 0.0)
        weights = None
        if output_attentions:
            weights = attention_weights(q, k, self.place.grid, held(self), mask=bias)
        return out.transpose(1, 2).flatten(2), weights


TOWERS: Hosts = {Data2VecVisionModel: data2vec}
