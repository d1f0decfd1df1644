"""What `resize` does to an equipped model: its encodings move along, and what it said itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from whereformer.adapters.behaviours import EquippedAttention, EquippedModel, held
from whereformer.adapters.homes import Home, followed
from whereformer.adapters.host import Place
from whereformer.adapters.swap import put
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid


@dataclass(frozen=True)
class Seat:
    """A module of an equipped model, on the grid of its stage, and what it holds there, or in windows there."""

    module: nn.Module
    grid: Grid
    on_it: tuple[PositionEncoding, ...]
    in_attention: tuple[PositionEncoding, ...]


def seats_of(model: nn.Module) -> list[Seat]:
    """Those of an equipped model; of another none."""
    seats = []
    for module in model.modules() if isinstance(model, EquippedModel) else ():
        encodings = tuple(held(module)) if "encodings" in module._modules else ()
        if isinstance(module, EquippedAttention):
            queries, _ = module.grids(module, module.home)
            attending = tuple(e for e in encodings if e.grid == queries)
            seats.append(Seat(module, module.home, tuple(e for e in encodings if e not in attending), attending))
        elif encodings:
            seats.append(Seat(module, encodings[0].grid, encodings, ()))
        elif isinstance(module, EquippedModel):
            seats.append(Seat(module, module.place.home, (), ()))
    return seats


def move_encodings(seats: list[Seat], home: Home, new: Home) -> None:
    """To the grids that a model's stages, and windows, have now that the model has moved."""
    place: Place | None = None
    for seat in seats:
        module, size = seat.module, followed((seat.grid.height, seat.grid.width), home.grid, new.grid)
        if size is None:
            raise InputError(
                f"resize: {type(module).__name__} is on {seat.grid}, which no stage of {home.grid} has"
            )
        grid = Grid(*size, prefix=seat.grid.prefix)
        for encoding in seat.on_it:
            encoding.resize(grid)
        if isinstance(module, EquippedAttention):
            module.home = grid
            for encoding in seat.in_attention:
                encoding.resize(module.grids(module, grid)[0])
        if isinstance(module, EquippedModel):
            place = Place(grid)
    for seat in seats:
        for module in seat.module.modules():
            if place is not None and "place" in vars(module):
                vars(module)["place"] = place


@contextmanager
def own_tables_back(model: nn.Module) -> Iterator[None]:
    """While it is resized, an equipped model has again what it said itself, which `unequip` will put back."""
    if not isinstance(model, EquippedModel):
        yield
        return
    silent = [(module, name, put(module, name, value)) for module, name, value in model.before]
    yield
    model.before = [(module, name, put(module, name, value)) for module, name, value in silent]
