"""DETR's encoder and decoder, equipped in one go."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from whereformer.adapters.equip import equip
from whereformer.adapters.find import host_of
from whereformer.adapters.seats import Blocks, Encoding
from whereformer.errors import InputError, check_one_of
from whereformer.grid import Grid

Model = TypeVar("Model", bound=nn.Module)
On = Literal["self", "cross", "both"]


def equip_detr(
    model: Model,
    encoding: Encoding | Mapping[Blocks, Encoding],
    decoder: Encoding | None = None,
    *,
    queries: Grid | Sequence[int] | None = None,
    on: On = "both",
    home: Grid | Sequence[int] | None = None,
    keep_own: bool = False,
    share: bool = False,
) -> Model:
    """Give DETR or Conditional DETR encodings in its encoder and in its decoder, in place.

    DETR's object queries are learned, and lie nowhere. Here they are said to be the cells of a lattice over the
    image, row by row: a claim that training has to make true, as each cell still is a learned query. In the
    decoder's self-attention the lattice is a grid like any other, and the unit of offsets is a cell. In its
    cross-attention the unit is a patch of the feature map, and each query is in the middle of its cell: row r of
    R, over an image of H rows of patches, at (r + 1/2) H / R − 1/2. In a padded batch the lattice lies over each
    image, not over its padding.

    Args:
        model: `DetrModel`, `ConditionalDetrModel`, or one that has it inside.
        encoding: for the encoder, as in `equip`.
        decoder: for each layer of the decoder; None: nothing. None but encodings that speak in attention; on
            cross-attention those that serve points between patches.
        queries: (rows, columns) of the lattice: as many cells as the model has object queries.
        on: on which of the decoder's attentions; each has encodings of its own.
        home: (rows, columns) of the feature map that encodings are made for; None: 25 x 42, or twice as many with
            dilation, of DETR's largest images.
        keep_own, share: as in `equip`.

    Returns:
        the same model; `unequip` takes it all back.

    Raises:
        InputError: what `equip` raises; or `decoder` without `queries`, or these without that.
    """
    check_one_of("equip_detr: on", on, get_args(On))
    if (decoder is None) != (queries is None):
        raise InputError(
            f"equip_detr: decoder={decoder!r}, queries={queries!r}: expected both, or none, as object queries lie"
            " nowhere unless it is said"
        )
    options: dict[str, Any] = {"queries": queries, "home": home}
    options = {name: value for name, value in options.items() if value is not None}
    host = host_of(model, **options)
    if decoder is None:
        return equip(model, encoding, host=host, keep_own=keep_own, share=share)
    first, among, across = (len(stage.blocks) for stage in host.stages)
    chosen = {"self": range(first, first + among), "cross": range(first + among, first + among + across)}
    chosen["both"] = range(first, first + among + across)
    whole = encoding if isinstance(encoding, Mapping) else {range(first): encoding}
    return equip(model, {**whole, chosen[on]: decoder}, host=host, keep_own=keep_own, share=share)
