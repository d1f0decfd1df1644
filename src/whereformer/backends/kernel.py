"""The compiled kernel behind csrc/whereformer.h, as the torch operators whereformer::attention and its backward.

Both take lookups as flat lists, `FIELDS` integers, one map and one tensor of entries for each lookup.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whereformer.backends import library

BY_QUERY, BY_KEY, SHARED, VALUES = range(4)
"""Kinds of lookups, as in the header."""

FIELDS = ("kind", "by_table", "absolute", "mirrored", "prefix")
"""What is said of a lookup in integers; `by_table`: the entries are a table that q or k reads."""

Size = ctypes.c_int64
Pointer = ctypes.c_void_p


class WfTokens(ctypes.Structure):
    _fields_ = [("data", Pointer), ("batch", Size), ("head", Size), ("token", Size)]


class WfGrid(ctypes.Structure):
    _fields_ = [("prefix", Size), ("frames", Size), ("height", Size), ("width", Size)]


class WfTurn(ctypes.Structure):
    _fields_ = [("cos", Pointer), ("sin", Pointer), ("batch", Size), ("head", Size)]


class WfLookup(ctypes.Structure):
    _fields_ = [
        *((name, Size) for name in ("kind", "buckets", "absolute", "mirrored", "prefix")),
        *((name, Pointer) for name in ("map", "table", "scores")),
        ("head", Size),
        *((name, Pointer) for name in ("grad_table", "grad_scores")),
    ]


class WfAttention(ctypes.Structure):
    _fields_ = [
        *((name, Size) for name in ("batch", "heads", "features", "value_features")),
        *((name, WfGrid) for name in ("queries", "keys")),
        *((name, Size) for name in ("bfloat16", "threads")),
        ("scale", ctypes.c_double),
        *((name, WfTokens) for name in ("q", "k", "v", "out")),
        ("lse", Pointer),
        *((name, Size) for name in ("pairs", "half")),
        *((name, WfTurn) for name in ("query_turn", "key_turn")),
        ("lookups", Size),
        ("lookup", ctypes.POINTER(WfLookup)),
        *(("allowed", Pointer), ("allowed_strides", Size * 4)),
        *(("added", Pointer), ("added_strides", Size * 4)),
        *((name, WfTokens) for name in ("grad_out", "grad_q", "grad_k", "grad_v")),
    ]


@cache
def _library() -> ctypes.CDLL:
    """The kernel, loaded once; torch is there already, so that one OpenMP serves both."""
    path = library.path()
    if path is None:
        raise OSError("the compiled kernel was not built at installation")
    found = ctypes.CDLL(str(path))
    for name in ("whereformer_forward", "whereformer_backward"):
        getattr(found, name).argtypes = [ctypes.POINTER(WfAttention)]
    for name in ("whereformer_error", "whereformer_isa"):
        getattr(found, name).restype = ctypes.c_char_p
    found.whereformer_layout.restype = Size
    ours, theirs = ctypes.sizeof(WfAttention) + ctypes.sizeof(WfLookup), found.whereformer_layout()
    if ours != theirs:
        raise OSError(f"{path} is of another version: its structures have {theirs} bytes, not {ours}")
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
    """The instructions the kernel runs on: "avx512", "avx2" or "portable"."""
    return _library().whereformer_isa().decode()


# ---------------------------------------------------------------------------------------------------------------
# From tensors to the structure.


def _tokens(x: Tensor) -> WfTokens:
    return WfTokens(x.data_ptr(), *x.stride()[:3])


def _turn(cos: Tensor, sin: Tensor) -> WfTurn:
    """[batch or 1, heads or 1, patches, pairs] each."""
    batch, head = (stride if n > 1 else 0 for n, stride in zip(cos.shape[:2], cos.stride()[:2], strict=True))
    return WfTurn(cos.data_ptr(), sin.data_ptr(), batch, head)


def _lookup(fields: Sequence[int], at: Tensor, entries: Tensor, gradient: Tensor | None) -> WfLookup:
    kind, by_table, absolute, mirrored, prefix = fields
    buckets = entries.shape[-2 if kind == VALUES else -1]
    head = entries.stride(0) if entries.shape[0] > 1 else 0  # of scores for each token it is not read
    there = None if gradient is None or not gradient.numel() else gradient.data_ptr()
    told = (kind, buckets, absolute, mirrored, prefix, at.data_ptr())
    if by_table or kind == VALUES:
        return WfLookup(*told, entries.data_ptr(), None, head, there, None)
    return WfLookup(*told, None, entries.data_ptr(), head, None, there)


class Arguments(NamedTuple):
    """What both operators take; see the fields of WfAttention.

    Args:
        queries, keys: (prefix, frames, height, width).
        head_dim: the logits are divided by its root.
        turns: cos and sin of the queries' patches, cos and sin of the keys', or none.
        lookups: `FIELDS` of each lookup, one after the other.
        maps: int32, contiguous. entries: table or scores, float32, contiguous.
        allowed: bool, added: float32; both [batch, heads, queries, keys], of any strides.
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


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, SymInt[] queries, SymInt[] keys, SymInt head_dim, bool half, Tensor[] turns,"
    " SymInt[] lookups, Tensor[] maps, Tensor[] entries, Tensor? allowed, Tensor? added"
)


def _run(
    name: str,
    a: Arguments,
    out: Tensor,
    lse: Tensor,
    gradients: Sequence[Tensor] = (),
    gradients_of_entries: Sequence[Tensor] = (),
) -> None:
    """Calls the kernel on what lies where `_rows` put it."""
    batch, heads, _, features = a.q.shape
    count, step = len(a.maps), len(FIELDS)
    fields = [a.lookups[n : n + step] for n in range(0, count * step, step)]
    lookups = (WfLookup * count)(*map(_lookup, fields, a.maps, a.entries, gradients_of_entries or (None,) * count))
    there = WfAttention(
        *(batch, heads, features, a.v.shape[-1]),
        *(WfGrid(*a.queries), WfGrid(*a.keys)),
        *(a.q.dtype == torch.bfloat16, torch.get_num_threads(), a.head_dim**-0.5),
        *map(_tokens, (a.q, a.k, a.v, out)),
        lse.data_ptr() if lse.numel() else None,
    )
    there.lookups, there.lookup = count, lookups
    if a.turns:
        there.pairs, there.half = a.turns[0].shape[-1], a.half
        there.query_turn, there.key_turn = _turn(*a.turns[:2]), _turn(*a.turns[2:])
    if a.allowed is not None:
        there.allowed, there.allowed_strides = a.allowed.data_ptr(), a.allowed.stride()
    if a.added is not None:
        there.added, there.added_strides = a.added.data_ptr(), a.added.stride()
    if gradients:
        there.grad_out, there.grad_q, there.grad_k, there.grad_v = map(_tokens, gradients)
    found = _library()
    if code := getattr(found, name)(there):
        raise RuntimeError(f"{name}: {found.whereformer_error(code).decode()}")


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
    if torch.compiler.is_compiling():
        return _attention(*a, _wants_gradient(a))[0]
    return _differentiable(*a, _wants_gradient(a))[0]  # what the dispatcher would come to


def _wants_gradient(a: Arguments) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (a.q, a.k, a.v, *a.entries))


def _outputs(a: Arguments, wants_lse: bool) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = a.q.shape
    out = a.q.new_empty(batch, tokens, heads, a.v.shape[-1]).transpose(1, 2)
    lse = a.q.new_empty((batch, heads, tokens) if wants_lse else (0,), dtype=torch.float32)
    return out, lse


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    a = Arguments(*arguments[:-1])
    out, lse = _outputs(a, wants_lse=arguments[-1])
    if a.q.numel() == 0 or a.k.numel() == 0:
        return out.zero_(), lse.fill_(torch.inf)
    _run("whereformer_forward", a._replace(q=_rows(a.q), k=_rows(a.k), v=_rows(a.v)), out, lse)
    return out, lse


def _gradients(a: Arguments, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Memory for them: for q, k and v in the order of theirs, for entries where wanted."""
    q, k, v = (_rows(torch.empty_like(x)) for x in (a.q, a.k, a.v))
    return q, k, v, [torch.empty_like(e) if w else e.new_empty(0) for e, w in zip(a.entries, wanted, strict=True)]


def _backward(grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> Any:
    a = Arguments(*arguments[:-1])
    q, k, v, entries = gradients = _gradients(a, wanted=arguments[-1])
    if a.q.numel() == 0 or a.k.numel() == 0:
        for gradient in (q, k, v, *entries):
            gradient.zero_()
        return gradients
    there = a._replace(q=_rows(a.q), k=_rows(a.k), v=_rows(a.v))
    _run("whereformer_backward", there, _rows(out), lse, (_rows(grad_out), q, k, v), entries)
    return gradients


class _Attention(torch.autograd.Function):
    """The operator with its gradients; its tensors one by one, as autograd looks into no lists."""

    @staticmethod
    def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _attention(*_filled(rest, tensors), True)
        ctx.rest = rest
        ctx.save_for_backward(out, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _, *wanted = ctx.needs_input_grad
        if grad_out is None:
            return (None,) * (1 + len(wanted))
        out, lse, *tensors = ctx.saved_tensors
        a = _filled(ctx.rest, tensors)
        wanted_entries = wanted[FIXED : FIXED + len(a.entries)]
        q, k, v, entries = _attention_backward(grad_out, out, lse, *a, wanted_entries)
        found = [q, k, v, None, None, *(g if w else None for g, w in zip(entries, wanted_entries, strict=True))]
        return (None, *found, *(None,) * (len(wanted) - len(found)))


FIXED = 5
"""q, k, v, allowed and added."""


def _flat(a: Arguments) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """The arguments that are no tensors, and those that are: `FIXED`, and the lists'."""
    rest = (a.queries, a.keys, a.head_dim, a.half, a.lookups)
    return rest, (a.q, a.k, a.v, a.allowed, a.added, *a.entries, *a.maps, *a.turns)


def _filled(rest: tuple[Any, ...], tensors: Sequence[Any]) -> Arguments:
    """The reverse of `_flat`."""
    queries, keys, head_dim, half, lookups = rest
    q, k, v, allowed, added, *lists = tensors
    count = len(lookups) // len(FIELDS)
    entries, maps, turns = lists[:count], lists[count : 2 * count], lists[2 * count :]
    return Arguments(q, k, v, queries, keys, head_dim, half, turns, lookups, maps, entries, allowed, added)


def _differentiable(*arguments: Any) -> tuple[Tensor, Tensor]:
    *given, wants_lse = arguments
    a = Arguments(*given)
    if _wants_gradient(a):
        if not wants_lse:
            raise RuntimeError("whereformer::attention: a gradient needs wants_lse=True")
        rest, tensors = _flat(a)
        return _Attention.apply(rest, *tensors)  # pyright: ignore[reportReturnType]
    with torch._C._AutoDispatchBelowAutograd():
        return _attention(*arguments)


_operators.impl("attention", _forward, "CPU")
_operators.impl("attention_backward", _backward, "CPU")
_operators.impl("attention", _differentiable, "Autograd")
_attention = torch.ops.whereformer.attention.default
_attention_backward = torch.ops.whereformer.attention_backward.default


@torch.library.register_fake("whereformer::attention", lib=_operators)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _outputs(Arguments(*arguments[:-1]), arguments[-1])


@torch.library.register_fake("whereformer::attention_backward", lib=_operators)
def _(grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> Any:
    return _gradients(Arguments(*arguments[:-1]), arguments[-1])


def _no_second(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(
        "the cpu backend has no gradients of gradients (double backward): use backend='reference' for them"
    )


torch.library.register_autograd("whereformer::attention_backward", _no_second, lib=_operators)
