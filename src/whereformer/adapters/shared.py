"""What the hosts have in common."""

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from whereformer.adapters.swap import Equipped, swap_class
from whereformer.catalog import Factory
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid


def build(factory: Factory, like: Tensor, dim: int, heads: int, grid: Grid) -> PositionEncoding:
    """One encoding, where and in what dtype `like` is."""
    encoding = factory(dim, heads, grid)
    if not isinstance(encoding, PositionEncoding):
        raise InputError(f"equip: {factory!r} gave {type(encoding).__name__}, expected a PositionEncoding")
    return encoding.to(like.device, like.dtype)


def attach(module: nn.Module, behaviour: type[Equipped], encodings: list[PositionEncoding]) -> None:
    """Let a module behave in another way, and hold encodings."""
    swap_class(module, behaviour)
    module.encodings = nn.ModuleList(encodings).train(module.training)


def held(encodings: nn.ModuleList) -> Iterable[PositionEncoding]:
    """What a module holds, for the type checker."""
    return cast("Iterable[PositionEncoding]", encodings)


def names_of_parameters(model: nn.Module) -> set[str]:
    """The names of all that the encodings of a model learn."""
    return {
        f"{where}.{name}"
        for where, module in model.named_modules()
        if isinstance(module, PositionEncoding)
        for name, _ in module.named_parameters()
    }
