"""The learned tables of models as they are: which there are, over what, and how they are laid out."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import nn

Kind = Literal["absolute", "bias", "distance", "strip", "window", "kernel"]
"""What a table is over.

absolute: the patches of a grid. bias: offsets (dy, dx) within a grid or window. distance: |dy|, |dx| (LeViT). strip:
offsets along one axis (SAM, MViTv2, ViTDet). window: the patches of a window that repeats over the grid (Hiera).
kernel: the pixels of a patch.
"""


class Shaped(Protocol):
    """A tensor, or whatever stands for one."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Table:
    """One learned table of a model or state dict.

    Args:
        name: its key.
        kind: what it is over.
        shape: as it is stored.
        grid: the (height, width) in patches that it was made for: of the model, of a stage, or of a window; in a
            kernel, in pixels. A strip along one axis has one of them. None: its shape does not tell, and nobody has.
        follows: whether it changes with the model's grid; the others belong to windows, or to patches.
        prefix: rows without a place, at its beginning or (biases) at its end; kept as they are.
        axis: where its places are in the shape.
        flat: whether the places fill one axis, row by row, or two.
        recipe: how it is interpolated unless asked otherwise: a name in `whereformer.resample.RECIPES`.
        heads: of a bias, how many.
        family: whose it is, in a few words.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    grid: tuple[int, ...] | None
    follows: bool = True
    prefix: int = 0
    axis: int = 0
    flat: bool = True
    recipe: str = "timm"
    heads: int | None = None
    family: str = ""


@dataclass(frozen=True)
class Pattern:
    """How a family's tables of one kind are named and laid out."""

    key: str
    kind: Kind
    axis: int
    flat: bool = True
    follows: bool = True
    recipe: str = "timm"
    family: str = ""


PATTERNS = (
    Pattern(r"pos_embed_window", "window", 2, flat=False, follows=False, family="Hiera"),
    Pattern(r"(decoder_)?pos_embed|position_embeddings|pos_embedding", "absolute", 1),
    Pattern(r"positional_embedding|position_embedding\.weight", "absolute", 0),
    Pattern(r"relative_position_bias_table", "bias", 0, recipe="geometric"),
    Pattern(r"attention_biases", "distance", 1),
    Pattern(r"rel_pos_[hw]", "strip", 0, recipe="linear"),
    Pattern(r"patch_embed\.proj\.weight|(projection|patch_embedding|conv_proj)\.weight", "kernel", 2, flat=False),
)

PREFIX_TOKENS = ("cls_token", "dist_token", "distillation_token", "reg_token", "register_tokens", "class_token")


def tables_of(
    source: nn.Module | Mapping[str, Shaped], *, grid: tuple[int, int] | None = None
) -> tuple[Table, ...]:
    """The tables of a model, or of a state dict, in the order of its keys.

    Args:
        source: a model; or names and what has their shapes: tensors, also without memory.
        grid: the (height, width) in patches of the image that the weights are for, if it is known. Otherwise a flat
            table is taken for a square one, if its rows, less the prefix tokens that are there, have a root.
    """
    shapes = source.state_dict() if isinstance(source, nn.Module) else source
    return tuple(_found({name: tuple(shaped.shape) for name, shaped in shapes.items()}, grid))


def _found(shapes: Mapping[str, tuple[int, ...]], grid: tuple[int, int] | None) -> Iterator[Table]:
    for name, shape in shapes.items():
        for pattern in PATTERNS:
            if re.search(rf"(^|\.)({pattern.key})$", name):
                yield _table(name, shape, pattern, shapes, grid)
                break


def _table(
    name: str,
    shape: tuple[int, ...],
    pattern: Pattern,
    shapes: Mapping[str, tuple[int, ...]],
    grid: tuple[int, int] | None,
) -> Table:
    places: tuple[int, ...] | None
    prefix = 0
    if not pattern.flat or len(shape) == 4:
        places = shape[pattern.axis : pattern.axis + 2]
    elif pattern.kind == "strip":
        places = ((shape[0] + 1) // 2,)
    elif pattern.kind == "absolute":
        places, prefix = _places(shape[pattern.axis], _prefixes(shapes), grid)
    else:
        places, prefix = _places(shape[pattern.axis], (0, 3), None)
        if places is not None and pattern.kind == "bias":
            places = tuple((n + 1) // 2 for n in places)
    return Table(
        name,
        pattern.kind,
        shape,
        places,
        pattern.follows,
        prefix,
        pattern.axis,
        pattern.flat and len(shape) != 4,
        pattern.recipe,
        {"bias": shape[-1], "distance": shape[0]}.get(pattern.kind),
        pattern.family,
    )


def _prefixes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """How many rows of a table may be prefix tokens': none, or some or all of those that the model has."""
    counts = [
        1 if len(shape) == 1 else shape[-2]
        for name, shape in shapes.items()
        if name.rpartition(".")[2] in PREFIX_TOKENS
    ]
    return tuple(sorted({0, sum(counts), *(sum(counts[:n]) for n in range(len(counts)))}))


def _places(
    rows: int, prefixes: Sequence[int], grid: tuple[int, int] | None
) -> tuple[tuple[int, ...] | None, int]:
    """(height, width) and the rows of prefix tokens."""
    if grid is not None:
        prefix = rows - math.prod(grid)
        return (grid, prefix) if prefix in prefixes else (None, 0)
    squares = [(math.isqrt(rows - p), p) for p in prefixes if math.isqrt(rows - p) ** 2 == rows - p]
    return ((squares[0][0],) * 2, squares[0][1]) if len(squares) == 1 else (None, 0)
