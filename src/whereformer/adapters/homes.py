"""For which size a model is made, and how it moves to another; one file per library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, cast

from torch import nn

from whereformer.adapters.swap import Equipped
from whereformer.errors import InputError

Pair = tuple[int, int]


@dataclass(frozen=True)
class Home:
    """For which images a model is made.

    Args:
        grid: rows and columns of patches; in a pyramid those of the first stage.
        patch: height and width of a patch, in pixels.
    """

    grid: Pair
    patch: Pair

    @property
    def image(self) -> Pair:
        """Height and width, in pixels."""
        return self.grid[0] * self.patch[0], self.grid[1] * self.patch[1]


class Mover(NamedTuple):
    """One library's models."""

    home: Callable[[nn.Module], Home]
    move: Callable[[nn.Module, Home, Home, Pair | None], None]
    """Change whatever follows from the size, or from the window if one is given, but the numbers of tables."""
    beside: Callable[[nn.Module], Sequence[object]]
    """What else than modules it changes."""


LIBRARIES = {
    "timm": "whereformer.adapters.home_timm",
    "transformers": "whereformer.adapters.home_transformers",
    "torchvision": "whereformer.adapters.home_torchvision",
}


def mover_of(model: nn.Module) -> Mover:
    """What is known of a model's size.

    Raises:
        InputError: it is of no library that is known, or wrapped in something that must come after.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(f"resize: model={model!r}, expected a module")
    if hasattr(model, "_orig_mod"):
        raise InputError("resize: the model is compiled; resize model._orig_mod, before torch.compile")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise InputError(f"resize: the model is wrapped in {name}; resize model.module, before {name}")
    for kind in original(model).__mro__:
        library = LIBRARIES.get(kind.__module__.partition(".")[0])
        if library is not None:
            module = cast(Any, import_module(library))
            return Mover(module.home, module.move, getattr(module, "configs", lambda model: ()))
    raise InputError(
        f"resize: {name} is no model of {', '.join(LIBRARIES)}; its checkpoint can be resized, by `whereformer"
        " resize`, and loaded into a model that is built for the new size"
    )


def original(model: nn.Module) -> type[nn.Module]:
    """The class of a model, equipped or not."""
    return type(model).__bases__[1] if isinstance(model, Equipped) else type(model)


def pair(size: Any) -> Pair:
    """(height, width) from one number or two."""
    return (int(size), int(size)) if isinstance(size, int | float) else (int(size[-2]), int(size[-1]))
