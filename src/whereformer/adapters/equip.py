"""Give a model another encoding."""

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from whereformer.catalog import Factory, parse
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError

Model = TypeVar("Model", bound=nn.Module)


def equip(model: Model, encoding: str | Factory | Sequence[Factory], *, keep_own: bool = False) -> Model:
    """Give a timm vision transformer another position encoding, in place; weights and their names stay.

    Its own position table is removed (but if "learned" is among the encodings, that one starts from it), unless
    `keep_own`. If anything fails, the model is left as it was.

    In a pyramid each stage is a transformer of its own: an encoding stands in every stage where it would stand in
    a model of that depth, in the stage's width and on its grid, so that "peg" is one PEG after the first block of
    each stage (Twins, CPVT). Twins' own ones are removed, and a PEG in their place starts from them. Pyramids take
    encodings of tokens only.

    Args:
        model: a timm `VisionTransformer` (ViT, DeiT, distilled DeiT, DeiT-III, CLIP and DINOv2 towers ...), or
            a pyramid: timm's `Twins`, `PyramidVisionTransformerV2`.
        encoding: a text for `whereformer.parse`, such as "learned + irpe(on='qkv')"; or an encoding class, a
            `functools.partial` of one, or a sequence of these.
        keep_own: keep the model's own position table, or convolutions, as well.

    Returns:
        the same model.

    Raises:
        InputError: the model is of another kind, or the encoding does not fit it.
    """
    try:
        from whereformer.adapters import timm, timm_pyramid
    except ModuleNotFoundError as error:
        raise InputError(f'equip needs {error.name}: pip install "whereformer[lab]"') from None
    host = timm_pyramid if isinstance(model, timm_pyramid.Pyramid) else timm
    host.equip(model, _factories(encoding), keep_own=keep_own)
    return model


def _factories(encoding: str | Factory | Sequence[Factory]) -> list[Factory]:
    if isinstance(encoding, str):
        return list(parse(encoding))
    factories = list(encoding) if isinstance(encoding, Sequence) else [encoding]
    for factory in factories:
        if isinstance(factory, PositionEncoding):
            raise InputError(
                f"encoding: {type(factory).__name__} is built already, but each block gets its own: give"
                " the class, or a functools.partial of it"
            )
    if not factories or not all(callable(factory) for factory in factories):
        raise InputError(f"encoding={encoding!r}, expected a text, an encoding class, or a sequence of classes")
    return factories
