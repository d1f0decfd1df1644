"""timm's models: by their own `set_input_size`, or else as they would be built for another size."""

import inspect
import warnings
from functools import partial
from typing import Any, cast

import timm
from timm.models import get_model_args, get_model_input_config
from timm.models._input import update_model_input_size
from torch import nn

from whereformer.adapters.homes import Home, Pair, pair
from whereformer.adapters.twins import move_like_twins
from whereformer.errors import InputError


def home(model: nn.Module) -> Home:
    """By its patch embedding, or else in patches of its first stage."""
    embed = getattr(model, "patch_embed", None)
    image = pair(getattr(embed, "img_size", None) or get_model_input_config(model)["input_size"])
    features = cast("list[dict[str, Any]] | None", getattr(model, "feature_info", None))
    grid = getattr(embed, "grid_size", None)
    strides = [getattr(embed, "patch_size", None), features and features[0]["reduction"]]
    if grid is None:  # patches that overlap, as in most pyramids: the stride counts
        strides.reverse()
    found = [Home((image[0] // p[0], image[1] // p[1]), p) for p in map(pair, filter(None, strides))]
    if grid is not None and not any(home.grid == pair(grid) for home in found):  # a backbone before the patches
        if not (image[0] % grid[0] or image[1] % grid[1]):
            return Home(pair(grid), (image[0] // grid[0], image[1] // grid[1]))
        found = found[-1:]  # patches that overlap
    fitting = [home for home in found if grid is None or home.grid == pair(grid)] or found
    if not fitting:
        raise InputError(f"resize: {type(model).__name__} does not tell its patches")
    return fitting[0]


def move(model: nn.Module, home: Home, new: Home, window: Pair | None) -> None:
    setter = getattr(model, "set_input_size", None)
    accepted = inspect.signature(setter).parameters if setter is not None else {}
    if window is not None and "window_size" not in accepted:
        raise InputError(f"resize: window={window}, but {type(model).__name__} has no windows that can be changed")
    if new.patch != home.patch and "patch_size" not in accepted:
        raise InputError(f"resize: patch_size={new.patch}, but {type(model).__name__} keeps its own, {home.patch}")
    if setter is None:
        _move_as_built(model, home, new)
        return
    options: dict[str, Any] = {"img_size": new.image}
    if new.patch != home.patch:
        options["patch_size"] = new.patch
    if window is not None:
        options["window_size"] = window
    elif hasattr(model, "_ref_window_sizes"):  # Swin's windows are its own, and not shares of the image
        options["window_size"] = model._ref_window_sizes
    with warnings.catch_warnings():  # of its interpolation, whose numbers are not used
        warnings.simplefilter("ignore", UserWarning)
        setter(**options)


def _move_as_built(model: nn.Module, home: Home, new: Home) -> None:
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if architecture is None:
        raise InputError(
            f"resize: {type(model).__name__} cannot be told another size; build it by timm.create_model, which"
            " keeps how it was built"
        )
    arguments = {key: value for key, value in get_model_args(model).items() if key != "img_size"}
    build = partial(timm.create_model, architecture, **arguments)
    move_like_twins(model, lambda image: build(img_size=image), home.image, new.image)
    update_model_input_size(model, new.image)
