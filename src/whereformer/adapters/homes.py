"""For which size a model is made, and how it moves to another; one file per library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, cast

from torch import nn

from whereformer.adapters.find import refuse_wrapped
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
    refuse_wrapped(model, "resize")
    for kind in original(model).__mro__:
        library = LIBRARIES.get(kind.__module__.partition(".")[0])
        if library is not None:
            module = cast(Any, import_module(library))
            return Mover(module.home, module.move, getattr(module, "configs", lambda model: ()))
    raise InputError(
        f"resize: {type(model).__name__} is no model of {', '.join(LIBRARIES)}; its checkpoint can be resized, by"
        " `whereformer resize`, and loaded into a model that is built for the new size"
    )


def original(model: nn.Module) -> type[nn.Module]:
    """The class of a model, equipped or not."""
    kind = type(model)
    while issubclass(kind, Equipped):
        kind = kind.__bases__[1]
    return kind


def followed(own: Sequence[int], home: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """The size of a stage that is `own` where a model's grid is `home`, when that is `new`; None: no stage is so.

    >>> followed((4, 4), (14, 14), (24, 12))  # a quarter of the rows and columns, the last ones incomplete
    (6, 3)
    >>> followed((4, 4), (28, 28), (40, 40))  # an eighth, not a seventh
    (5, 5)
    """
    sizes = []
    for n, h, m in zip(own, home, new, strict=True):
        strides = [2**k for k in range(7) if -(-h // 2**k) == n] or [h // n] * (h % n == 0)
        if not strides:
            return None
        sizes.append(-(-m // strides[0]))
    return tuple(sizes)


def pair(size: Any) -> Pair:
    """(height, width) from one number or two."""
    return (int(size), int(size)) if isinstance(size, int | float) else (int(size[-2]), int(size[-1]))
