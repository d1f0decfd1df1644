"""torch's nn.MultiheadAttention, alone or in the layers of nn.TransformerEncoder."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, attend, held
from whereformer.adapters.find import GridHosts
from whereformer.adapters.host import TOKENS, Block, Host, Layout, Own, SequenceFirst, Stage
from whereformer.attention import attention_weights
from whereformer.errors import InputError
from whereformer.grid import Grid


def attention(module: nn.MultiheadAttention, grid: Grid) -> Host:
    return Host([Stage(module.embed_dim, module.num_heads, grid, [Block(module, [module])], _layout(module))])


def layer(module: nn.TransformerEncoderLayer, grid: Grid) -> Host:
    return _stack([module], grid)


def encoder(module: nn.TransformerEncoder, grid: Grid) -> Host:
    return _stack(list(module.layers), grid, [Own(module, "use_nested_tensor", False)])


def _stack(layers: list[Any], grid: Grid, switches: Sequence[Own] = ()) -> Host:
    first = layers[0].self_attn
    blocks = [Block(layer, [layer.self_attn]) for layer in layers]
    return Host([Stage(first.embed_dim, first.num_heads, grid, blocks, _layout(first))], switches=switches)


def _layout(module: nn.MultiheadAttention) -> Layout:
    if module.bias_k is not None or module.add_zero_attn:
        raise InputError(
            "equip: a MultiheadAttention with add_bias_kv or add_zero_attn has keys that are on no grid, so that"
            " encodings cannot say where they are"
        )
    return TOKENS if module.batch_first else SequenceFirst()


class EquippedMultiheadAttention(EquippedAttention, *((nn.MultiheadAttention,) if TYPE_CHECKING else ())):
    """Its own projections around our attention. Masks are torch's: True forbids."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """No, or the layers around it would compute attention in one native call, without this module."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        mask = _mask(attn_mask, key_padding_mask, q, k)
        out = attend(self, q, k, v, mask, self.dropout if self.training else 0.0, is_causal and mask is None)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        weights = self._weights(q, k, mask, average_attn_weights) if need_weights else None
        if batched:
            return out, weights
        return out.squeeze(0 if self.batch_first else 1), None if weights is None else weights[0]

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        """q, k and v: [batch, heads, tokens, head_dim]."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected]

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, average: bool) -> Tensor:
        """After the softmax, before dropout."""
        queries, keys = self.grids(self, self.place.grid)
        weights = attention_weights(q, k, queries, held(self), keys=keys, mask=mask)
        return weights.mean(1) if average else weights


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both in one, as attention takes it: True allows, or floats to add."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.ndim < 3 else attn_mask.unflatten(0, (q.shape[0], -1)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        forbidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~forbidden
    zero = q.new_zeros(())
    added = [zero.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask for mask in masks]
    return sum(added[1:], added[0]).to(q.dtype)


HOSTS: GridHosts = {
    nn.MultiheadAttention: attention,
    nn.TransformerEncoderLayer: layer,
    nn.TransformerEncoder: encoder,
}
"""They do not know on which grid they are."""
