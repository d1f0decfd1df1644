"""Calls of attention like one before: what was checked, said and packed then need not be so again."""

from collections.abc import Hashable, Sequence
from operator import is_
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor, float32
from torch._C import _is_any_autocast_enabled
from torch.nn import Parameter

from whereformer.backends.call import Attend, Call, forward_mode, unwatched
from whereformer.backends.cpu import Ready
from whereformer.backends.prepared import Prepared
from whereformer.encoding import PositionEncoding
from whereformer.forms import Forms
from whereformer.grid import Grid

MOST = 16
"""How many kinds of calls are kept, of each encoding; the oldest go first."""


class Known(NamedTuple):
    """What serves a kind of calls.

    Args:
        owners: the way from the encoding to the module that has the parameters that are read, by names.
        names: of these parameters, in the order in which `prepared` takes them.
        shapes: of these parameters.
    """

    prepared: Prepared
    owners: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[Any, ...]


class Before(NamedTuple):
    """What is kept with an encoding. No tensor of anybody's, as parameters are looked up by their names.

    Args:
        attributes: its own, of then; none of them may have been set since.
        calls: by kind; None: seen once.
    """

    attributes: tuple[object, ...]
    calls: dict[Hashable, Known | None]


_silent = Before((), {})
"""Of calls with no encoding."""

_lock = Lock()


def kind(
    q: Tensor, k: Tensor, v: Tensor, grid: object, encodings: Sequence[PositionEncoding], backend: object
) -> Hashable | None:
    """All that decides what is done, but what `attention` looks at; None: of a kind that is not kept."""
    if not unwatched() or _is_any_autocast_enabled() or forward_mode():
        return None
    if not (type(q) is type(k) is type(v) is Tensor and type(grid) is Grid and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if encodings and (len(encodings) > 1 or not getattr(type(encodings[0]), "steady", False)):
        return None
    layouts = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype)
    return (*layouts, grid, backend)


def attention(
    kind: Hashable, q: Tensor, k: Tensor, v: Tensor, encodings: Sequence[PositionEncoding]
) -> Tensor | None:
    """As `whereformer.attention`; None: it has to be asked, as nothing is known of this kind of calls."""
    if not encodings:
        known = _silent.calls.get(kind)
        return None if known is None else known.prepared(q, k, v, ())
    module: Any = encodings[0]
    if (before := _before(module)) is None or (known := before.calls.get(kind)) is None:
        return None
    for owner in known.owners:
        if (module := module.__dict__["_modules"].get(owner)) is None:
            return None
    parameters = module.__dict__["_parameters"]  # what getattr finds too, in more places
    tables = [parameters.get(name) for name in known.names]
    for x, shape in zip(tables, known.shapes, strict=True):
        plain = type(x) is Parameter or type(x) is Tensor
        if not (plain and x.shape == shape and x.dtype is float32 and x.is_contiguous() and x.is_cpu):
            return None
    return known.prepared(q, k, v, tables)


def _before(encoding: PositionEncoding) -> Before | None:
    try:
        before: Before = encoding.said_before
    except AttributeError:
        return None
    now = tuple(encoding.__dict__.values())
    same = len(now) == len(before.attributes) and all(map(is_, now, before.attributes))
    return before if same else None


def keep(kind: Hashable, encodings: Sequence[PositionEncoding], attend: Attend, forms: Forms, call: Call) -> None:
    """Keep what can be of a call that was checked, if it is the second of its kind."""
    if not isinstance(attend, Ready):
        return
    before, named = _silent, {}
    for encoding in encodings:
        if (found := _before(encoding)) is None:
            found = encoding.said_before = Before(tuple(encoding.__dict__.values()), {})
        before, named = found, dict(encoding.named_parameters(remove_duplicate=False))
    known = None
    if kind in before.calls:
        if (prepared := attend.prepare(forms, call, list(named.values()))) is None:
            return
        ways = [list(named)[n].split(".") for n in prepared.tables]
        owners = {tuple(owners) for *owners, _ in ways}
        if len(owners) > 1:
            return
        shapes = tuple(shape for shape, _ in prepared.layouts[3:])
        known = Known(prepared, next(iter(owners), ()), tuple(name for *_, name in ways), shapes)
    with _lock:
        while len(before.calls) >= MOST and kind not in before.calls:
            before.calls.pop(next(iter(before.calls)))
        before.calls[kind] = known
