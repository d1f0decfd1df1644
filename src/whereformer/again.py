"""Calls of attention like one before: what was checked, said and packed then need not be so again."""

from collections.abc import Hashable, Sequence
from operator import is_
from threading import Lock
from typing import Any, NamedTuple

from torch import Size, Tensor, float32, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import forward_ad

from whereformer.backends.call import Attend, Call, unwatched
from whereformer.backends.cpu import Ready
from whereformer.backends.kernel import plain
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
        parameters: their names and shapes, in the order in which `prepared` takes them.
    """

    prepared: Prepared
    owners: tuple[str, ...]
    parameters: tuple[tuple[str, Size], ...]


class Before(NamedTuple):
    """What is kept with an encoding. No tensor of anybody's, as parameters are looked up by their names.

    Args:
        attributes: its own, of then; none of them may have been set since.
        calls: by kind; or how many of the kind were seen.
    """

    attributes: tuple[object, ...]
    calls: dict[Hashable, Known | int]


_silent = Before((), {})
"""Of calls with no encoding."""

_lock = Lock()


def known(
    q: Tensor, k: Tensor, v: Tensor, grid: object, encodings: Sequence[PositionEncoding], backend: object
) -> tuple[Prepared, Sequence[Tensor]] | None:
    """What serves this call, and the tables it takes; None: the call is to be checked and said."""
    if (kind := _kind(q, k, v, grid, encodings, backend)) is None:
        return None
    before = _before(encodings[0]) if encodings else _silent
    if before is None or type(found := before.calls.get(kind)) is not Known:
        return None
    prepared, owners, parameters = found
    tables: list[Tensor] = []
    if parameters:
        module: Any = encodings[0]
        for owner in owners:
            if (module := module.__dict__["_modules"].get(owner)) is None:
                return None
        held = module.__dict__["_parameters"]  # what getattr finds too, in more places
        for name, shape in parameters:
            x = held.get(name)
            if not (plain(x) and x.shape == shape and x.dtype is float32 and x.is_contiguous()):
                return None
            tables.append(x)
    return prepared, tables


def keep(
    grid: Grid, encodings: Sequence[PositionEncoding], backend: str, attend: Attend, forms: Forms, call: Call
) -> None:
    """Keep what can be of a call that was checked and said, without mask and dropout."""
    kind = _kind(call.q, call.k, call.v, grid, encodings, backend)
    if kind is None or not isinstance(attend, Ready):
        return
    before, named = _silent, {}
    for encoding in encodings:
        if (found := _before(encoding)) is None:
            found = encoding.said_before = Before(tuple(encoding.__dict__.values()), {})
        before, named = found, dict(encoding.named_parameters(remove_duplicate=False))
    seen = before.calls.get(kind, 0)
    now = seen if isinstance(seen, Known) else seen + 1
    if now in (2, 4, 8, 16):  # not at once, as many kinds are seen but once; and what could not be may be later
        now = _prepared(attend.prepare(forms, call, list(named.values())), list(named)) or now
    with _lock:
        while len(before.calls) >= MOST and kind not in before.calls:
            before.calls.pop(next(iter(before.calls)))
        before.calls[kind] = now


def _prepared(prepared: Prepared | None, names: Sequence[str]) -> Known | None:
    """None also if its tables are of several modules."""
    if prepared is None:
        return None
    ways = [names[n].split(".") for n in prepared.tables]
    owners = {tuple(way[:-1]) for way in ways}
    if len(owners) > 1:
        return None
    shapes = (shape for shape, _ in prepared.layouts[3:])
    parameters = tuple(zip((way[-1] for way in ways), shapes, strict=True))
    return Known(prepared, next(iter(owners), ()), parameters)


def _kind(
    q: Tensor, k: Tensor, v: Tensor, grid: object, encodings: Sequence[PositionEncoding], backend: object
) -> Hashable | None:
    """All that decides what is done, but what is looked at in each call; None: of a kind that is not kept."""
    if encodings and (len(encodings) > 1 or not getattr(type(encodings[0]), "steady", False)):
        return None
    if type(backend) is not str or not unwatched() or _is_any_autocast_enabled() or forward_ad._current_level >= 0:
        return None
    if is_grad_enabled() and _top_saved_tensors_default_hooks(False):
        return None  # whoever computes a call again, as checkpointing does, wants the same tensors saved each time
    if not (type(q) is type(k) is type(v) is Tensor and type(grid) is Grid and plain(q) and plain(k) and plain(v)):
        return None
    layouts = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype)
    return (*layouts, grid, backend)


def _before(encoding: PositionEncoding) -> Before | None:
    try:
        before: Before = encoding.said_before
    except AttributeError:
        return None
    now = tuple(encoding.__dict__.values())
    same = len(now) == len(before.attributes) and all(map(is_, now, before.attributes))
    return before if same else None
