"""Calls of the kernel like one before: only where the tensors lie is new, all else is packed already."""

from array import array
from collections.abc import Sequence
from struct import calcsize
from typing import Any

import torch
from torch import Tensor

from whereformer.backends import kernel
from whereformer.backends.kernel import BEHIND, GRID, LOOKUP, TOKENS, TURN, VALUES, Arguments

WORD = 8
"""Bytes of whatever is in the header's structures."""

THREADS = calcsize(f"4q{2 * GRID}q") // WORD
Q, K, V, OUT, LSE = (calcsize(f"4q{2 * GRID}2qd{n * TOKENS}") // WORD for n in range(5))
LOOKUPS = calcsize(f"4q{2 * GRID}2qd{4 * TOKENS}P2q{2 * TURN}q") // WORD
GRAD_OUT, GRAD_Q, GRAD_K, GRAD_V = ((BEHIND - calcsize(n * TOKENS)) // WORD for n in (4, 3, 2, 1))
TABLE, SCORES, GRAD_TABLE, GRAD_SCORES = 7, 8, 11, 12
"""Where in the structures, in words, a call writes; the last four in a lookup."""


class Prepared:
    """The kernel, for all calls whose tensors are laid out as those of one call.

    It holds none of that call's tensors but maps and turns, which nobody changes. Nothing in it changes either, so
    that threads may share it.

    Args:
        a: the arguments of that call, as `kernel.attention` takes them, without masks; q, k and v are rows, not
            empty.
        tables: the entries, of any shape, contiguous: gradients have theirs.
        which: what they are to the caller: `self.tables`.
    """

    def __init__(self, a: Arguments, tables: Sequence[Tensor], which: Sequence[int]) -> None:
        kernel.check(a)
        out, lse = kernel.outputs(a, True)
        *gradients, of_entries = kernel.gradients_of(a, [False] * len(tables))
        forward, backward = kernel.packed(a, out, lse), kernel.packed(a, out, lse, (out, *gradients), of_entries)
        self.forward_words, self.backward_words = array("q", bytes(forward)), array("q", bytes(backward))
        self.tables = which
        self.dtype = a.q.dtype
        self.layouts = [(x.shape, x.stride()) for x in (a.q, a.k, a.v, *tables)]
        self.out, self.lse = (out.shape, out.stride()), (lse.shape, lse.stride())
        of_rows = zip((GRAD_Q, GRAD_K, GRAD_V), gradients, strict=True)
        self.gradients = [(at, (x.shape, x.stride())) for at, x in of_rows]
        self.shapes = [x.shape for x in a.entries]
        self.rest = (a.queries, a.keys, a.head_dim, a.half, a.turns, a.lookups, a.maps, a.scales)
        self.entries, self.gradients_of_entries = [], []
        step = len(kernel.FIELDS)
        for n, (kind, by_table) in enumerate(zip(a.lookups[::step], a.lookups[1::step], strict=True)):
            lookup = (BEHIND + n * calcsize(LOOKUP)) // WORD
            at, gradient_at = (TABLE, GRAD_TABLE) if by_table or kind == VALUES else (SCORES, GRAD_SCORES)
            self.entries.append(lookup + at)
            self.gradients_of_entries.append((lookup + gradient_at, self.layouts[3 + n]))

    @classmethod
    def of(cls, a: Arguments, tables: Sequence[Tensor]) -> "Prepared | None":
        """For calls whose entries are some of these tables, as they lie in memory; None if they are not."""
        places = [x.data_ptr() if x.dtype == torch.float32 and x.is_contiguous() else None for x in tables]
        if any(places.count(x.data_ptr()) != 1 for x in a.entries):  # two: which one is read cannot be told
            return None
        which = [places.index(x.data_ptr()) for x in a.entries]
        found = [tables[n] for n in which]
        if any(x.numel() != y.numel() for x, y in zip(found, a.entries, strict=True)):
            return None
        return cls(a, found, which)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tables: Sequence[Tensor]) -> Tensor:
        """As `kernel.attention`, of tensors laid out as those of the first call, which is not looked at again."""
        if torch.is_grad_enabled():
            for x in (q, k, v, *tables):
                if x.requires_grad:
                    return _Attention.apply(self, q, k, v, *tables)  # pyright: ignore[reportReturnType]
        return self.forward(q, k, v, tables)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Sequence[Tensor], lse: Tensor | None = None
    ) -> Tensor:
        """`lse`: to be filled."""
        out = torch.empty_strided(*self.out, dtype=self.dtype)
        words = self._filled(self.forward_words, q, k, v, tables, out, lse)
        kernel.start("whereformer_forward", words.buffer_info()[0])
        return out

    def backward(
        self,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of q, k, v, and of the tables that want one."""
        words = self._filled(self.backward_words, q, k, v, tables, out, lse)
        words[GRAD_OUT] = grad_out.data_ptr()
        words[GRAD_OUT + 1], words[GRAD_OUT + 2], words[GRAD_OUT + 3], _ = grad_out.stride()
        found: list[Tensor | None] = []
        for at, layout in self.gradients:
            gradient = torch.empty_strided(*layout, dtype=self.dtype)
            words[at] = gradient.data_ptr()
            found.append(gradient)
        for n, (at, layout) in enumerate(self.gradients_of_entries):
            gradient = torch.empty_strided(*layout, dtype=torch.float32) if wanted[n] else None
            words[at] = 0 if gradient is None else gradient.data_ptr()
            found.append(gradient)
        kernel.start("whereformer_backward", words.buffer_info()[0])
        return found

    def _filled(
        self,
        words: "array[int]",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Sequence[Tensor],
        out: Tensor,
        lse: Tensor | None,
    ) -> "array[int]":
        """A copy, with what is new in both passes."""
        words = words[:]
        words[THREADS] = torch.get_num_threads()
        words[Q], words[K], words[V], words[OUT] = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        words[LSE] = 0 if lse is None else lse.data_ptr()
        words[LOOKUPS] = words.buffer_info()[0] + BEHIND
        for n, x in enumerate(tables):
            words[self.entries[n]] = x.data_ptr()
        return words

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, tables: Sequence[Tensor]) -> Arguments:
        """What `kernel.attention` takes for the same call."""
        queries, keys, head_dim, half, turns, lookups, maps, scales = self.rest
        entries = [x.reshape(shape) for x, shape in zip(tables, self.shapes, strict=True)]
        return Arguments(q, k, v, queries, keys, head_dim, half, turns, lookups, maps, entries, None, None, scales)


class _Attention(torch.autograd.Function):
    """A prepared call with its gradients."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        lse = torch.empty_strided(*prepared.lse, dtype=torch.float32)
        out = prepared.forward(q, k, v, tables, lse)
        ctx.prepared = prepared
        ctx.save_for_backward(out, lse, q, k, v, *tables)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _, *wanted = ctx.needs_input_grad
        if grad_out is None:
            return (None,) * (1 + len(wanted))
        kernel.refuse_many(grad_out)
        prepared, saved = ctx.prepared, ctx.saved_tensors
        out, lse, q, k, v, *tables = saved
        if grad_out.stride(-1) == 1 and not torch.is_grad_enabled() and kernel.unseen((grad_out, *saved)):
            return (None, *prepared.backward(grad_out, out, lse, q, k, v, tables, wanted[3:]))
        a = prepared.arguments(q, k, v, tables)
        *found, entries = kernel.backward(grad_out, out, lse, a, wanted[3:])
        for gradient, x, wants in zip(entries, tables, wanted[3:], strict=True):
            found.append(gradient.reshape(x.shape) if wants else None)
        return (None, *found)
