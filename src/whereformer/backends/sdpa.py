"""What torch's scaled_dot_product_attention can take: rotations, extra features, one mask."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.backends.call import Attend, Call, forward_mode
from whereformer.forms import AddedValues, AxisBias, Bias, BucketBias, Forms, LowRankBias, picked
from whereformer.grid import Grid, Points
from whereformer.index import Separable
from whereformer.mask import Mask


def cannot(forms: Forms, call: Call | None = None) -> str:
    """Why these forms, or this call of them, cannot be served, or "" if they can."""
    for term in forms.values:
        if not isinstance(term, AddedValues):
            return f"{type(term).__name__} needs the attention weights, which the fused kernel does not give"
    return ""


def ready(forms: Forms, call: Call) -> Attend | str:
    """What serves these forms and this call, or why they cannot be served."""
    return cannot(forms, call) or attend


def outrun(forms: Forms, call: Call) -> str:
    """Why "auto" leaves to the next backend what this one could serve, or ""."""
    return "derivatives in forward mode" if forward_mode() else ""


def attend(q: Tensor, k: Tensor, v: Tensor, forms: Forms, mask: Mask | None, dropout: float) -> Tensor:
    """As `whereformer.attention.reference`.

    A bias of low rank, left · right, rides along as extra features of q and k, so that nothing of size
    queries x keys is made; all other biases are added up into one mask. What each query says of rows, or of
    columns, of keys is of low rank.
    """
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    q, k = forms.turn(q, k)
    features, biases = split(forms.biases, room=head_dim)
    if features:
        q, k = with_features(q, k, features)
    if q.shape[-1] != value_dim:  # torch's fused kernels take one width
        width = max(q.shape[-1], value_dim)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    dense = [bias.dense().to(q.dtype) for bias in biases]
    if mask is not None:
        dense.append(mask.bias(q.dtype))
    added = torch.atleast_2d(sum(dense[1:], start=dense[0])) if dense else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, scale=head_dim**-0.5)
    out = out[..., :value_dim]
    if mask is not None:
        out = out.masked_fill(mask.idle, 0)
    for term in forms.values:
        assert isinstance(term, AddedValues)
        out = out + term.term.to(out.dtype)
    return out


def with_features(q: Tensor, k: Tensor, biases: Sequence[LowRankBias]) -> tuple[Tensor, Tensor]:
    """q and k with the features of biases of low rank, which come unscaled out of logits that are scaled."""
    scale = q.shape[-1] ** -0.5
    q = torch.cat([q, *((bias.left / scale).to(q.dtype).expand(*q.shape[:-1], -1) for bias in biases)], -1)
    k = torch.cat([k, *(bias.right.to(k.dtype).expand(*k.shape[:-1], -1) for bias in biases)], -1)
    return q, k


def split(biases: Sequence[Bias], room: int) -> tuple[list[LowRankBias], list[Bias]]:
    """The biases that fit into `room` more features, as such, and the others."""
    features: list[LowRankBias] = []
    others: list[Bias] = []
    exporting = torch.compiler.is_exporting()  # comparing sizes would bind the exported program to some of them
    for bias in _summed(biases):
        if not exporting:
            bias = _of_axes(bias, room) or bias
        if isinstance(bias, LowRankBias) and bias.left.shape[-1] <= room:
            room -= bias.left.shape[-1]
            features.append(bias)
        else:
            others.append(bias)
    return features, others


def _summed(biases: Sequence[Bias]) -> list[Bias]:
    """Scores that are read by the same buckets are added up, so that they are placed once."""
    found: list[Bias] = []
    for bias in biases:
        for n, other in enumerate(found):
            if isinstance(bias, BucketBias) and isinstance(other, BucketBias) and _read_alike(bias, other):
                bias = BucketBias(other.made() + bias.made(), bias.buckets, bias.side)
                found.pop(n)
                break
        found.append(bias)
    return found


def _read_alike(bias: BucketBias, other: BucketBias) -> bool:
    same = bias.buckets is other.buckets and bias.side == other.side
    return same and bias.scores.shape[-1] == other.scores.shape[-1]


def _of_axes(bias: Bias, room: int) -> LowRankBias | None:
    """A bias that depends on the rows and columns of patches one by one, if its rank is at most `room`."""
    if isinstance(bias, AxisBias) and bias.keys.height + bias.keys.width <= room:
        return as_low_rank(bias)
    if isinstance(bias, BucketBias) and bias.scores.shape[-2] != 1:  # else one mask for all images costs less
        return _of_axis(bias, room)
    return None


def as_low_rank(bias: AxisBias) -> LowRankBias:
    """Of rank height + width."""
    axes = torch.broadcast_shapes(bias.rows.shape[:-1], bias.columns.shape[:-1])
    left = torch.cat([bias.rows.expand(*axes, -1), bias.columns.expand(*axes, -1)], -1)
    return LowRankBias(left, torch.cat([_one_hot(bias.keys, axis, False, bias.rows) for axis in (0, 1)], -1))


def _of_axis(bias: BucketBias, room: int) -> LowRankBias | None:
    """One whose buckets are of rows, or of columns, alone."""
    mapping, here, there = bias.buckets.mapping, bias.buckets.queries, bias.buckets.keys
    if not isinstance(mapping, Separable) or (mapping.rows_index is None) == (mapping.columns_index is None):
        return None
    axis, place = (0, mapping.rows) if mapping.columns_index is None else (1, mapping.columns)
    size, prefix = there.size[axis], bool(there.prefix)
    between = isinstance(there, Points) and not there.whole
    if between or size + prefix > room:
        return None
    scores = bias.made()
    offsets = here.coords(scores.device)[..., axis, None] - torch.arange(size, device=scores.device)
    index = F.pad(place(offsets) - mapping.count, (0, prefix, here.prefix, 0)) + mapping.count
    read, marks = picked(scores, index), _one_hot(there, axis, prefix, scores)
    return LowRankBias(read, marks) if bias.side == "query" else LowRankBias(marks, read)


def _one_hot(grid: Grid, axis: int, prefix: bool, like: Tensor) -> Tensor:
    """[1 or b, 1, grid.tokens, height (or width) + prefix]: a one at each patch's row (or column).

    Prefix tokens have theirs in one more feature, or none.
    """
    n = grid.size[axis]
    lines = torch.eye(n, dtype=like.dtype, device=like.device)
    patches = grid.pick((lines[:, None] if axis == 0 else lines).expand(1, *grid.size, -1))
    ones = F.pad(patches, (0, prefix, grid.prefix, 0))
    ones[:, : grid.prefix, n:] = 1
    return ones.unsqueeze(1)
