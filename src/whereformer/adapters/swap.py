"""Give one module a new behaviour: the instance gets a subclass of its own class, the class stays as it is."""

import functools
from typing import Any

from torch import Tensor, nn


class Equipped:
    """Base of behaviours that `swap_class` mixes in; instances copy and pickle like those of ordinary classes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        behaviour, original = type(self).__bases__
        return _blank, (behaviour, original), self.__dict__


def swap_class(module: nn.Module, behaviour: type[Equipped], **attributes: Any) -> None:
    """Let `module` behave as `behaviour` before its own class, which needs these attributes."""
    module.__class__ = _mixed(behaviour, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)
    module.__dict__["_brought"] = tuple(attributes)


def swap_back(module: nn.Module) -> None:
    """The reverse of `swap_class`."""
    for name in module.__dict__.pop("_brought"):
        delattr(module, name)
    module.__class__ = type(module).__bases__[1]


MISSING = object()
"""In the place of an attribute that is not there."""


def put(module: nn.Module, name: str, value: Any) -> Any:
    """Set an attribute of any kind to a value of any kind, or to `MISSING`; returns what was there."""
    for register, kind in (
        (module._parameters, nn.Parameter),
        (module._buffers, Tensor),
        (module._modules, nn.Module),
    ):
        if name in register and (value is None or isinstance(value, kind)):  # keeps its place in the order
            before, register[name] = register[name], value  # pyright: ignore[reportArgumentType]
            return before
    before = getattr(module, name) if _has(module, name) else MISSING
    if before is not MISSING:
        delattr(module, name)
    if value is not MISSING:
        setattr(module, name, value)
    return before


def _has(module: nn.Module, name: str) -> bool:
    """Whether the instance has it; what its class has stays there."""
    registers = (module._parameters, module._buffers, module._modules, module.__dict__)
    return any(name in register for register in registers)


@functools.cache
def _mixed(behaviour: type[Equipped], original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Equipped{original.__name__}", (behaviour, original), {"__module__": original.__module__})


def _blank(behaviour: type[Equipped], original: type[nn.Module]) -> nn.Module:
    cls = _mixed(behaviour, original)
    return cls.__new__(cls)
