"""The compiled kernel behind csrc/whereformer.h, as the torch operators whereformer::attention and its backward.

Both take lookups as flat lists, `FIELDS` integers, one map and one tensor of entries for each lookup.
"""

import ctypes
import math
import os
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from whereformer.backends import library
from whereformer.backends.call import unwatched
from whereformer.errors import InputError

BY_QUERY, BY_KEY, SHARED, VALUES = range(4)
"""Kinds of lookups, as in the header."""

FIELDS = ("kind", "by_table", "absolute", "mirrored", "prefix")
"""What is said of a lookup in integers; `by_table`: 0, or how a table lies that q or k reads."""

BY_FEATURE, BY_BUCKET = 1, 2
"""Tables [1 or h, d, buckets], or [1 or h, buckets, d]."""


# ---------------------------------------------------------------------------------------------------------------
# The library.

TOKENS, GRID, TURN, LOOKUP = "P3q", "4q", "2P2q", "6q3Pqd2P"
ATTENTION = f"4q{2 * GRID}2qd{4 * TOKENS}P2q{2 * TURN}qPP4qP4q{4 * TOKENS}"
"""The header's structures, for `struct`: q is an int64_t, P a pointer, d a double."""


@cache
def _library() -> ctypes.CDLL:
    """The kernel, loaded once; torch is there already, so that one OpenMP serves both."""
    path = library.path()
    if path is None:
        raise OSError("the compiled kernel was not built at installation")
    found = ctypes.CDLL(str(path))
    for name in ("whereformer_forward", "whereformer_backward"):
        getattr(found, name).argtypes = [ctypes.c_void_p]
    for name in ("whereformer_error", "whereformer_isa"):
        getattr(found, name).restype = ctypes.c_char_p
    found.whereformer_layout.restype = ctypes.c_int64
    ours, theirs = struct.calcsize(ATTENTION) + struct.calcsize(LOOKUP), found.whereformer_layout()
    if ours != theirs:
        raise OSError(f"{path} is of another version: its structures have {theirs} bytes, not {ours}")
    if found.whereformer_isa() is None:
        raise OSError(f"WHEREFORMER_ISA={os.environ.get('WHEREFORMER_ISA')!r} names no instructions that run here")
    return found


@cache
def _missing() -> str:
    try:
        _library()
    except OSError as error:
        return str(error)
    return ""


def missing() -> str:
    """Why there is no compiled kernel, or "" if there is one."""
    return _missing()


missing._dynamo_marked_constant = True  # pyright: ignore  # assume_constant_result, without importing the compiler


def isa() -> str:
    """The instructions the kernel runs on: "amx", "avx512", "avx2" or "portable"."""
    return _library().whereformer_isa().decode()


# ---------------------------------------------------------------------------------------------------------------
# From tensors to the structure.


class Arguments(NamedTuple):
    """What both operators take; see the fields of WfAttention.

    Args:
        queries, keys: (prefix, frames, height, width).
        head_dim: the logits are divided by its root.
        turns: cos and sin of the queries' patches, cos and sin of the keys', or none.
        lookups: `FIELDS` of each lookup, one after the other.
        maps: int32, contiguous. entries: table or scores, float32, contiguous.
        allowed: bool, added: float32; both [batch, heads, queries, keys], of any strides.
        scales: of each lookup's entries, where they are a table: it is multiplied by that; none: by 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Sequence[int]
    keys: Sequence[int]
    head_dim: int
    half: bool
    turns: Sequence[Tensor]
    lookups: Sequence[int]
    maps: Sequence[Tensor]
    entries: Sequence[Tensor]
    allowed: Tensor | None
    added: Tensor | None
    scales: Sequence[float] = ()


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, SymInt[] queries, SymInt[] keys, SymInt head_dim, bool half, Tensor[] turns,"
    " SymInt[] lookups, Tensor[] maps, Tensor[] entries, Tensor? allowed, Tensor? added,"
    " float[] scales"
)


@cache
def _layout(lookups: int) -> tuple[struct.Struct, type[ctypes.Array[ctypes.c_char]]]:
    """WfAttention with its WfLookups behind it, and memory for them."""
    layout = struct.Struct(ATTENTION + lookups * LOOKUP)
    return layout, ctypes.c_char * layout.size


BEHIND = struct.calcsize(ATTENTION)
NO_TURNS, NO_MASK, NO_GRADIENTS = (0,) * 10, (0,) * 5, (0,) * 16


def run(
    name: str,
    a: Arguments,
    out: Tensor,
    lse: Tensor,
    gradients: Sequence[Tensor] = (),
    gradients_of_entries: Sequence[Tensor] = (),
) -> None:
    """Calls the kernel on what lies where `_rows` put it."""
    there = packed(a, out, lse, gradients, gradients_of_entries)
    start(name, ctypes.addressof(there))


def start(name: str, at: int) -> None:
    """Calls the kernel on the structures that lie there.

    Raises:
        RuntimeError: it says that it failed.
    """
    found = _library()
    if code := getattr(found, name)(at):
        raise RuntimeError(f"{name}: {found.whereformer_error(code).decode()}")


def packed(
    a: Arguments,
    out: Tensor,
    lse: Tensor,
    gradients: Sequence[Tensor] = (),
    gradients_of_entries: Sequence[Tensor] = (),
) -> "ctypes.Array[ctypes.c_char]":
    """WfAttention, and its WfLookups behind it."""
    q, k, v, queries, keys, head_dim, half, turns, fields, maps, entries, allowed, added, scales = a
    batch, heads, _, features = q.shape
    count = len(maps)
    layout, memory = _layout(count)
    there = memory()
    at = ctypes.addressof(there)
    values: list[float] = []
    step = len(FIELDS)
    for n in range(count):
        gradient = gradients_of_entries[n] if gradients_of_entries else None
        scale = scales[n] if scales else 1.0
        values += _lookup(fields[n * step : n * step + step], maps[n], entries[n], scale, gradient)
    layout.pack_into(
        there,
        0,
        *(batch, heads, features, v.shape[-1], *queries, *keys),
        *(q.dtype == torch.bfloat16, torch.get_num_threads(), head_dim**-0.5),
        *(q.data_ptr(), *q.stride()[:3], k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3]),
        *(out.data_ptr(), *out.stride()[:3], lse.data_ptr()),
        *((turns[0].shape[-1], half, *_turn(*turns[:2]), *_turn(*turns[2:])) if turns else NO_TURNS),
        *(count, at + BEHIND),
        *(NO_MASK if allowed is None else (allowed.data_ptr(), *allowed.stride())),
        *(NO_MASK if added is None else (added.data_ptr(), *added.stride())),
        *([n for x in gradients for n in (x.data_ptr(), *x.stride()[:3])] if gradients else NO_GRADIENTS),
        *values,
    )
    return there


def _turn(cos: Tensor, sin: Tensor) -> tuple[int, ...]:
    """[batch or 1, heads or 1, patches, pairs] each."""
    (batches, heads, _, _), (batch, head, _, _) = cos.shape, cos.stride()
    return cos.data_ptr(), sin.data_ptr(), batch if batches > 1 else 0, head if heads > 1 else 0


def _lookup(
    fields: Sequence[int], at: Tensor, entries: Tensor, scale: float, gradient: Tensor | None
) -> tuple[float, ...]:
    kind, by_table, absolute, mirrored, prefix = fields
    shape = entries.shape
    by_bucket = by_table == BY_BUCKET
    buckets = shape[-2 if kind == VALUES or by_bucket else -1]
    head = entries.stride(0) if shape[0] > 1 else 0  # of scores for each token it is not read
    here, there = entries.data_ptr(), 0 if gradient is None else gradient.data_ptr()
    told = (kind, buckets, absolute, mirrored, prefix, by_bucket, at.data_ptr())
    if by_table or kind == VALUES:
        return (*told, here, 0, head, scale, there, 0)
    return (*told, 0, here, head, scale, 0, there)


def _rows(x: Tensor) -> Tensor:
    """With each token's features side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


# ---------------------------------------------------------------------------------------------------------------
# The operators.

_operators = torch.library.Library("whereformer", "FRAGMENT")
_operators.define(f"attention({SCHEMA}, bool wants_lse) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_operators.define(
    f"attention_backward(Tensor grad_out, Tensor out, Tensor lse, {SCHEMA}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention(a: Arguments) -> Tensor:
    """[batch, heads, queries, value features], in memory [batch, queries, heads, value features]."""
    wants_gradient = _wants_gradient(a)
    if torch.compiler.is_compiling():
        return _attention(*a, wants_gradient)[0]
    return _eager(a, wants_gradient, wants_gradient)[0]  # what the dispatcher would come to


def _wants_gradient(a: Arguments) -> bool:
    if not torch.is_grad_enabled():
        return False
    return a.q.requires_grad or a.k.requires_grad or a.v.requires_grad or any(x.requires_grad for x in a.entries)


def unseen(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nobody looks, and the kernel may."""
    return unwatched() and all(x is None or plain(x) for x in tensors)


def plain(x: Tensor) -> bool:
    """Whether its numbers lie in memory, on the CPU: no class makes them, no view negates them, not all are 0."""
    return type(x) in PLAIN and x.is_cpu and not x.is_neg() and not x._is_zerotensor()


def _given(a: Arguments) -> tuple[Tensor | None, ...]:
    return (a.q, a.k, a.v, a.allowed, a.added, *a.entries, *a.turns)


PLAIN = (Tensor, torch.nn.Parameter)


def outputs(a: Arguments, wants_lse: bool) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = a.q.shape
    dtype, device = a.q.dtype, a.q.device
    out = torch.empty_permuted((batch, heads, tokens, a.v.shape[-1]), (0, 2, 1, 3), dtype=dtype, device=device)
    shape, order = ((batch, heads, tokens), (0, 1, 2)) if wants_lse else ((0,), (0,))
    return out, torch.empty_permuted(shape, order, dtype=torch.float32, device=device)  # code that is at hand


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _run_forward(Arguments(*arguments[:-1]), arguments[-1])


def _run_forward(a: Arguments, wants_lse: bool) -> tuple[Tensor, Tensor]:
    check(a)
    out, lse = outputs(a, wants_lse)
    if a.q.numel() == 0 or a.k.numel() == 0:
        return out.zero_(), lse.fill_(torch.inf)
    run("whereformer_forward", _laid(a), out, lse)
    return out, lse


def check(a: Arguments) -> None:
    """The kernel reads and writes where sizes say, so these must be those of the tensors.

    Raises:
        InputError: they are not.
    """
    batch, heads, queries, features = a.q.shape
    keys, dtype, exact, values = a.k.shape[2], a.q.dtype, torch.float32, a.v.shape[-1]
    _expect("k", a.k, (batch, heads, keys, features), dtype)
    _expect("v", a.v, (batch, heads, keys, values), dtype)
    for side, size, tokens in (("queries", a.queries, queries), ("keys", a.keys, keys)):
        prefix, frames, height, width = size
        if prefix + frames * height * width != tokens:
            raise InputError(f"{side} on {tuple(size)}, but {tokens} tokens")
    for n, wave in enumerate(a.turns):
        images, of_heads, _, pairs = wave.shape
        patches = queries - a.queries[0] if n < 2 else keys - a.keys[0]
        pairs = min(pairs, features // 2) if n == 0 else a.turns[0].shape[-1]
        shape = (images if images == 1 else batch, of_heads if of_heads == 1 else heads, patches, pairs)
        _expect("cos or sin", wave, shape, exact, whole=True)
    if len(a.scales) not in (0, len(a.maps)):
        raise InputError(f"{len(a.scales)} scales, but {len(a.maps)} lookups")
    offsets = math.prod(i + j - 1 for i, j in zip(a.queries[1:], a.keys[1:], strict=True)) if a.maps else 0
    for n, (at, entries) in enumerate(zip(a.maps, a.entries, strict=True)):
        kind, by_table, absolute, _, prefix = a.lookups[n * len(FIELDS) : (n + 1) * len(FIELDS)]
        places = math.prod(a.keys[1:]) if absolute else offsets
        if at.numel() != places or at.dtype != torch.int32 or not at.is_contiguous():
            raise InputError(f"map {tuple(at.shape)} {at.dtype}, expected {places} buckets in int32, contiguous")
        found = entries.shape
        by_bucket = by_table == BY_BUCKET
        first, buckets = 1 if found[0] == 1 else heads, found[-2 if kind == VALUES or by_bucket else -1]
        if kind == VALUES:
            shape = (first, buckets, values)
        elif by_table:
            shape = (first, buckets, features) if by_bucket else (first, features, buckets)
        elif kind == SHARED:
            shape = (first, buckets)
        else:
            shape = (batch, heads, queries if kind == BY_QUERY else keys, buckets)
        _expect("table or scores", entries, shape, exact, whole=True)
        if prefix >= buckets:
            raise InputError(f"bucket {prefix} of prefix tokens, but {buckets} buckets")
    for what, mask, of in (("allowed", a.allowed, torch.bool), ("added", a.added, exact)):
        if mask is not None:
            _expect(what, mask, (batch, heads, queries, keys), of)


def _expect(what: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, whole: bool = False) -> None:
    if x.shape != shape or x.dtype != dtype or (whole and not x.is_contiguous()):
        found = f"{what} {tuple(x.shape)} {x.dtype}"
        raise InputError(f"{found}, expected {shape} {dtype}" + ", contiguous" * whole)


def _laid(a: Arguments) -> Arguments:
    """With q, k and v as rows."""
    q, k, v = _rows(a.q), _rows(a.k), _rows(a.v)
    return a if q is a.q and k is a.k and v is a.v else a._replace(q=q, k=k, v=v)


def gradients_of(a: Arguments, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Memory for them: for q, k and v in the order of theirs, for entries where wanted."""
    q, k, v = (_rows(torch.empty_like(x)) for x in (a.q, a.k, a.v))
    return q, k, v, [torch.empty_like(e) if w else e.new_empty(0) for e, w in zip(a.entries, wanted, strict=True)]


def _backward(grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> Any:
    return _run_backward(grad_out, out, lse, Arguments(*arguments[:-1]), arguments[-1])


def _run_backward(grad_out: Tensor, out: Tensor, lse: Tensor, a: Arguments, wanted: Sequence[bool]) -> Any:
    q, k, v, entries = gradients = gradients_of(a, wanted)
    if a.q.numel() == 0 or a.k.numel() == 0:
        for gradient in (q, k, v, *entries):
            gradient.zero_()
        return gradients
    run("whereformer_backward", _laid(a), _rows(out), lse, (_rows(grad_out), q, k, v), entries)
    return gradients


class _Attention(torch.autograd.Function):
    """The kernel with its gradients; what may have one comes beside the arguments, as autograd looks into none."""

    @staticmethod
    def forward(ctx: Any, a: Arguments, *_: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _called(a, True)
        ctx.rest, tensors = _flat(a)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _, *wanted = ctx.needs_input_grad
        if grad_out is None:
            return (None,) * (1 + len(wanted))
        refuse_many(grad_out)
        out, lse, *tensors = ctx.saved_tensors
        q, k, v, entries = backward(grad_out, out, lse, _filled(ctx.rest, tensors), wanted[3:])
        return (None, q, k, v, *(g if w else None for g, w in zip(entries, wanted[3:], strict=True)))


def refuse_many(grad_out: Tensor) -> None:
    """Nothing, if it is one gradient.

    Raises:
        NotImplementedError: it stands for several.
    """
    if is_legacy_batchedtensor(grad_out):
        raise NotImplementedError(
            "the cpu backend takes one gradient at a time, not several (is_grads_batched=True, a jacobian with"
            " vectorize=True): use backend='reference' for them"
        )


def backward(grad_out: Tensor, out: Tensor, lse: Tensor, a: Arguments, wanted: Sequence[bool]) -> Any:
    """As an operator only for those who look: gradients of q, k, v, and of the entries that want one."""
    if unseen((grad_out, *_given(a))) and not torch.is_grad_enabled():
        return _run_backward(grad_out, out, lse, a, wanted)
    return _attention_backward(grad_out, out, lse, *a, wanted)


def _flat(a: Arguments) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """The arguments that nobody changes, and the other tensors."""
    rest = (a.queries, a.keys, a.head_dim, a.half, a.lookups, a.maps, a.scales)
    return rest, _given(a)


def _filled(rest: tuple[Any, ...], tensors: Sequence[Any]) -> Arguments:
    """The reverse of `_flat`."""
    queries, keys, head_dim, half, lookups, maps, scales = rest
    q, k, v, allowed, added, *lists = tensors
    entries, turns = lists[: len(maps)], lists[len(maps) :]
    return Arguments(q, k, v, queries, keys, head_dim, half, turns, lookups, maps, entries, allowed, added, scales)


def _differentiable(*arguments: Any) -> tuple[Tensor, Tensor]:
    a, wants_lse = Arguments(*arguments[:-1]), arguments[-1]
    wants_gradient = _wants_gradient(a)
    if wants_gradient and not wants_lse:
        raise RuntimeError("whereformer::attention: a gradient needs wants_lse=True")
    return _eager(a, wants_lse, wants_gradient)


def _eager(a: Arguments, wants_lse: bool, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    if wants_gradient:
        return _Attention.apply(a, a.q, a.k, a.v, *a.entries)  # pyright: ignore[reportReturnType]
    return _called(a, wants_lse)


def _called(a: Arguments, wants_lse: bool) -> tuple[Tensor, Tensor]:
    """Below autograd: as an operator only for those who look."""
    if unseen(_given(a)):
        return _run_forward(a, wants_lse)
    if len(devices := {str(x.device) for x in _given(a) if x is not None}) > 1:
        raise RuntimeError(f"whereformer::attention: tensors on {sorted(devices)}, expected one device")
    with torch._C._AutoDispatchBelowAutograd():
        return _attention(*a, wants_lse)


_operators.impl("attention", _forward, "CPU")
_operators.impl("attention_backward", _backward, "CPU")
_operators.impl("attention", _differentiable, "Autograd")
_attention = torch.ops.whereformer.attention.default
_attention_backward = torch.ops.whereformer.attention_backward.default


@torch.library.register_fake("whereformer::attention", lib=_operators)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return outputs(Arguments(*arguments[:-1]), arguments[-1])


@torch.library.register_fake("whereformer::attention_backward", lib=_operators)
def _(grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> Any:
    return gradients_of(Arguments(*arguments[:-1]), arguments[-1])


def _no_second(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(
        "the cpu backend has no gradients of gradients (double backward): use backend='reference' for them"
    )


torch.library.register_autograd("whereformer::attention_backward", _no_second, lib=_operators)
