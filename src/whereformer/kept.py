"""Tensors that follow from sizes and options alone, kept from one call to the next."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.compiler import is_compiling

T = TypeVar("T")

MOST_NUMBERS = 1 << 24
"""How many numbers are kept in all, 64 MB in float32; the oldest go first."""

_found: dict[Hashable, tuple[Any, int]] = {}
_lock = Lock()


def watched() -> bool:
    """Whether a graph is being made, or a mode or a transform is on: tensors may only pretend to hold numbers."""
    return bool(
        is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
    )


def kept(key: Hashable, make: Callable[[], T], numbers: Callable[[T], int]) -> T:
    """What `make` returns, which nobody may change: made once for each key.

    Graphs, modes and transforms make their own, as tensors that only pretend must not be found afterwards.

    Args:
        key: all that the result depends on, and whose it is.
        numbers: how many numbers the result holds.
    """
    if watched():
        return make()
    if entry := _found.get(key):
        return entry[0]
    with torch.inference_mode(False), torch.no_grad():  # or it could not be used in training afterwards
        found = make()
    if (size := numbers(found)) <= MOST_NUMBERS:
        with _lock:
            _found[key] = found, size
            while sum(size for _, size in _found.values()) > MOST_NUMBERS:
                _found.pop(next(iter(_found)))
    return found
