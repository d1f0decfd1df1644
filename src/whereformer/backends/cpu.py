"""The compiled kernel on the CPU: forms become lookups in small tables, and nothing of queries x keys is made."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.backends import kernel, lookups
from whereformer.backends.call import Attend, Call, forward_mode
from whereformer.backends.lookups import Lookup, as_dtype
from whereformer.backends.prepared import Prepared
from whereformer.backends.sdpa import as_low_rank, with_features
from whereformer.forms import (
    AddedValues,
    AxisBias,
    BucketBias,
    BucketValues,
    DenseBias,
    Forms,
    LowRankBias,
    OffsetBias,
    Rotation,
    Turn,
)
from whereformer.grid import Grid
from whereformer.mask import Mask

MOST_FEATURES = 256
"""Of a head, with those that biases of low rank ride on."""

MOST_LOOKUPS = 8
"""On the logits, and on the values."""


def cannot(forms: Forms, call: Call | None = None) -> str:
    """Why these forms, or this call of them, cannot be served, or "" if they can."""
    if call is None:
        plan = _plan(forms)
        return plan if isinstance(plan, str) else ""
    found = ready(forms, call)
    return found if isinstance(found, str) else ""


def ready(forms: Forms, call: Call) -> Attend | str:
    """What serves these forms and this call, or why they cannot be served."""
    plan = _plan(forms, call.q, call.k)
    if isinstance(plan, str):
        return plan
    return _cannot_now(plan, call) or Ready(plan)


class Ready(NamedTuple):
    """`attend`, with a plan."""

    plan: "Plan"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, forms: Forms, mask: Mask | None, dropout: float) -> Tensor:
        return attend(q, k, v, forms, mask, dropout, self.plan)

    def prepare(self, forms: Forms, call: Call, tables: Sequence[Tensor]) -> Prepared | None:
        """What serves all calls like this one; None: there is more to do for them than to start the kernel.

        Args:
            tables: where what the forms say may lie in memory.
        """
        q, k, v, mask, dropout = call
        features, said_later = self.plan.features, any(isinstance(form, AddedValues) for form in forms.values)
        if mask is not None or dropout or features or said_later or q.numel() == 0 or k.numel() == 0:
            return None
        if q.dtype == torch.bfloat16 and not self.plan.looked_up:
            return None  # `outrun` has a say at each call
        a = _arguments(q, k, v, forms, None, self.plan)
        as_given = a.q is q and a.k is k and a.v is v and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        return Prepared.of(a, tables) if as_given else None


def _cannot_now(plan: "Plan", call: Call) -> str:
    q, _, v, mask, dropout = call
    if not q.is_cpu:
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
    extra = sum(map(_rank, plan.features))
    if (features := max(q.shape[-1] + extra, v.shape[-1])) > MOST_FEATURES:
        return f"{features} features a head, more than {MOST_FEATURES}"
    return kernel.missing()


def outrun(forms: Forms, call: Call) -> str:
    """Why "auto" leaves to the next backend what this one could serve, or "".

    Torch multiplies bfloat16 as it is, where the processor has AMX, and this kernel as it does float32. That
    pays where sdpa makes nothing of queries x keys: at once where nothing is said and no gradient wanted, else
    from many keys on.
    """
    q, k, v, mask, _ = call
    if mask is not None or _dtype(q) != torch.bfloat16 or not _amx():
        return ""
    if not all(isinstance(form, LowRankBias | AddedValues) for form in (*forms.biases, *forms.values)):
        return ""
    silent = not (forms.rotations or forms.key_rotations or forms.biases)
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    exporting = torch.compiler.is_exporting()  # comparing sizes would bind the exported program to some of them
    if (silent and not wants_gradient) or (not exporting and k.shape[-2] > MOST_KEYS_IN_FLOAT32):
        return "bfloat16, which it computes in float32 and torch on AMX"
    return ""


MOST_KEYS_IN_FLOAT32 = 1100
"""From so many on, AMX outweighs what sdpa takes for turning or for the gradient; measured: 1025 to 4097."""


@cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _amx() -> bool:
    """Whether torch multiplies on AMX."""
    return _has_amx()


_amx._dynamo_marked_constant = True  # pyright: ignore  # assume_constant_result, without importing the compiler


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forms: Forms,
    mask: Mask | None,
    dropout: float,
    plan: "Plan | str | None" = None,
) -> Tensor:
    """As `whereformer.attention.reference`; `plan`: of these forms, where it is made already.

    Rotations by fixed angles are left to the kernel, others come before it. A bias of low rank rides along as
    extra features of q and k.
    """
    plan = plan or _plan(forms, q, k)
    assert isinstance(plan, Plan)
    out = kernel.attention(_arguments(q, k, v, forms, mask, plan))
    for term in forms.values:
        if isinstance(term, AddedValues):
            out = out + term.term.to(out.dtype)
    return out


def _arguments(q: Tensor, k: Tensor, v: Tensor, forms: Forms, mask: Mask | None, plan: "Plan") -> kernel.Arguments:
    """What the kernel gets."""
    head_dim, dtype = q.shape[-1], _dtype(q)
    exact = torch.promote_types(dtype, torch.float32)
    waves = _waves(forms, exact)
    queries, keys, looked_up, features = plan
    found = lookups.of(looked_up, q, k, exact, turned=waves is None)
    turned_q, turned_k = forms.turn(q, k) if waves is None else (q, k)
    q, k, v = as_dtype(turned_q, dtype), as_dtype(turned_k, dtype), as_dtype(v, dtype)
    if features:
        q, k = with_features(q, k, [_as_low_rank(bias) for bias in features])
        found = [_widened(one, q.shape[-1] - head_dim) for one in found]
    allowed = added = None
    if mask is not None:
        shape = (*q.shape[:-1], k.shape[-2])
        allowed = mask.allowed.expand(shape)
        added = None if mask.added is None else mask.added.to(exact).expand(shape)
    fields = [number for one in found for number in one.fields]
    maps, entries, scales = [one.at for one in found], [one.entries for one in found], [one.scale for one in found]
    half = bool(waves) and _is_half(forms)
    return kernel.Arguments(
        q, k, v, queries, keys, head_dim, half, waves or [], fields, maps, entries, allowed, added, scales
    )


def _dtype(q: Tensor) -> torch.dtype:
    """In which q, k and v go in, under autocast too."""
    dtype = q.dtype
    return (
        torch.get_autocast_dtype("cpu") if dtype != torch.float64 and torch.is_autocast_enabled("cpu") else dtype
    )


# ---------------------------------------------------------------------------------------------------------------
# Which form goes which way.

Size = tuple[int, int, int, int]
"""Of a grid: prefix, frames, height, width."""

Feature = LowRankBias | AxisBias | DenseBias
"""What may ride along as features."""


BY_OFFSET = (BucketBias, OffsetBias, BucketValues)
"""What is looked up at the offset of two tokens."""


class Plan(NamedTuple):
    """How the forms of one attention are put to the kernel.

    Args:
        queries, keys: the grids between which offsets are taken; or the tokens as a row.
        looked_up: what becomes lookups.
        features: what becomes extra features.
    """

    queries: Size
    keys: Size
    looked_up: list[lookups.Form]
    features: list[Feature]


def _plan(forms: Forms, q: Tensor | None = None, k: Tensor | None = None) -> Plan | str:
    """The plan, or why there is none."""
    view: tuple[Grid, Grid] | None = None
    looked_up: list[lookups.Form] = []
    features: list[Feature] = []
    axes: list[AxisBias] = []
    for form in (*forms.biases, *forms.values):
        if isinstance(form, AxisBias):
            axes.append(form)
        elif isinstance(form, BY_OFFSET):
            grids = lookups.grids(form)
            if not (grids[0].regular and grids[1].regular):
                return "lookups where patches do not fill their grid"
            if view is not None and grids != view:
                return "lookups that see the same tokens on different grids"
            view = grids
            looked_up.append(form)
        elif isinstance(form, LowRankBias) or _is_row(form):
            features.append(form)
        elif not isinstance(form, AddedValues):
            return f"{type(form).__name__} is no lookup in a table"
    queries = _row(q, forms.rotations) if view is None else _size(view[0])
    keys = _row(k, _key_rotations(forms)) if view is None else _size(view[1])
    if view is None and (regular := [bias.keys for bias in axes if bias.keys.regular]):
        keys = _size(regular[0])
    for bias in axes:
        # What prefix queries say to each key is not said by a bucket.
        fits = not queries[0] and bias.keys.regular and _size(bias.keys) == keys
        (looked_up if fits else features).append(bias)
    if len(looked_up) + len(axes) > MOST_LOOKUPS:  # or there is nothing to count
        on_values = sum(isinstance(form, BucketValues) for form in looked_up)
        on_logits = len(looked_up) - on_values + sum(isinstance(form, AxisBias) for form in looked_up)
        if (count := max(on_logits, on_values)) > MOST_LOOKUPS:
            return f"{count} lookups, more than {MOST_LOOKUPS}"
    return Plan(queries, keys, looked_up, features)


def _size(grid: Grid) -> Size:
    return (grid.prefix, 1 if grid.frames is None else grid.frames, grid.height, grid.width)


def _row(x: Tensor | None, turns: Sequence[Turn]) -> Size:
    """The tokens [.., tokens, d] as a row, but for prefix tokens, which do not turn; none of no tokens."""
    tokens = 0 if x is None else x.shape[-2]
    patches = turns[0].patches if turns and turns[0].patches else tokens
    return (tokens - patches, 1, 1, patches)


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
    waves = [_wave(wave, dtype) for wave in ours.waves]
    return waves + (waves if theirs is ours else [_wave(wave, dtype) for wave in theirs.waves])


def _wave(wave: Tensor, dtype: torch.dtype) -> Tensor:
    """[b or 1, h or 1, patches, pairs], contiguous."""
    wave = as_dtype(wave, dtype).contiguous()
    return wave[None] if wave.ndim == 3 else wave


def _is_half(forms: Forms) -> bool:
    return any(isinstance(turn, Rotation) and turn.layout == "half" for turn in forms.rotations)


def _is_learned(turn: Rotation) -> bool:
    scale = turn.scale
    return turn.angles.requires_grad or (isinstance(scale, Tensor) and scale.requires_grad)


def _is_row(form: object) -> TypeGuard[DenseBias]:
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
    if not lookup.by_table:
        return lookup
    more = (0, rank) if lookup.by_table == kernel.BY_BUCKET else (0, 0, 0, rank)
    return lookup._replace(entries=F.pad(lookup.entries, more))
