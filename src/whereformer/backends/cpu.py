"""The compiled kernel on the CPU: forms become lookups in small tables, and nothing of queries x keys is made."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.backends import kernel, lookups
from whereformer.backends.call import Call, forward_mode
from whereformer.backends.lookups import Lookup
from whereformer.backends.sdpa import as_low_rank
from whereformer.forms import AddedValues, AxisBias, DenseBias, Forms, LowRankBias, Rotation, Turn
from whereformer.grid import Grid
from whereformer.mask import Mask

MOST_FEATURES = 256
"""Of a head, with those that biases of low rank ride on."""

MOST_LOOKUPS = 8
"""On the logits, and on the values."""


def cannot(forms: Forms, call: Call | None = None) -> str:
    """Why these forms, or this call of them, cannot be served, or "" if they can."""
    for form in (*forms.biases, *forms.values):
        if not isinstance(form, lookups.Form | LowRankBias | AddedValues) and not _is_row(form):
            return f"{type(form).__name__} is no lookup in a table"
    views = _views(forms)
    if not all(grid.regular for view in views for grid in view):
        return "lookups where patches do not fill their grid"
    if any(view != views[0] for view in views):
        return "lookups that see the same tokens on different grids"
    for what in (forms.biases, forms.values):
        if (count := sum(map(lookups.count, what))) > MOST_LOOKUPS:
            return f"{count} lookups, more than {MOST_LOOKUPS}"
    return "" if call is None else _cannot_now(forms, call)


def _cannot_now(forms: Forms, call: Call) -> str:
    q, k, v, mask, dropout = call
    if q.device.type != "cpu":
        return f"tensors on {q.device.type}"
    if (dtype := _dtype(q)) not in (torch.float32, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')}, where it computes in float32 and bfloat16"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    if forward_mode():
        return "derivatives in forward mode"
    if dropout:
        return "dropout"
    if mask is not None and mask.added is not None and mask.added.requires_grad and torch.is_grad_enabled():
        return "a mask that asks for a gradient"
    extra = 0
    if any(isinstance(bias, Feature) for bias in forms.biases):
        extra = sum(map(_rank, _plan(forms, q, k).features))
    if (features := max(q.shape[-1] + extra, v.shape[-1])) > MOST_FEATURES:
        return f"{features} features a head, more than {MOST_FEATURES}"
    return kernel.missing()


def outrun(forms: Forms, call: Call) -> str:
    """Why "auto" leaves to the next backend what this one could serve, or ""."""
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, forms: Forms, mask: Mask | None, dropout: float) -> Tensor:
    """As `whereformer.attention.reference`.

    Rotations by fixed angles are left to the kernel, others come before it. A bias of low rank rides along as
    extra features of q and k.
    """
    head_dim, dtype, shape = q.shape[-1], _dtype(q), (*q.shape[:-1], k.shape[-2])
    exact = torch.promote_types(dtype, torch.float32)
    plan, waves = _plan(forms, q, k), _waves(forms, exact)
    found = [one for form in plan.looked_up for one in lookups.of(form, q, k, exact, turned=waves is None)]
    turned_q, turned_k = forms.turn(q, k) if waves is None else (q, k)
    q, k, v = turned_q.to(dtype), turned_k.to(dtype), v.to(dtype)
    if plan.features:
        low = [_as_low_rank(bias) for bias in plan.features]
        q = torch.cat([q, *((f.left * head_dim**0.5).to(dtype).expand(*q.shape[:-1], -1) for f in low)], -1)
        k = torch.cat([k, *(f.right.to(dtype).expand(*k.shape[:-1], -1) for f in low)], -1)
        found = [_widened(one, q.shape[-1] - head_dim) for one in found]
    arguments = kernel.Arguments(
        *(q, k, v, plan.queries, plan.keys, head_dim, _is_half(forms), waves or []),
        lookups=[number for one in found for number in one.fields],
        maps=[one.at for one in found],
        entries=[one.entries for one in found],
        allowed=None if mask is None else mask.allowed.expand(shape),
        added=None if mask is None or mask.added is None else mask.added.to(exact).expand(shape),
    )
    out = kernel.attention(arguments)
    for term in forms.values:
        if isinstance(term, AddedValues):
            out = out + term.term.to(out.dtype)
    return out


def _dtype(q: Tensor) -> torch.dtype:
    """In which q, k and v go in, under autocast too."""
    if q.dtype != torch.float64 and torch.is_autocast_enabled(q.device.type):
        return torch.get_autocast_dtype(q.device.type)
    return q.dtype


# ---------------------------------------------------------------------------------------------------------------
# Which form goes which way.

Size = tuple[int, int, int, int]
"""Of a grid: prefix, frames, height, width."""

Feature = LowRankBias | AxisBias | DenseBias
"""What may ride along as features."""


class Plan(NamedTuple):
    """How the forms of one attention are put to the kernel.

    Args:
        queries, keys: the grids between which offsets are taken.
        looked_up: what becomes lookups.
        features: what becomes extra features.
    """

    queries: Size
    keys: Size
    looked_up: list[lookups.Form]
    features: list[Feature]


def _plan(forms: Forms, q: Tensor, k: Tensor) -> Plan:
    views = _views(forms)
    axes = [bias.keys for bias in forms.biases if isinstance(bias, AxisBias) and bias.keys.regular]
    queries = _size(views[0][0]) if views else _row(q, forms.rotations)
    keys = _size(views[0][1]) if views else _size(axes[0]) if axes else _row(k, _key_rotations(forms))
    looked_up: list[lookups.Form] = []
    features: list[Feature] = []
    for form in (*forms.biases, *forms.values):
        # What prefix queries say to each key by an AxisBias is not said by a bucket.
        if isinstance(form, AxisBias) and (queries[0] or not form.keys.regular or _size(form.keys) != keys):
            features.append(form)
        elif isinstance(form, lookups.Form):
            looked_up.append(form)
        elif isinstance(form, LowRankBias | DenseBias):
            features.append(form)
    return Plan(queries, keys, looked_up, features)


def _views(forms: Forms) -> list[tuple[Grid, Grid]]:
    """Between which grids offsets are taken, for each form that takes any."""
    found = (lookups.grids(form) for form in (*forms.biases, *forms.values) if isinstance(form, lookups.Form))
    return [grids for grids in found if grids is not None]


def _size(grid: Grid) -> Size:
    return (grid.prefix, 1 if grid.frames is None else grid.frames, grid.height, grid.width)


def _row(x: Tensor, turns: Sequence[Turn]) -> Size:
    """The tokens [.., tokens, d] as a row, but for prefix tokens, which do not turn."""
    patches = turns[0].patches if turns and turns[0].patches else x.shape[-2]
    return (x.shape[-2] - patches, 1, 1, patches)


# ---------------------------------------------------------------------------------------------------------------
# Rotations and extra features.


def _key_rotations(forms: Forms) -> tuple[Turn, ...]:
    return forms.rotations if forms.key_rotations is None else forms.key_rotations


def _waves(forms: Forms, dtype: torch.dtype) -> list[Tensor] | None:
    """cos and sin of the queries' turn and of the keys', [b or 1, h or 1, patches, pairs]; none if nothing turns.

    None where the kernel cannot turn: by several rotations, by matrices, or by learned angles.
    """
    sides = (forms.rotations, _key_rotations(forms))
    if not any(sides):
        return []
    turns = [turn for turns in sides for turn in turns if isinstance(turn, Rotation) and turn.patches]
    if any(len(side) != 1 for side in sides) or len(turns) != 2:
        return None
    ours, theirs = turns
    if ours.layout != theirs.layout or ours.angles.shape[-1] != theirs.angles.shape[-1]:
        return None
    if torch.is_grad_enabled() and any(map(_is_learned, turns)):
        return None
    cos_sin = ours.waves
    waves = (*cos_sin, *(cos_sin if theirs is ours else theirs.waves))
    return [wave.to(dtype).contiguous().reshape(-1, *wave.shape[-3:]) for wave in waves]


def _is_half(forms: Forms) -> bool:
    return any(isinstance(turn, Rotation) and turn.layout == "half" for turn in forms.rotations)


def _is_learned(turn: Rotation) -> bool:
    scale = turn.scale
    return turn.angles.requires_grad or (isinstance(scale, Tensor) and scale.requires_grad)


def _is_row(form: object) -> bool:
    """Whether a dense bias says the same to all queries: then it is of rank one."""
    return isinstance(form, DenseBias) and form.tensor.ndim > 1 and form.tensor.shape[-2] == 1


def _rank(bias: Feature) -> int:
    match bias:
        case LowRankBias():
            return bias.left.shape[-1]
        case AxisBias():
            return bias.keys.height + bias.keys.width
        case DenseBias():
            return 1


def _as_low_rank(bias: Feature) -> LowRankBias:
    match bias:
        case LowRankBias():
            return bias
        case AxisBias():
            return as_low_rank(bias)
        case DenseBias():
            return LowRankBias(torch.ones_like(bias.tensor[..., :1]), bias.tensor.mT)


def _widened(lookup: Lookup, rank: int) -> Lookup:
    """For q and k with so many features more, which a table does not read."""
    return lookup._replace(entries=F.pad(lookup.entries, (0, 0, 0, rank))) if lookup.by_table else lookup
