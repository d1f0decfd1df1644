"""Attention with positions: the definition, and the switch to a faster backend."""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor

from whereformer import backends
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import Forms
from whereformer.grid import Grid
from whereformer.mask import Mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    encodings: Iterable[PositionEncoding] = (),
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of tokens that lie on a grid, with what `encodings` say about where they are.

    Args:
        q, k, v: [batch, heads, tokens, head_dim], of one dtype; q is not yet scaled.
        grid: where the tokens are.
        encodings: whose rotations, biases and value terms take part, in this order; what they say of tokens
            comes before a block, not here.
        mask: broadcastable to [batch, heads, queries, keys]. Boolean: True where a query may attend to a key.
            Floating: added to the logits; −inf, or the lowest number of its dtype, forbids. A query with
            nothing to attend to gets zeros. Forbidden keys must still be finite numbers.
        dropout: probability of dropping an attention weight; 0 outside of training.
        backend: "reference" (the definition), "sdpa" (torch's scaled_dot_product_attention), or "auto", the
            fastest that can serve. An explicit backend that cannot serve raises.

    Returns:
        [batch, heads, tokens, head_dim].

    >>> import torch
    >>> q = k = v = torch.ones(1, 2, 7, 4)
    >>> attention(q, k, v, Grid(2, 3, prefix=1)).shape
    torch.Size([1, 2, 7, 4])
    """
    encodings = _encodings(encodings)
    _check(q, k, v, grid, encodings, dropout)
    allowed = None if mask is None else Mask.read(mask, (*q.shape[:-1], k.shape[-2]))
    q = q * q.shape[-1] ** -0.5
    forms = Forms(
        rotations=tuple(form for e in encodings for form in e.rotations(grid)),
        biases=tuple(form for e in encodings for form in e.biases(q, k, grid)),
        values=tuple(form for e in encodings for form in e.values(v, grid)),
    )
    for rotate in forms.rotations:
        if rotate.angles.shape[-2] != grid.patches:
            raise InputError(f"rotation by angles {tuple(rotate.angles.shape)}, expected {grid.patches} patches")
    attend = backends.choose(backend, forms) or reference
    return attend(q, k, v, forms, allowed, dropout)


def reference(q: Tensor, k: Tensor, v: Tensor, forms: Forms, mask: Mask | None, dropout: float) -> Tensor:
    """The definition of attention with positions; every backend must agree with it. q is already scaled."""
    turned_q, turned_k = q, k
    for rotate in forms.rotations:
        turned_q, turned_k = rotate(turned_q), rotate(turned_k)
    logits = turned_q @ turned_k.mT
    for bias in forms.biases:
        logits = logits + bias.dense().to(logits.dtype)
    weights = logits.softmax(-1) if mask is None else mask.softmax(logits)
    weights = F.dropout(weights, dropout)
    out = weights @ v
    for term in forms.values:
        out = out + term.dense(weights).to(out.dtype)
    return out


def _encodings(encodings: Iterable[PositionEncoding]) -> tuple[PositionEncoding, ...]:
    if isinstance(encodings, PositionEncoding):
        raise InputError(f"encodings: one {type(encodings).__name__}, expected a sequence: [encoding]")
    found = tuple(encodings) if isinstance(encodings, Iterable) else (encodings,)
    for encoding in found:
        if not isinstance(encoding, PositionEncoding):
            raise InputError(f"encodings: {encoding!r}, expected PositionEncoding modules")
    return found


def _check(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, encodings: tuple[PositionEncoding, ...], dropout: float
) -> None:
    if not isinstance(grid, Grid):
        raise InputError(f"grid={grid!r}, expected a whereformer.Grid")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
            raise InputError(f"{name} is {getattr(x, 'dtype', type(x).__name__)}, expected a floating tensor")
        if x.ndim != 4:
            raise InputError(f"{name} {tuple(x.shape)}, expected [batch, heads, tokens, head_dim]")
        if x.shape != q.shape or x.dtype != q.dtype:
            raise InputError(
                f"{name} is {tuple(x.shape)} {x.dtype}, but q is {tuple(q.shape)} {q.dtype}: expected the same"
            )
        grid.check(x.shape[-2], name)
    _, heads, _, head_dim = q.shape
    for e in encodings:
        if (e.num_heads, e.head_dim) != (heads, head_dim):
            raise InputError(
                f"{type(e).__name__} was built for {e.num_heads} heads of {e.head_dim} features,"
                f" but q has {heads} of {head_dim}"
            )
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"dropout={dropout!r}, expected a probability, 0 <= dropout < 1")
