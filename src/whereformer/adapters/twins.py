"""What of a model follows from the size of its images: found by building it twice, without memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whereformer.errors import InputError

PLAIN = (bool, int, float, str, tuple, list, torch.Size, type(None))


def move_like_twins(model: nn.Module, build: Callable[[Any], nn.Module], home: Any, new: Any) -> None:
    """Change in a model what differs between `build(home)` and `build(new)`.

    Numbers and sizes are set; buffers that are not saved are filled anew; parameters of another shape are made
    empty, for tables to be read into.

    Args:
        build: gives a model of the same architecture for a size.

    Raises:
        InputError: the architecture cannot be built so, or differs in more.
    """
    with torch.device("meta"):
        try:
            here, there = (dict(build(size).named_modules()) for size in (home, new))
        except Exception as error:  # whatever the architecture's own code raises for a size it does not take
            name = type(model).__name__
            raise InputError(f"resize: {name} cannot be built for {new}: {' '.join(str(error).split())}") from error
    modules = dict(model.named_modules())
    missing = (here.keys() ^ there.keys()) | (here.keys() - modules.keys())
    if missing:
        raise InputError(f"resize: {type(model).__name__} has other modules at another size: {sorted(missing)[:3]}")
    refill = []
    for name, twin in there.items():
        module = modules[name]
        for attribute, value in _plain(twin):
            if value != dict(_plain(here[name])).get(attribute):
                setattr(module, attribute, value)
        for key, parameter in twin._parameters.items():
            own = here[name]._parameters.get(key)
            if parameter is not None and own is not None and parameter.shape != own.shape:
                old = module.get_parameter(key)
                module._parameters[key] = nn.Parameter(old.new_empty(parameter.shape), old.requires_grad)
        for key, buffer in twin._buffers.items():
            own = here[name]._buffers.get(key)
            if buffer is not None and own is not None and buffer.shape != own.shape:
                module._buffers[key] = _empty(module, key, buffer)
                refill.append((name, module, key))
    for name, module, key in refill:
        _refill(name, module, key)


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, PLAIN):
            yield name, value


def _empty(module: nn.Module, key: str, buffer: Tensor) -> Tensor:
    old = module._buffers[key]
    return torch.empty(buffer.shape, dtype=buffer.dtype, device=None if old is None else old.device)


def _refill(name: str, module: nn.Module, key: str) -> None:
    """As timm's modules do after they were built without memory, and transformers' towers."""
    if key == "position_ids":
        buffer = module.get_buffer(key)
        buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
    elif hasattr(module, "_init_buffers"):
        module._init_buffers()  # pyright: ignore[reportCallIssue]
    else:
        raise InputError(f"resize: {name}.{key} follows the size, and {type(module).__name__} cannot fill it anew")


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """If anything fails inside, every module is as it was: attributes, parameters and buffers, not their numbers."""
    kept = [(module, _copied(vars(module))) for module in model.modules()]
    classes = [(module, type(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls in classes:
            module.__class__ = cls
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)
        raise


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}
