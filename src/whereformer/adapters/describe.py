"""Say what sits where in a model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from whereformer.adapters.behaviours import EquippedAttention, EquippedModel
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
        own: what the model itself still says of where tokens are: a name, and how many numbers it learns.
        seats: every encoding, in the order in which tokens come by.
        attentions: the name of every attention that holds encodings, and which backend it takes for one image on
            the home grid, without a mask, as the model is now: its device, its dtype, in training or not.
    """

    model: str
    grid: Grid
    own: tuple[tuple[str, int], ...]
    seats: tuple[Seat, ...]
    attentions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        own = ", ".join(f"{name} ({count:,} parameters)" for name, count in self.own) or "none"
        lines = [f"{self.model} on {self.grid}", f"  own position encoding: {own}"]
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
    model = equipped(model, "describe")
    home = model.home_grid
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
    return Description(
        model=type(model).__name__,
        grid=home,
        own=tuple(_own(model)),
        seats=tuple(seats),
        attentions=tuple(_attentions(model)),
    )


def _own(model: EquippedModel) -> Iterator[tuple[str, int]]:
    replaced = {(id(module), name) for module, name, _ in model.before}
    for path in model.own:
        where, _, name = path.rpartition(".")
        module = model.get_submodule(where)
        if (id(module), name) not in replaced and (value := getattr(module, name, None)) is not None:
            yield path, _count(value) if isinstance(value, nn.Module) else getattr(value, "numel", int)()


@torch.no_grad()
def _attentions(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if not isinstance(module, EquippedAttention):
            continue
        if not (encodings := list(module.inside())):
            continue
        first, like = encodings[0], next(module.parameters())
        queries, keys = module.grids(module, module.home)
        q, k = (like.new_zeros(1, first.num_heads, grid.tokens, first.head_dim) for grid in (queries, keys))
        dropout = getattr(module, "attn_drop", None)
        p = dropout.p if isinstance(dropout, nn.Dropout) and module.training else 0.0
        yield name, str(explain(q, k, k, queries, encodings, keys=keys, dropout=p))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def equipped(model: nn.Module, asked_by: str) -> EquippedModel:
    """The model, if it is equipped; another is refused in the name of the function asked."""
    if not isinstance(model, EquippedModel):
        raise InputError(
            f"{asked_by}: {type(model).__name__} is not equipped; call whereformer.equip first"
            " (and give the model inside DDP or torch.compile: .module, ._orig_mod)"
        )
    return model
