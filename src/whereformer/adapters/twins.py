"""What of a model follows from the size of its images: found by building it twice, without memory."""

from collections.abc import Callable, Iterator, Sequence
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
            name, said = type(model).__name__, " ".join(str(error).split())
            if isinstance(error, TypeError) and "keyword" in said and "img_size" in said:
                said = "it is made for no size, and takes images of any as it is"
            raise InputError(f"resize: {name} cannot be built for {new}: {said}") from error
    modules = dict(model.named_modules())
    missing = (here.keys() ^ there.keys()) | (here.keys() - modules.keys())
    if missing:
        raise InputError(
            f"resize: {type(model).__name__} has other modules at another size: {sorted(missing)[:3]}"
        )
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
def unchanged_on_error(model: nn.Module, beside: Sequence[object] = ()) -> Iterator[None]:
    """If anything fails inside, all modules, and objects beside them, are as they were: not numbers in place."""
    everything: list[Any] = [*model.modules(), *beside]
    kept = [(one, _copied(vars(one))) for one in everything]
    try:
        yield
    except BaseException:
        for one, attributes in kept:
            vars(one).clear()
            vars(one).update(attributes)
        raise


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in attributes.items()}


def _copy(value: Any) -> Any:
    """Of what may be changed in place: registers of a module, and lists of facts."""
    if isinstance(value, list):
        return [_copy(one) for one in value]
    return value.copy() if isinstance(value, dict) else value
