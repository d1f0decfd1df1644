"""Find the host of a model."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from whereformer.adapters.host import Host
from whereformer.errors import InputError

LIBRARIES = {
    "timm": "whereformer.adapters.timm",
}
"""Which of our packages knows the models of which library; each has `HOSTS`, class -> function."""

Hosts = dict[type[nn.Module], Callable[[Any], Host]]


def host_of(model: nn.Module) -> Host:
    """What `equip` has to know of a model.

    Raises:
        InputError: it is of no known kind, or wrapped in something that must come after.
    """
    _refuse_wrapped(model)
    for kind in type(model).__mro__:
        library = LIBRARIES.get(kind.__module__.partition(".")[0])
        if library is None:
            continue
        hosts: Hosts = import_module(library).HOSTS
        if make := hosts.get(kind):
            return make(model)
    raise InputError(
        f"equip: {type(model).__name__} is none of the models that are known; describe its parts: host=Host(...),"
        " as docs/equip.md shows"
    )


def _refuse_wrapped(model: nn.Module) -> None:
    """Wrappers look at parameters and code once, so that encodings must be there before."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(f"equip: {model!r}, expected a module")
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise InputError(f"equip: the model is wrapped in {name}; equip model.module, before DDP")
    if hasattr(model, "_orig_mod"):
        raise InputError("equip: the model is compiled; equip model._orig_mod, before torch.compile")
    if any(kind.__module__.startswith("torch.distributed") for kind in type(model).__mro__):
        raise InputError(f"equip: the model is sharded ({name}); equip it before, then shard it")
