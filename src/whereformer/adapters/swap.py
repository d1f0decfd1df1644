"""Give one module a new behaviour: the instance gets a subclass of its own class, the class stays as it is."""

import functools
from typing import Any

from torch import nn


class Equipped:
    """Base of behaviours that `swap_class` mixes in; instances copy and pickle like those of ordinary classes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        behaviour, original = type(self).__bases__
        return _blank, (behaviour, original), self.__dict__


def swap_class(module: nn.Module, behaviour: type[Equipped]) -> None:
    """Let `module` behave as `behaviour` before its own class."""
    module.__class__ = _mixed(behaviour, type(module))


@functools.cache
def _mixed(behaviour: type[Equipped], original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Equipped{original.__name__}", (behaviour, original), {"__module__": original.__module__})


def _blank(behaviour: type[Equipped], original: type[nn.Module]) -> nn.Module:
    cls = _mixed(behaviour, original)
    return cls.__new__(cls)
