"""Weights without a model, at another size: a plan that looks at names and shapes, and files."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whereformer.adapters.checkpoint import ENCODING_KEY
from whereformer.adapters.files import Checkpoint, Entries, Entry, open_checkpoint, torch_content
from whereformer.adapters.homes import Home, Pair
from whereformer.adapters.tables import DERIVED, NOT_OURS, PREFIX_TOKENS, Shaped, Table, tables_of
from whereformer.adapters.writing import Progress, quiet, replaced, write_weights
from whereformer.errors import InputError, check_in_memory
from whereformer.resample import RECIPES, Recipe, recipe_of, without_autocast

RESIZE_KEY = "whereformer.resize"
"""The metadata of a safetensors file that says how its tables came to be."""


NO_TABLE = "holds no table of places or offsets that is known"


@dataclass(frozen=True)
class Plan:
    """What becomes of a state dict.

    Args:
        home, new: for which images the weights are made, and are to be.
        moves: tables, as they are and as they become; those that stay are not among them.
        dropped: keys of what follows from the sizes, and would be of the old ones.
        recipe: how tables are interpolated; None: each as its library does.
    """

    home: Home
    new: Home
    moves: tuple[tuple[Table, Table], ...]
    dropped: tuple[str, ...]
    recipe: Recipe | None

    def read(self, old: Table, new: Table, weight: Tensor) -> Tensor:
        """One table's numbers."""
        check_in_memory(f"resize: {old.name}", weight)
        with torch.no_grad(), without_autocast(weight.device):
            return old.read(weight.detach(), new, self.recipe)

    def entries(self, entries: Entries) -> dict[str, Entry]:
        """The weights as they are to be, not read yet."""
        moves = {old.name: (old, new) for old, new in self.moves}
        found = {name: entry for name, entry in entries.items() if name not in self.dropped}
        for name, (old, new) in moves.items():
            entry = found[name]

            def read(entry: Entry = entry, old: Table = old, new: Table = new) -> Tensor:
                return self.read(old, new, entry.read())

            found[name] = Entry(new.shape, entry.dtype, read)
        return found

    def carry_out(self, weights: Mapping[str, Any], done: Progress = quiet) -> dict[str, Any]:
        """The weights as they are to be; what is no table is the very same object."""
        moves = {old.name: (old, new) for old, new in self.moves}
        found = {}
        for key, weight in weights.items():
            if key not in self.dropped:
                found[key] = self.read(*moves[key], weight) if key in moves else weight
                done(getattr(weight, "nbytes", 0))
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "image_size": {"from": self.home.image, "to": self.new.image},
            "patch_size": {"from": self.home.patch, "to": self.new.patch},
            "recipe": None if self.recipe is None else spelled(self.recipe),
            "tables": [
                {
                    "key": old.name,
                    "over": old.kind,
                    "from": old.shape,
                    "to": new.shape,
                    "grid": [old.grid, new.grid],
                }
                | {"recipe": spelled(old.recipe_for(self.recipe))}
                for old, new in self.moves
            ],
            "dropped": list(self.dropped),
        }


Planned = Callable[[Mapping[str, Shaped]], Plan]
"""Makes the plan for one state dict."""


def plan(
    weights: Mapping[str, Shaped],
    image_size: Pair,
    *,
    home_size: Pair | None = None,
    patch_size: Pair | None = None,
    new_patch_size: Pair | None = None,
    window: Pair | None = None,
    recipe: str | Recipe | None = None,
) -> Plan:
    """What is to be done for images of another size.

    Args:
        weights: names, and what has their shapes.
        image_size: the new height and width, in pixels.
        home_size: those that the weights are for. None: by their tables, if they tell.
        patch_size: of the patch embedding (its stride), in pixels. None: its kernel's size.
        new_patch_size: if that is to change.
        window: the new windows of a Swin, in patches; None: they stay.
        recipe: as for `whereformer.resize`.

    Raises:
        InputError: the keys do not tell enough, or something does not fit.
    """
    if any(".encodings." in f".{name}" for name in weights):
        raise InputError(
            "these are the weights of an equipped model: load them into it, and resize that: whereformer.resize"
        )
    patch = patch_size or _patch(tables_of(weights))
    home_grid = None if home_size is None else _divided(home_size, patch, "--from")
    tables = tables_of(weights, grid=home_grid)
    if home_grid is None:
        _check_told(tables, weights)
    home = Home(home_grid or _grid(tables), patch)
    new_patch = new_patch_size or patch
    new = Home(_divided(image_size, new_patch, "--to"), new_patch)
    moves = []
    for table in tables:
        moved = table.follow(home.grid, new.grid)
        if table.kind == "kernel" and table.grid == patch:
            moved = table.on(new.patch)
        elif table.kind == "bias" and not table.follows and window is not None:
            moved = table.on(window)
        if moved != table:
            moves.append((table, moved))
    if not moves and (new != home or window is not None):
        stay = next(
            (f": windows of {t.grid} stay, unless --window changes them" for t in tables if t.kind == "bias"), ""
        )
        raise InputError(f"resize: nothing in these weights follows the size of images{stay}")
    if window is not None and not any(old.kind == "bias" and not old.follows for old, _ in moves):
        raise InputError(f"window={window}, but these weights have no tables of windows that it would change")
    dropped = tuple(key for key in weights if DERIVED.search(key)) if moves else ()
    return Plan(home, new, tuple(moves), dropped, None if recipe is None else recipe_of(recipe))


def resize_file(source: str | Path, out: Path, planned: Planned, done: Progress = quiet) -> Plan:
    """Write a checkpoint for another size: at once or not at all.

    Everything that is no table stays to the bit. Safetensors hold the weights alone, and how they were resized,
    and are written tensor by tensor; torch files hold what lay beside the weights too, and averages of the weights
    are resized as they are.

    Args:
        source: safetensors or a torch file, of which nothing is run; sharded, a folder, or an id of the hub.
        out: the new file, of either kind.
        planned: makes the plan for one state dict.
        done: told the bytes of each tensor that is done.

    Returns:
        the plan for the weights (of several state dicts in the file, the first).
    """
    if out.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise InputError(f"out={str(out)!r}, expected a file that ends in .safetensors, .pth, .pt or .bin")
    if out.exists() and Path(source).exists() and out.samefile(source):
        raise InputError(f"out={str(out)!r} is the checkpoint itself, expected another file")
    checkpoint = open_checkpoint(source)
    if ENCODING_KEY in checkpoint.metadata:
        raise InputError(
            f"{source} holds an equipped model, {checkpoint.metadata[ENCODING_KEY]}: load it into the model, and"
            " resize that: whereformer.resize"
        )
    return (_weights_alone if out.suffix == ".safetensors" else _whole_file)(checkpoint, out, planned, done)


def _weights_alone(checkpoint: Checkpoint, out: Path, planned: Planned, done: Progress) -> Plan:
    """Into safetensors, tensor by tensor."""
    if not tables_of(checkpoint.entries):
        raise InputError(f"{checkpoint.name} {NO_TABLE}")
    made = planned(checkpoint.entries)
    entries = {checkpoint.prefix + name: entry for name, entry in made.entries(checkpoint.entries).items()}
    notes = {**checkpoint.metadata, RESIZE_KEY: json.dumps(made.to_dict())}
    write_weights(out, entries, notes, done=done)
    return made


def _whole_file(checkpoint: Checkpoint, out: Path, planned: Planned, done: Progress) -> Plan:
    """Into a torch file, with all that lies beside the weights."""
    path = Path(checkpoint.name)
    if path.is_file() and path.suffix not in (".safetensors", ".json"):
        content = torch_content(path)
    else:
        content = {checkpoint.prefix + name: entry.read() for name, entry in checkpoint.entries.items()}
    parts = list(_parts(content))
    if not parts:
        raise InputError(f"{checkpoint.name} {NO_TABLE}")
    plans = {where: planned(_shaped(weights)) for where, weights in parts}
    new = content
    for where, weights in parts:
        new = _with(new, where, plans[where].carry_out(weights, done))
    with replaced(out) as file:
        torch.save(new, file)
    return plans[parts[0][0]]


def spelled(recipe: str | Recipe) -> str:
    """The shortest way to say a recipe: its name, or what it is."""
    return next((name for name, known in RECIPES.items() if known == recipe_of(recipe)), str(recipe))


Where = tuple[str, ...]


def _parts(content: Mapping[str, Any], where: Where = ()) -> Iterator[tuple[Where, Mapping[str, Any]]]:
    """The state dicts in a file that have tables."""
    if tables_of(_shaped(content)):
        yield where, content
        return
    for key, value in content.items():
        if isinstance(value, Mapping) and len(where) < 2:
            yield from _parts(value, (*where, key))


def _shaped(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    return {str(key): value for key, value in weights.items() if isinstance(value, Tensor)}


def _at(content: Mapping[str, Any], where: Where) -> Mapping[str, Any]:
    for key in where:
        content = content[key]
    return content


def _with(content: Mapping[str, Any], where: Where, part: dict[str, Any]) -> dict[str, Any]:
    if not where:
        return part
    first, *rest = where
    return {**content, first: _with(content[first], tuple(rest), part)}


def _patch(tables: tuple[Table, ...]) -> Pair:
    found = {table.grid for table in tables if table.kind == "kernel"}
    if len(found) != 1:
        raise InputError("resize: the weights do not tell the size of a patch: give it, --patch 16")
    return found.pop()  # pyright: ignore[reportReturnType]


def _check_told(tables: tuple[Table, ...], weights: Mapping[str, Shaped]) -> None:
    """A table that is a square without rows for the prefix tokens that are there may be another with them."""
    tokens = [name for name in weights if PREFIX_TOKENS.search(name) and not NOT_OURS.search(name)]
    for table in tables:
        if table.kind == "absolute" and table.flat and not table.prefix and table.grid and tokens:
            height, width = table.grid
            raise InputError(
                f"{table.name}: its rows are {height} x {width} patches, or others and rows for"
                f" {', '.join(tokens)}: give the size, --from"
            )


def _grid(tables: tuple[Table, ...]) -> Pair:
    """The grid that the weights are for: that of a table of places, or the largest of those that follow it."""
    places = [t.grid for t in tables if t.kind == "absolute" and t.grid is not None]
    others = [t.grid for t in tables if t.follows and t.kind in ("bias", "distance") and t.grid is not None]
    strips = [t.grid[0] for t in tables if t.follows and t.kind == "strip" and t.grid is not None]
    if places or others:
        return max(places or others)  # pyright: ignore[reportReturnType]
    if strips:
        return max(strips), max(strips)
    raise InputError("resize: the weights do not tell for which images they are made: give the size, --from 224")


def _divided(size: Pair, patch: Pair, option: str) -> Pair:
    if any(n % p for n, p in zip(size, patch, strict=True)):
        raise InputError(f"{option} {size[0]}x{size[1]}, expected multiples of the patches' {patch[0]}x{patch[1]}")
    return size[0] // patch[0], size[1] // patch[1]
