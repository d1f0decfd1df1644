"""Tensors with a page behind (or before) them that nobody may touch: who reads past the end, dies."""

import ctypes
import math
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from whereformer.backends import kernel
from whereformer.backends.kernel import Arguments

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(x: Tensor, at: str = "end") -> Tensor:
    """A copy of x, of the same strides, whose memory ends (or starts) at the border of a page that kills."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    size = span * x.element_size()
    pages = max(1, math.ceil(size / PAGE))
    room = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for guard in (start, start + (pages + 1) * PAGE):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    if not span:
        return x.clone()
    offset = PAGE if at == "start" else (pages + 1) * PAGE - size
    flat = torch.frombuffer(room, dtype=x.dtype, count=span, offset=offset)
    flat.copy_(x.as_strided((span,), (1,)))
    return flat.as_strided(x.shape, x.stride())


def run(a: Arguments, grad_out: Tensor, at: str = "end") -> dict[str, Tensor]:
    """Forward and backward with all that the caller owns guarded; outputs are NaN before."""
    put = lambda x: guarded(x, at)  # noqa: E731
    nan = lambda x: put(torch.full_like(x, torch.nan))  # noqa: E731
    a = a._replace(
        q=put(a.q), k=put(a.k), v=put(a.v), turns=[put(t) for t in a.turns], maps=[put(m) for m in a.maps],
        entries=[put(e) for e in a.entries], allowed=None if a.allowed is None else put(a.allowed),
        added=None if a.added is None else put(a.added),
    )
    out, lse = (nan(x) for x in kernel._outputs(a, True))
    kernel._run("whereformer_forward", a, out, lse)
    got = {"out": out, "lse": lse}
    q, k, v, entries = kernel._gradients(a, [True] * len(a.entries))
    q, k, v, *entries = (nan(x) for x in (q, k, v, *entries))
    kernel._run("whereformer_backward", a, out, lse, (put(grad_out), q, k, v), entries)
    return got | {"q": q, "k": k, "v": v} | {f"entries {n}": e for n, e in enumerate(entries)}
