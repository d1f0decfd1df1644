"""Move a model, with its weights, to images of another size."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from whereformer.adapters.homes import Home, Pair, mover_of
from whereformer.adapters.resize_equipped import move_encodings, own_tables_back, seats_of
from whereformer.adapters.tables import Table, tables_of
from whereformer.adapters.twins import unchanged_on_error
from whereformer.errors import InputError, check_in_memory, check_size
from whereformer.grid import Grid
from whereformer.resample import Recipe, recipe_of, without_autocast

Model = TypeVar("Model", bound=nn.Module)


def resize(
    model: Model,
    grid: Grid | Sequence[int] | None = None,
    *,
    image_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
    window: int | Sequence[int] | None = None,
    recipe: str | Recipe | None = None,
) -> Model:
    """Make a model for images of another size, in place.

    Its tables of places and offsets are read on the new grid, in float32, rounded once to their dtype; what
    follows from the size (indices, masks, rotations, the size that is checked) becomes what it would be if the
    model had been built so. Rows of prefix tokens, windows, and everything else stay to the bit. If anything
    fails, the model is left as it was.

    Args:
        model: of timm, transformers or torchvision, equipped or not.
        grid: (height, width) in patches, of a pyramid in those of its first stage; or a `Grid`.
        image_size: instead: (height, width) in pixels, or one number for both.
        patch_size: in pixels, if that is to change too: the kernel of the patch embedding is resized so that
            resized patches give what the patches gave (FlexiViT). Images keep their size unless one is given.
        window: in patches, if the windows of a Swin are to change.
        recipe: how tables are interpolated: a name in `whereformer.resample.RECIPES`, or a `Recipe`: "geometric"
            is for tables of offsets, those of models are for tables of places. None: as the model's library itself
            reads each of them at another size.

    Returns:
        the same model.

    Raises:
        InputError: the size does not fit the model, or a table has no numbers here; it says which.
    """
    mover = mover_of(model)
    home = mover.home(model)
    new = _target(home, grid, image_size, patch_size)
    windows = None if window is None else _pair("window", window)
    recipe = None if recipe is None else recipe_of(recipe)
    if new == home and windows is None:
        return model
    with unchanged_on_error(model, mover.beside(model)), torch.no_grad(), own_tables_back(model):
        seats = seats_of(model)
        tables = {table.name: table for table in tables_of(model, grid=home.grid)}
        weights = {
            name: weight for name, weight in model.named_parameters(remove_duplicate=False) if name in tables
        }
        for name, weight in weights.items():
            check_in_memory(f"resize: {name}", weight)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        with without_autocast(next(model.parameters()).device):
            mover.move(model, home, new, windows)
            _read(model, tables, weights, {t.name: t for t in tables_of(model, grid=new.grid)}, recipe)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name not in tables and parameter.shape != shapes[name]:
                raise InputError(
                    f"resize: {name} changes from {list(shapes[name])} to {list(parameter.shape)}, and is no table"
                    " that is known"
                )
        move_encodings(seats, home, new)
    return model


def _read(
    model: nn.Module,
    old: dict[str, Table],
    weights: Mapping[str, nn.Parameter],
    new: dict[str, Table],
    recipe: Recipe | None,
) -> None:
    """The old weights, as those of the new tables; one for all places in which one stands."""
    made: dict[int, nn.Parameter] = {}
    for name, weight in weights.items():
        if id(weight) not in made:
            value = old[name].read(weight, new[name], recipe)
            made[id(weight)] = weight if value is weight else nn.Parameter(value, weight.requires_grad)
        owner, _, last = name.rpartition(".")
        module, value = model.get_submodule(owner), made[id(weight)]
        if module.get_parameter(last).shape != value.shape:
            raise InputError(
                f"resize: {name} is {list(value.shape)} for {new[name].grid}, but the model now has"
                f" {list(module.get_parameter(last).shape)}"
            )
        module._parameters[last] = value


def _target(home: Home, grid: object, image_size: object, patch_size: object) -> Home:
    """The size that is asked for."""
    patch = home.patch if patch_size is None else _pair("patch_size", patch_size)
    if grid is not None and image_size is not None:
        raise InputError(f"resize: grid={grid} and image_size={image_size}, expected one of them")
    if isinstance(grid, Grid):
        if grid.frames is not None or not grid.regular:
            raise InputError(f"resize: grid={grid}, expected a whole grid of an image")
        return Home((grid.height, grid.width), patch)
    if grid is not None:
        if isinstance(grid, int):
            raise InputError(f"resize: grid={grid}, expected (height, width) in patches; pixels go as image_size=")
        check_size("resize: grid", grid)
        return Home(_pair("grid", grid), patch)
    if image_size is None and patch_size is None:
        raise InputError("resize: grid=None, expected (height, width) in patches, or image_size= in pixels")
    image = home.image if image_size is None else _pair("image_size", image_size)
    if any(n % p for n, p in zip(image, patch, strict=True)):
        near = [
            f"{n // p * p} or {-(-n // p) * p}" if n % p else f"{n}" for n, p in zip(image, patch, strict=True)
        ]
        raise InputError(
            f"resize: image_size={image} is no multiple of the patches' {patch}: for height {near[0]}, for width"
            f" {near[1]}"
        )
    return Home((image[0] // patch[0], image[1] // patch[1]), patch)


def _pair(what: str, value: object) -> Pair:
    pair = (value, value) if isinstance(value, int) else value
    check_size(f"resize: {what}", pair)
    height, width = pair  # pyright: ignore[reportGeneralTypeIssues]
    return int(height), int(width)
