"""timm's vision transformers by name."""

from typing import Any

import torch

from whereformer.errors import InputError


def create(name: str, **arguments: Any) -> Any:
    """timm's `create_model`, whose many errors become one."""
    from timm import create_model

    try:
        return create_model(name, **arguments)
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"model={name!r} cannot be built as a vision transformer: {reason}") from error


def patch_size(name: str) -> int:
    """The side of the patches that a model is made for, in pixels."""
    with torch.device("meta"):
        model = create(name)
    size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if size is None:
        raise InputError(f"model={name!r} is a {type(model).__name__}, expected a vision transformer")
    if size[0] != size[1]:
        raise InputError(f"model={name!r} has patches of {size[0]} x {size[1]} pixels, expected square ones")
    return size[0]
