"""How transformers' attentions, which call a function by its name, come to call ours; and how its layers do."""

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from whereformer.adapters.behaviours import EquippedAttention, EquippedBlock, attend, held
from whereformer.adapters.host import Attention, Own, Place
from whereformer.adapters.swap import Equipped
from whereformer.attention import attention_weights
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
    if others.get("output_attentions") or _heard(module):
        queries, keys = module.grids(module, module.place.grid)
        if not isinstance(queries, Grid):
            raise InputError(
                "output_attentions: not for a batch with padding, where each image attends on its own"
            )
        scale = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
        weights = attention_weights(query * scale, key, queries, held(module), keys=keys, mask=mask)
    return out.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attend_where)


def _heard(module: Any) -> bool:
    """Whether weights are to be seen without being asked for: some families do not hand the question on."""
    shared = cast(Any, module.config)._shared
    return shared.output_attentions or (shared._attn_implementation == "eager" and bool(module._forward_hooks))


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


class CheckpointedLayer(Equipped, *((nn.Module,) if TYPE_CHECKING else ())):
    """Computed again, by transformers' checkpointing, on the grid that it was computed on."""

    place: Place

    @staticmethod
    def named(original: type[nn.Module]) -> str:
        """Its own name, by which device maps and FSDP keep a layer whole."""
        return original.__name__

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        return partial(_on_this_grid, self.__dict__["_gradient_checkpointing_func"], self.place)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint


class EquippedLayer(CheckpointedLayer, EquippedBlock):
    """The same, with encodings of tokens before it."""


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
    config.__dict__["_shared"] = module.config
    return Own(module, "config", config, counts=False)


def dispatched(module: Any, dim: int, heads: int, **more: Any) -> Attention:
    """An attention that calls a function by its name."""
    return Attention(module, dim, heads, behaviour=EquippedDispatch, switches=[dispatching(module)], **more)
