"""Tensors that follow from sizes and options alone, kept from one call to the next."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar

import torch

T = TypeVar("T")

MOST = 128
"""How many are kept; the oldest goes first."""

_found: dict[Hashable, Any] = {}
_lock = Lock()


def kept(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns, which nobody may change: made once for each key.

    Graphs, modes and transforms make their own, as tensors that only pretend must not be found afterwards.

    Args:
        key: all that the result depends on, and whose it is.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return make()
    found = _found.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # or it could not be used in training afterwards
            found = make()
        with _lock:
            if len(_found) >= MOST:
                _found.pop(next(iter(_found)))
            _found[key] = found
    return found
