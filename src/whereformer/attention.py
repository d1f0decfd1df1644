"""Attention with positions: the definition, and the switch to a faster backend."""

from collections.abc import Iterable
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor

from whereformer import again, backends
from whereformer.backends import Choice
from whereformer.backends.call import Call
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import Forms
from whereformer.grid import Grid, Points
from whereformer.images import Images
from whereformer.mask import Mask

Where = TypeVar("Where", bound=Grid | Images)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid | Images,
    encodings: Iterable[PositionEncoding] = (),
    *,
    keys: Grid | Images | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of tokens that lie on a grid, with what `encodings` say about where they are.

    Args:
        q, k, v: [batch, heads, tokens, head_dim], of one dtype; q is not yet scaled. k and v have the tokens of
            `keys`. v may have another head_dim, if no encoding speaks of values.
        grid: where the tokens are; or, for several images in one tensor, `Packed` or `Padded`, and attention then
            stays within each image.
        encodings: whose rotations, biases and value terms take part, in this order; what they say of tokens
            comes before a block, not here.
        keys: where the keys and values are, if not on the grid of the queries (cross-attention). Both count
            patches from one origin, in one unit.
        mask: broadcastable to [batch, heads, queries, keys]. Boolean: True where a query may attend to a key.
            Floating: added to the logits; −inf, or the lowest number of its dtype, forbids. A query with
            nothing to attend to gets zeros. Forbidden keys must still be finite numbers.
        dropout: probability of dropping an attention weight; 0 outside of training.
        backend: "reference" (the definition), "cpu" (the compiled kernel), "sdpa" (torch's
            scaled_dot_product_attention), or "auto", the fastest that can serve: `explain` tells which. An
            explicit backend that cannot serve raises.

    Returns:
        [batch, heads, tokens, head_dim], of v.

    >>> import torch
    >>> q = k = v = torch.ones(1, 2, 7, 4)
    >>> attention(q, k, v, Grid(2, 3, prefix=1)).shape
    torch.Size([1, 2, 7, 4])
    """
    if type(encodings) is not tuple and type(encodings) is not list:
        encodings = _encodings(encodings)
    plain = (keys is None or keys is grid) and mask is None and dropout == 0.0 and type(dropout) is float
    if plain and (known := again.known(q, k, v, grid, encodings, backend)) is not None:
        prepared, tables = known
        return prepared(q, k, v, tables)
    encodings, keys = _taken_in(q, k, v, grid, encodings, keys)
    if isinstance(grid, Images) or isinstance(keys, Images):
        return _of_each(q, k, v, grid, keys, encodings, mask, dropout, backend)
    forms, call = said(q, k, v, grid, keys, encodings, mask, dropout)
    attend = backends.choose(backend, forms, call) or reference
    if plain:
        again.keep(grid, encodings, backend, attend, forms, call)
    return attend(q, k, v, forms, call.mask, dropout)


def attention_weights(
    q: Tensor,
    k: Tensor,
    grid: Grid,
    encodings: Iterable[PositionEncoding] = (),
    *,
    keys: Grid | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """What `attention` multiplies values with: [batch, heads, queries, keys], each row a distribution.

    Args:
        q, k, grid, encodings, keys, mask: as in `attention`, of one image in a tensor.
    """
    encodings, keys = _taken_in(q, k, k, grid, encodings, keys)
    forms, call = said(q, k, k, grid, keys, encodings, mask, 0.0)
    return _weights(q, k, forms, call.mask)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    encodings: Iterable[PositionEncoding] = (),
    *,
    keys: Grid | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Choice:
    """Which backend `attention` takes if it may choose, and why no faster one; `print` it.

    Args:
        q, k, v, grid, encodings, keys, mask, dropout: as in `attention`, of one image in a tensor.

    >>> import torch
    >>> q = torch.ones(1, 2, 7, 4, dtype=torch.float64)
    >>> print(explain(q, q, q, Grid(2, 3, prefix=1)))
    sdpa (not cpu: float64, where it computes in float32 and bfloat16)
    """
    encodings, keys = _taken_in(q, k, v, grid, encodings, keys)
    return backends.choice("auto", *said(q, k, v, grid, keys, encodings, mask, dropout))


def encode(x: Tensor, grid: Grid | Images, encodings: Iterable[PositionEncoding]) -> Tensor:
    """Tokens before a block, with what `encodings` say about where they are.

    Args:
        x: [batch, tokens, dim].
        grid: where the tokens are: a grid, or several images in one tensor.
    """
    encodings = _encodings(encodings)
    _check_tensor("x", x, 3, "[batch, tokens, dim]")
    if isinstance(grid, Images):
        return grid.merge([encode(x, g, encodings) for x, g in zip(grid.split(x, "x"), grid.grids, strict=True)])
    _check_grid("grid", grid)
    grid.check(x.shape[1], "x")
    if isinstance(grid, Points):
        grid.check_batch(x.shape[0], "x")
    for encoding in encodings:
        _check_home(encoding, grid)
        if x.shape[-1] != encoding.dim:
            raise InputError(
                f"{type(encoding).__name__} was built for {encoding.dim} features a token, but x has {x.shape[-1]}"
            )
        x = encoding.tokens(x, grid)
    return x


def reference(q: Tensor, k: Tensor, v: Tensor, forms: Forms, mask: Mask | None, dropout: float) -> Tensor:
    """The definition of attention with positions; every backend must agree with it. q is not yet scaled."""
    return weighted(F.dropout(_weights(q, k, forms, mask), dropout), v, forms)


def logits_of(q: Tensor, k: Tensor, forms: Forms) -> Tensor:
    """What the softmax is taken of, without a mask: [batch, heads, queries, keys]."""
    turned_q, turned_k = forms.turn(q, k)
    logits = turned_q * q.shape[-1] ** -0.5 @ turned_k.mT
    for bias in forms.biases:
        logits = logits + bias.dense().to(logits.dtype)
    return logits


def weighted(weights: Tensor, v: Tensor, forms: Forms) -> Tensor:
    """Values by weights [batch, heads, queries, keys], with the terms of the values."""
    out = weights @ v
    for term in forms.values:
        out = out + term.dense(weights).to(out.dtype)
    return out


def _weights(q: Tensor, k: Tensor, forms: Forms, mask: Mask | None) -> Tensor:
    logits = logits_of(q, k, forms)
    return logits.softmax(-1) if mask is None else mask.softmax(logits)


def _of_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid | Images,
    keys: Grid | Images,
    encodings: tuple[PositionEncoding, ...],
    mask: Tensor | None,
    dropout: float,
    backend: str,
) -> Tensor:
    """Attention within each of several images."""
    if not (isinstance(grid, Images) and isinstance(keys, Images) and len(grid.grids) == len(keys.grids)):
        raise InputError(f"queries on {grid} and keys on {keys}, expected as many images on both sides")
    masks = [None] * len(grid.grids)
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise InputError(f"mask={mask!r}, expected a tensor")
        masks = grid.split_mask(mask, keys, (*q.shape[:-1], k.shape[-2]))
    parts = zip(grid.split(q, "q"), keys.split(k, "k"), keys.split(v, "v"), strict=True)
    outs = [
        attention(*qkv, queries, encodings, keys=keys, mask=mask, dropout=dropout, backend=backend)
        for qkv, queries, keys, mask in zip(parts, grid.grids, keys.grids, masks, strict=True)
    ]
    return grid.merge(outs)


def _taken_in(
    q: Tensor, k: Tensor, v: Tensor, grid: Where, encodings: Iterable[PositionEncoding], keys: Where | None
) -> tuple[tuple[PositionEncoding, ...], Where]:
    """The encodings, and where the keys are: `grid` itself if they are there too."""
    found = _encodings(encodings)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, 4, "[batch, heads, tokens, head_dim]")
    return found, grid if keys is None or keys == grid else keys


def said(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Grid,
    keys: Grid,
    encodings: tuple[PositionEncoding, ...],
    mask: Tensor | None,
    dropout: float,
) -> tuple[Forms, Call]:
    """What the encodings say, and what a backend gets beside it; all of it checked."""
    _check(q, k, v, queries, keys, encodings, dropout)
    allowed = None if mask is None else Mask.read(mask, (*q.shape[:-1], k.shape[-2]))
    return _forms(q, k, v, queries, keys, encodings), Call(q, k, v, allowed, dropout)


def _forms(
    q: Tensor, k: Tensor, v: Tensor, queries: Grid, keys: Grid, encodings: tuple[PositionEncoding, ...]
) -> Forms:
    """What the encodings say."""
    rotations = tuple(turn for e in encodings for turn in e.rotations(queries, q.device))
    forms = Forms(
        rotations=rotations,
        biases=tuple(bias for e in encodings for bias in e.biases(q, k, queries, keys)),
        values=tuple(term for e in encodings for term in e.values(v, queries, keys)),
        key_rotations=(
            None if keys is queries else tuple(turn for e in encodings for turn in e.rotations(keys, k.device))
        ),
    )
    for turns, grid in ((forms.rotations, queries), (forms.key_rotations or (), keys)):
        for turn in turns:
            if turn.patches != grid.patches:
                raise InputError(f"a rotation of {turn.patches} patches, expected {grid.patches}, on {grid}")
    return forms


def _encodings(encodings: Iterable[PositionEncoding]) -> tuple[PositionEncoding, ...]:
    if isinstance(encodings, PositionEncoding):
        raise InputError(f"encodings: one {type(encodings).__name__}, expected a sequence: [encoding]")
    found = tuple(encodings) if isinstance(encodings, Iterable) else (encodings,)
    for encoding in found:
        if not isinstance(encoding, PositionEncoding):
            raise InputError(f"encodings: {encoding!r}, expected PositionEncoding modules")
    return found


def _check_tensor(name: str, x: object, axes: int, shape: str) -> None:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        raise InputError(f"{name} is {getattr(x, 'dtype', type(x).__name__)}, expected a floating tensor")
    if x.ndim != axes:
        raise InputError(f"{name} {tuple(x.shape)}, expected {shape}")


def _check_grid(name: str, grid: object) -> None:
    if not isinstance(grid, Grid):
        raise InputError(f"{name}={grid!r}, expected a whereformer.Grid, or Packed or Padded")


def _check_home(encoding: PositionEncoding, grid: Grid) -> None:
    if grid.axes != encoding.grid.axes:
        name = type(encoding).__name__
        raise InputError(f"{name} was built for {encoding.grid}, which has other axes than {grid}")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Grid,
    keys: Grid,
    encodings: tuple[PositionEncoding, ...],
    dropout: float,
) -> None:
    shape, dtype = q.shape, q.dtype
    for name, x, grid in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        found = x.shape
        wanted = (*shape[:2], shape[2] if keys is queries else found[2], found[3] if x is v else shape[3])
        if found != wanted or x.dtype != dtype:
            raise InputError(
                f"{name} is {tuple(found)} {x.dtype}, but q is {tuple(shape)} {dtype}: expected the same"
                + (" but for the tokens" if keys is not queries else "")
            )
        if x is not q and keys is queries:
            continue  # of one shape with q, on one grid
        _check_grid("grid" if grid is queries else "keys", grid)
        grid.check(found[-2], name)
        if isinstance(grid, Points):
            grid.check_batch(found[0], name)
    _, heads, _, head_dim = shape
    for e in encodings:
        _check_home(e, queries)
        _check_home(e, keys)
        if queries is not keys and not e.crosses:
            raise InputError(
                f"{type(e).__name__} says nothing of queries on {queries} and keys on {keys}: two grids"
            )
        if (e.num_heads, e.head_dim) != (heads, head_dim):
            raise InputError(
                f"{type(e).__name__} was built for {e.num_heads} heads of {e.head_dim} features,"
                f" but q has {heads} of {head_dim}"
            )
        if v.shape[-1] != head_dim and "values" in e.moments():
            raise InputError(
                f"{type(e).__name__} speaks of values of {head_dim} features a head, but v has {v.shape[-1]}"
            )
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"dropout={dropout!r}, expected a probability, 0 <= dropout < 1")
