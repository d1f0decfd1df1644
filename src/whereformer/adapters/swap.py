"""Give one module a new behaviour: the instance gets a subclass of its own class, the class stays as it is."""

import functools
from typing import Any

from torch import Tensor, nn


class Equipped:
    """Base of behaviours that `swap_class` mixes in; instances copy and pickle like those of ordinary classes."""

    @staticmethod
    def named(original: type[nn.Module]) -> str:
        """What the class of a module of class `original` is called that behaves so."""
        return f"Equipped{original.__name__.removeprefix('Equipped')}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, tuple(_layers(type(self))), self.__dict__


def swap_class(module: nn.Module, behaviour: type[Equipped], **attributes: Any) -> None:
    """Let `module` behave as `behaviour` before its own class, which needs these attributes."""
    brought = tuple(name for name in attributes if name not in module.__dict__)
    module.__dict__["_brought"] = brought, module.__dict__.get("_brought")
    for name, value in attributes.items():
        setattr(module, name, value)
    module.__class__ = _mixed(behaviour, type(module))


def swap_back(module: nn.Module) -> None:
    """The reverse of `swap_class`, also of one that did not come to its end."""
    names, before = module.__dict__["_brought"]
    if len(_layers(type(module))) > 1 + _depth(before):
        module.__class__ = type(module).__bases__[1]
    for name in names:
        put(module, name, MISSING)
    if before is None:
        del module.__dict__["_brought"]
    else:
        module.__dict__["_brought"] = before


def _depth(brought: Any) -> int:
    """How many times a class was swapped."""
    return 0 if brought is None else 1 + _depth(brought[1])


def swap_all_back(module: nn.Module) -> None:
    """Until it is of its own class."""
    while "_brought" in module.__dict__:
        swap_back(module)


def is_outermost(module: nn.Module) -> bool:
    """Whether nothing changed the module's class after `swap_class`."""
    return issubclass(type(module).__bases__[0], Equipped)


MISSING = object()
"""In the place of an attribute that is not there."""


def look(module: nn.Module, name: str) -> Any:
    """What the instance itself has under that name, `MISSING` if nothing."""
    own = module.__dict__
    places = (own, *(own[register] for register in _KINDS))
    return next((place[name] for place in places if name in place), MISSING)


def put(module: nn.Module, name: str, value: Any) -> Any:
    """Set an attribute of any kind to a value of any kind, or to `MISSING`; returns what was there.

    A parameter, buffer or module keeps its place in their order while something of another kind stands for it.
    """
    own, kinds = module.__dict__, _KINDS.items()
    register, kind = next(((own[r], kind) for r, kind in kinds if name in own[r]), (own, object))
    before = own.pop(name) if name in own else register.get(name, MISSING)
    if register is not own and (value is None or isinstance(value, kind)):
        register[name] = value
    elif register is not own and value is MISSING:
        del register[name]
    elif register is not own:
        register[name] = None
        own[name] = value  # is looked at first
    elif value is not MISSING:
        setattr(module, name, value)
    return before


_KINDS = {"_parameters": nn.Parameter, "_buffers": Tensor, "_modules": nn.Module}


@functools.cache
def _mixed(behaviour: type[Equipped], original: type[nn.Module]) -> type[nn.Module]:
    return type(behaviour.named(original), (behaviour, original), {"__module__": original.__module__})


def _layers(cls: type) -> list[type]:
    """The class under all behaviours, then these, the innermost first."""
    if not issubclass(cls, Equipped):
        return [cls]
    behaviour, original = cls.__bases__
    return [*_layers(original), behaviour]


def _blank(cls: type[nn.Module], *behaviours: type[Equipped]) -> nn.Module:
    for behaviour in behaviours:
        cls = _mixed(behaviour, cls)
    return cls.__new__(cls)
