"""Find the host of a model."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from whereformer.adapters.host import Host
from whereformer.errors import InputError
from whereformer.grid import Grid

LIBRARIES = {
    "timm": "whereformer.adapters.timm",
    "torch": "whereformer.adapters.multihead",
    "transformers": "whereformer.adapters.transformers",
    "torchvision": "whereformer.adapters.torchvision",
}
"""Which of our modules knows the models of which library; each has `HOSTS`."""

Hosts = dict[type[nn.Module], Callable[..., Host]]
"""From a class of models to the function that describes one."""

GridHosts = dict[type[nn.Module], Callable[[Any, Grid], Host]]
"""The same for those that do not know their grid."""


def host_of(model: nn.Module, grid: Grid | None = None, **options: Any) -> Host:
    """What `equip` has to know of a model.

    Args:
        grid: the home grid, for a model that does not know it.
        options: what else decides, of transformers' models: a `Host.options`.

    Raises:
        InputError: it is of no known kind, has nothing that takes encodings, or is wrapped in something that must
            come after.
    """
    refuse_wrapped(model, "equip")
    name = type(model).__name__
    for kind in type(model).__mro__:
        library = LIBRARIES.get(kind.__module__.partition(".")[0])
        make = None if library is None else _hosts(library).get(kind)
        if make is None:
            continue
        if options and library != LIBRARIES["transformers"]:
            raise InputError(f"equip: {next(iter(options))} given, which a {name} does not have")
        if library != LIBRARIES["torch"]:
            if grid is not None:
                raise InputError(f"equip: grid={grid}, but {name} knows its own")
            host = make(model, **options)
            if not host.stages:
                raise InputError(f"equip: no block of this {name} takes an encoding")
            return host
        if not isinstance(grid, Grid):
            raise InputError(
                f"equip: {name} does not know where its tokens are; grid={grid!r}, expected Grid(...)"
            )
        return make(model, grid)
    raise InputError(
        f"equip: {name} is none of the models that are known; describe its parts: host=Host(...),"
        " as docs/equip.md shows"
    )


def _hosts(library: str) -> dict[type[nn.Module], Callable[..., Host]]:
    try:
        return import_module(library).HOSTS
    except ModuleNotFoundError as error:
        raise InputError(f'equip needs {error.name}: pip install "whereformer[lab]"') from None


def refuse_wrapped(model: nn.Module, asked_by: str) -> None:
    """Raise if something looks at parameters and code around the model that must find encodings there already."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(f"{asked_by}: {model!r}, expected a module")
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise InputError(f"{asked_by}: the model is wrapped in {name}; give model.module, before DDP")
    if hasattr(model, "_orig_mod"):
        raise InputError(f"{asked_by}: the model is compiled; give model._orig_mod, before torch.compile")
    if any(kind.__module__.startswith("torch.distributed") for kind in type(model).__mro__):
        raise InputError(f"{asked_by}: the model is sharded ({name}); do it before FSDP")
    if name.startswith("Peft"):
        raise InputError(f"{asked_by}: the model is inside a {name}; give model.get_base_model()")
