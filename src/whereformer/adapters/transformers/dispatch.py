"""How transformers' attentions, which call a function by its name, come to call ours; and how its layers do."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from whereformer.adapters.behaviours import EquippedAttention, EquippedBlock, EquippedEmbeddings, attend, held
from whereformer.adapters.host import Attention, Block, Host, Own, Place, Stage, Start
from whereformer.attention import attention_weights
from whereformer.encoding import PositionEncoding
from whereformer.encodings import Learned
from whereformer.errors import InputError
from whereformer.grid import Grid

NAME = "whereformer"
"""Under which transformers knows `attend_where`."""


def attend_where(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers' own attention functions, with the encodings that the module holds.

    Returns:
        the output [batch, queries, heads, head_dim], and the weights [batch, heads, queries, keys] where
        output_attentions asks for them.
    """
    mask = _mask(attention_mask)
    if not isinstance(module, EquippedAttention):
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    out = attend(module, query, key, value, mask, dropout, scale=scaling)
    weights = None
    if others.get("output_attentions", module.config.output_attentions):
        queries, keys = module.grids(module, module.place.grid)
        scale = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
        weights = attention_weights(query * scale, key, queries, held(module), keys=keys, mask=mask)
    return out.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attend_where)


def _mask(given: Any) -> Tensor | None:
    """As `attention` takes it: transformers' masks are theirs, ours, or of flash attention [batch, keys]."""
    if given is None or isinstance(given, float):
        return None
    if not isinstance(given, Tensor):
        raise InputError(
            f"attention_mask is a {type(given).__name__}, expected a tensor: load the model with"
            " attn_implementation='sdpa'"
        )
    return given[:, None, None].bool() if given.ndim == 2 else given


class EquippedDispatch(EquippedAttention):
    """Calls `attend_where` by its name, which reads what it holds."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(EquippedAttention, self).forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class EquippedLayer(EquippedBlock):
    """Computed again, by transformers' checkpointing, on the grid that it was computed on."""

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        return partial(_on_this_grid, self.__dict__["_gradient_checkpointing_func"], self.place)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint


def _on_this_grid(checkpoint: Callable[..., Any], place: Place, compute: Callable[..., Any], *args: Any) -> Any:
    grid = place.grid

    def again(*args: Any) -> Any:
        place.grid = grid
        return compute(*args)

    return checkpoint(again, *args)


def dispatching(module: Any) -> Own:
    """The switch that makes an attention call `attend_where`: a config of its own, since others share its."""
    config = copy.copy(module.config)
    config._attn_implementation_internal = NAME
    return Own(module, "config", config, counts=False)


def dispatched(module: Any, dim: int, heads: int, **more: Any) -> Attention:
    """An attention that calls a function by its name."""
    return Attention(module, dim, heads, behaviour=EquippedDispatch, switches=[dispatching(module)], **more)


# ---------------------------------------------------------------------------------------------------------------
# What plain towers share: patches in a row behind prefix tokens, one grid.


def plain(
    embeddings: Any,
    blocks: Sequence[Block],
    stage: tuple[int, int, Grid],
    patch: tuple[int, int],
    own: Sequence[Own],
) -> Host:
    """The host of a tower whose `embeddings` make tokens of images, and hold the first encodings of tokens."""
    return Host(
        [Stage(*stage, blocks)],
        own,
        entry=(embeddings, partial(_grid_of, patch=patch)),
        first=(embeddings, EquippedEmbeddings),
    )


def _grid_of(images: Tensor, out: Any, *, patch: tuple[int, int]) -> Grid:
    tokens = out[0] if isinstance(out, tuple) else out
    height, width = (n // p for n, p in zip(images.shape[-2:], patch, strict=True))
    return Grid(height, width, prefix=tokens.shape[1] - height * width)


def pair(size: Any) -> tuple[int, int]:
    """(height, width), from these or from one number for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def home(config: Any, prefix: int) -> Grid:
    """The grid of the size of images that a config names."""
    sides = zip(pair(config.image_size), pair(config.patch_size), strict=True)
    height, width = (n // p for n, p in sides)
    return Grid(height, width, prefix)


def learned_from(rows: Tensor | None) -> Start:
    """Lets a learned table go on from rows [prefix rows + patches, dim]."""

    def start(encoding: PositionEncoding) -> bool:
        fits = isinstance(encoding, Learned) and rows is not None
        if fits:
            encoding.start_from(rows)
        return fits

    return start


def nothing(*args: Any, **kwargs: Any) -> float:
    """In the place of what computed positions to add."""
    return 0.0
