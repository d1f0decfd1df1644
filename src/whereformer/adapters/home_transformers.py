"""transformers' models: as they would be built from a configuration with another image size."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig

from whereformer.adapters.homes import Home, Pair, original, pair
from whereformer.adapters.tables import Table, tables_of
from whereformer.adapters.twins import move_like_twins
from whereformer.errors import InputError


def home(model: nn.Module) -> Home:
    parts = list(_of_images(cast(Any, model).config))
    if not parts:
        raise InputError(f"resize: the configuration of {type(model).__name__} has no image_size and patch_size")
    return _home(parts[0])


def move(model: nn.Module, home: Home, new: Home, window: Pair | None) -> None:
    name = type(model).__name__
    if window is not None:
        raise InputError(f"resize: window={window}, but windows of transformers' models stay as they are")
    square = new.grid[0] == new.grid[1]
    if not square and any(hasattr(module, "generate_relative_position_index") for module in model.modules()):
        raise InputError(
            f"resize: a grid of {new.grid}, but transformers' {name} reads its bias tables as squares"
        )

    def build(size: Home) -> nn.Module:
        config = copy.deepcopy(cast(Any, model).config)
        for part in _of_images(config):
            _set(part, home, size)
        return cast(Any, original(model))(config)

    try:
        move_like_twins(model, build, home, new)
    except InputError as error:
        if not square and isinstance(error.__cause__, TypeError):  # they divide the size, which must be one number
            raise InputError(
                f"resize: a grid of {new.grid}, but transformers' {name} takes square images"
            ) from error
        raise
    for config in configs(model):
        _set(config, home, new)
    for module in model.modules():
        vars(module).pop("interpolate_pos_encoding", None)
        if not square and hasattr(module, "interpolate_pos_encoding"):
            for table in tables_of(module, grid=new.grid):
                if table.kind == "absolute":
                    vars(module)["interpolate_pos_encoding"] = OnItsGrid(module, table, new.patch)


@dataclass
class OnItsGrid:
    """In the place of a method of embeddings that takes their table for a square one."""

    module: nn.Module
    table: Table
    patch: Pair

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        grid = height // self.patch[0], width // self.patch[1]
        return self.table.read(self.module.get_parameter(self.table.name), self.table.on(grid))


def configs(model: nn.Module) -> list[PreTrainedConfig]:
    """All that speak of the images' size: those of the model and of its parts may be copies."""
    held = (getattr(module, "config", None) for module in model.modules())
    found = (part for config in held if isinstance(config, PreTrainedConfig) for part in _of_images(config))
    return list({id(part): part for part in found}.values())


def _of_images(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    if getattr(config, "image_size", None) is not None and getattr(config, "patch_size", None) is not None:
        yield config
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield from _of_images(part)


def _home(config: Any) -> Home:
    image = pair(config.image_size)
    patch = pair(getattr(config, "patch_stride", None) or config.patch_size)  # Hiera's patches overlap
    return Home((image[0] // patch[0], image[1] // patch[1]), patch)


def _set(config: Any, home: Home, new: Home) -> None:
    """In one number if it was one, and two are the same."""
    if _home(config) != home:
        return
    sizes = {"image_size": new.image, "image_embedding_size": new.grid}
    if new.patch != home.patch:
        sizes["patch_size"] = new.patch
    for name, size in sizes.items():
        if hasattr(config, name):
            one = isinstance(getattr(config, name), int) and size[0] == size[1]
            setattr(config, name, size[0] if one else list(size))
