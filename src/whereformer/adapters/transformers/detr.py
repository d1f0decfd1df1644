"""DETR and Conditional DETR: the encoder, and the decoder if object queries lie on a lattice."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import ConditionalDetrModel, DetrModel

from whereformer.adapters.behaviours import held
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Place, Stage
from whereformer.adapters.starts import from_tables
from whereformer.adapters.swap import Equipped
from whereformer.adapters.transformers.dispatch import CheckpointedLayer, EquippedLayer, dispatched
from whereformer.adapters.transformers.lattice import decoder_stages, lattice, pair_as_grid
from whereformer.adapters.transformers.padding import Corners, on_images
from whereformer.attention import encode
from whereformer.catalog import FAMILIES
from whereformer.encoding import PositionEncoding
from whereformer.encodings import DETRLearned
from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.images import Padded

HOME = (800, 1333)
"""The size of the images that it was published for, in pixels: its config names none."""


def detr(
    model: DetrModel | ConditionalDetrModel,
    queries: Sequence[int] | Grid | None = None,
    home: Sequence[int] | Grid | None = None,
) -> Host:
    """Encodings that add to tokens add, as DETR's own do, to queries and keys of every layer, not to tokens.

    Object queries lie on no grid, so that no encoding comes to the decoder; what is added to the keys of its
    cross-attention is what is added in the encoder.

    Args:
        queries: (rows, columns) of a lattice over the image on which they lie after all. Blocks are then also the
            self-attentions of the decoder, behind the encoder's layers, and its cross-attentions behind these.
        home: (rows, columns) of the feature map that encodings are made for; None: that of DETR's largest images.
    """
    config, positions = model.config, cast(Any, model.position_embedding)
    dim, heads = config.d_model, config.encoder_attention_heads
    stride = 16 if getattr(config, "dilation", False) else 32
    start, own = None, [Own(positions, "build_sine_position_embedding", no_sines)]
    if hasattr(positions, "row_embeddings"):
        rows, columns = positions.row_embeddings.weight, positions.column_embeddings.weight
        start = from_tables(DETRLearned, rows=rows, columns=columns)
        silent = partial(no_rows, features=dim // 2)
        own = [Own(positions, name, silent) for name in ("row_embeddings", "column_embeddings")]
    blocks = [
        Block(
            layer,
            [dispatched(layer.self_attn, dim, heads, grids=on_images)],
            None if number else start,
            EquippedLayer,
        )
        for number, layer in enumerate(cast(Iterable[Any], model.encoder.layers))
    ]
    grid = pair_as_grid("home", home) if home is not None else Grid(*(-(-side // stride) for side in HOME))
    options = {} if home is None else {"home": list(grid.size)}
    stages, layers = [Stage(dim, heads, grid, blocks)], list(cast(Iterable[Any], model.decoder.layers))
    more: dict[str, Any] = {}
    if queries is not None:
        cells = lattice(queries, config.num_queries)
        stages += decoder_stages(layers, dim, config.decoder_attention_heads, cells, grid)
        options["queries"] = list(cells.size)
        more = {"swaps": [(layer, CheckpointedLayer) for layer in layers]}
    return Host(
        stages,
        own,
        first=positions,
        first_behaviour=EquippedPositions,
        check_first=_additive,
        equal="detr_sine" if start is None else "detr_learned",
        options=options,
        **more,
    )


class EquippedPositions(Equipped, *((nn.Module,) if TYPE_CHECKING else ())):
    """Tells where the tokens are; to what the model itself adds, adds what encodings add."""

    place: Place
    encodings: nn.ModuleList

    def forward(
        self, shape: torch.Size, device: torch.device, dtype: torch.dtype, mask: Tensor | None = None
    ) -> Tensor:
        own: Tensor = super().forward(shape, device, dtype, mask)  # pyright: ignore[reportAttributeAccessIssue]
        batch, height, width = shape[0], shape[-2], shape[-1]
        self.place.grid = Grid(height, width) if mask is None else Corners(height, width, mask=mask)
        first = list(held(cast(nn.Module, self)))
        if not first:
            return own
        where = self.place.grid.images() if isinstance(self.place.grid, Corners) else self.place.grid
        rows: list[int] | slice = slice(None)
        if isinstance(where, Padded):  # images of one size are told the same
            kinds = list(dict.fromkeys(where.grids))
            rows = [kinds.index(grid) for grid in where.grids]
            batch, where = len(kinds), Padded(tuple(kinds), where.grid)
        tokens = torch.zeros(batch, height * width, first[0].dim, device=device, dtype=dtype)
        return own + encode(tokens, where, first)[rows].mT.unflatten(-1, (height, width))


def no_sines(shape: torch.Size, device: torch.device, dtype: torch.dtype, features: int, *rest: Any) -> Tensor:
    """In the place of what computes sines: zeros, [batch, features, height, width]."""
    return torch.zeros(shape[0], 2 * features, *shape[-2:], device=device, dtype=dtype)


def no_rows(number: Tensor, features: int) -> Tensor:
    """In the place of a table: zeros, [as many as numbers, features]."""
    return torch.zeros(*number.shape, features, device=number.device)


def _additive(first: Sequence[PositionEncoding]) -> None:
    for encoding in first:
        if not isinstance(encoding, tuple(FAMILIES["absolute"].values())):
            raise InputError(
                f"equip: DETR adds to queries and keys, but {type(encoding).__name__} does not say what to add,"
                f" expected one of {list(FAMILIES['absolute'])}"
            )


TOWERS: Hosts = {DetrModel: detr, ConditionalDetrModel: detr}
