"""What torch's scaled_dot_product_attention can take: rotations, extra features, one mask."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.backends.call import Call
from whereformer.forms import AddedValues, AxisBias, Bias, Forms, LowRankBias
from whereformer.grid import Grid
from whereformer.mask import Mask


def cannot(forms: Forms, call: Call | None = None) -> str:
    """Why these forms, or this call of them, cannot be served, or "" if they can."""
    for term in forms.values:
        if not isinstance(term, AddedValues):
            return f"{type(term).__name__} needs the attention weights, which the fused kernel does not give"
    return ""


def outrun(forms: Forms, call: Call) -> str:
    """Why "auto" leaves to the next backend what this one could serve, or ""."""
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, forms: Forms, mask: Mask | None, dropout: float) -> Tensor:
    """As `whereformer.attention.reference`.

    A bias of low rank, left · right, rides along as extra features of q and k, so that nothing of size
    queries x keys is made; all other biases are added up into one mask.
    """
    head_dim = q.shape[-1]
    scale = head_dim**-0.5  # of all features, so that others are divided by it
    q, k = forms.turn(q, k)
    features, biases = split(forms.biases, room=head_dim)
    if features:
        q = torch.cat([q, *((f.left / scale).to(q.dtype).expand(*q.shape[:-1], -1) for f in features)], -1)
        k = torch.cat([k, *(f.right.to(k.dtype).expand(*k.shape[:-1], -1) for f in features)], -1)
        v = F.pad(v, (0, q.shape[-1] - head_dim))
    dense = [bias.dense().to(q.dtype) for bias in biases]
    if mask is not None:
        dense.append(mask.bias(q.dtype))
    added = torch.atleast_2d(sum(dense[1:], start=dense[0])) if dense else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, scale=scale)
    out = out[..., :head_dim]
    if mask is not None:
        out = out.masked_fill(mask.idle, 0)
    for term in forms.values:
        assert isinstance(term, AddedValues)
        out = out + term.term.to(out.dtype)
    return out


def split(biases: Sequence[Bias], room: int) -> tuple[list[LowRankBias], list[Bias]]:
    """The biases that fit into `room` more features, as such, and the others."""
    features: list[LowRankBias] = []
    others: list[Bias] = []
    exporting = torch.compiler.is_exporting()  # comparing sizes would bind the exported program to some of them
    for bias in biases:
        if isinstance(bias, AxisBias) and not exporting and bias.keys.height + bias.keys.width <= room:
            bias = as_low_rank(bias)
        if isinstance(bias, LowRankBias) and bias.left.shape[-1] <= room:
            room -= bias.left.shape[-1]
            features.append(bias)
        else:
            others.append(bias)
    return features, others


def as_low_rank(bias: AxisBias) -> LowRankBias:
    """Of rank height + width: each key picks its row and its column."""
    axes = torch.broadcast_shapes(bias.rows.shape[:-1], bias.columns.shape[:-1])
    left = torch.cat([bias.rows.expand(*axes, -1), bias.columns.expand(*axes, -1)], -1)
    return LowRankBias(left, _one_hot(bias.keys, bias.rows))


def _one_hot(keys: Grid, like: Tensor) -> Tensor:
    """[1 or b, 1, keys.tokens, height + width]: ones at each patch's row and column; zeros for prefix tokens."""
    rows = torch.eye(keys.height, dtype=like.dtype, device=like.device)[:, None].expand(-1, keys.width, -1)
    columns = torch.eye(keys.width, dtype=like.dtype, device=like.device).expand(keys.height, -1, -1)
    ones = keys.pick(torch.cat([rows, columns], -1)[None])
    return F.pad(ones, (0, 0, keys.prefix, 0)).unsqueeze(1)
