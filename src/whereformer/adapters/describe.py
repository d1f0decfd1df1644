"""Say what sits where in a model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from whereformer.attention import explain
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid


@dataclass(frozen=True)
class Seat:
    """One encoding of a model.

    Args:
        where: the name of the module that holds it, "" for the model itself.
        encoding: class and options.
        moments: when it speaks.
        parameters: how many numbers it learns.
        grid: its home grid.
    """

    where: str
    encoding: str
    moments: tuple[str, ...]
    parameters: int
    grid: Grid


@dataclass(frozen=True)
class Description:
    """What sits where; `print` it.

    Args:
        model: the model's class.
        grid: home grid, in a pyramid that of its first stage.
        own_table: shape of the model's own position table, None if it has none.
        own_convolutions: how many numbers the model's own position convolutions (those of Twins) learn.
        seats: every encoding, in the order in which tokens come by.
        attentions: the name of every attention that holds encodings, and which backend it takes for one image on
            the home grid, without a mask, as the model is now: its device, its dtype, in training or not.
    """

    model: str
    grid: Grid
    own_table: tuple[int, ...] | None
    own_convolutions: int
    seats: tuple[Seat, ...]
    attentions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        own = "none" if self.own_table is None else " x ".join(map(str, self.own_table))
        lines = [f"{self.model} on {self.grid}", f"  own position table: {own}"]
        if self.own_convolutions:
            lines.append(f"  own position convolutions: {self.own_convolutions:,} parameters")
        same: dict[tuple[object, ...], list[Seat]] = {}
        for seat in self.seats:
            kind = (seat.encoding, seat.parameters, seat.grid, re.sub(r"\d+", "N", seat.where))
            same.setdefault(kind, []).append(seat)
        for seats in same.values():
            first, last = seats[0], seats[-1]
            where = (first.where or "first tokens") + (f" ... {last.where}" if last is not first else "")
            count = f"{len(seats)} x {first.parameters:,}" if len(seats) > 1 else f"{first.parameters:,}"
            encoding = first.encoding if first.grid == self.grid else f"{first.encoding} on {first.grid}"
            moments = ", ".join(first.moments) or "silent"
            lines.append(f"  {where}: {encoding}, speaks at: {moments}, parameters: {count}")
        takes: dict[str, list[str]] = {}
        for where, backend in self.attentions:
            takes.setdefault(backend, []).append(where)
        for backend, names in takes.items():
            last = f" ... {names[-1]}" if len(names) > 1 else ""
            lines.append(f"  attention of {names[0]}{last}: {backend}")
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """What sits where in a model that `whereformer.equip` has equipped.

    Raises:
        InputError: the model is not equipped.
    """
    home = home_of(model, "describe")
    seats = [
        Seat(
            where=name.rpartition(".encodings.")[0],
            encoding=f"{type(module).__name__}({module.extra_repr()})",
            moments=module.moments(),
            parameters=_count(module),
            grid=module.grid,
        )
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PositionEncoding)
    ]
    seats.sort(key=lambda seat: [int(part) if part.isdigit() else part for part in seat.where.split(".")])
    table = getattr(model, "pos_embed", None)
    convolutions = getattr(model, "pos_block", None)
    return Description(
        model=type(model).__name__,
        grid=home,
        own_table=None if table is None else tuple(table.shape[1:]),
        own_convolutions=0 if convolutions is None else _count(convolutions),
        seats=tuple(seats),
        attentions=tuple(_attentions(model)),
    )


@torch.no_grad()
def _attentions(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if not hasattr(module, "attn_drop") or not isinstance(getattr(module, "encodings", None), nn.ModuleList):
            continue
        held = [e for e in cast(nn.ModuleList, module.encodings) if isinstance(e, PositionEncoding)]
        first, like = held[0], next(module.parameters())
        x = like.new_zeros(1, first.num_heads, first.grid.tokens, first.head_dim)
        dropout = cast(nn.Dropout, module.attn_drop).p if module.training else 0.0
        yield name, str(explain(x, x, x, first.grid, held, dropout=dropout))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def home_of(model: nn.Module, asked_by: str) -> Grid:
    """The home grid of an equipped model; what is not equipped is refused in the name of the function asked."""
    home = getattr(model, "home_grid", None)
    if not isinstance(home, Grid):
        raise InputError(
            f"{asked_by}: {type(model).__name__} is not equipped; call whereformer.equip first"
            " (and give the model inside DDP or torch.compile: .module, ._orig_mod)"
        )
    return home
