"""torchvision's ViT and Swin."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from whereformer.adapters.homes import Home, Pair
from whereformer.errors import InputError


def home(model: nn.Module) -> Home:
    if isinstance(model, VisionTransformer):
        n, p = model.image_size // model.patch_size, model.patch_size
        return Home((n, n), (p, p))
    if isinstance(model, SwinTransformer):  # reads any size; its own is where it was trained
        stem = cast(nn.Conv2d, cast(Any, model.features)[0][0])
        size = cast(Pair, stem.kernel_size)
        return Home((224 // size[0], 224 // size[1]), size)
    raise InputError(
        f"resize: torchvision's {type(model).__name__} is not known, expected VisionTransformer or Swin"
    )


def move(model: nn.Module, home: Home, new: Home, window: Pair | None) -> None:
    if new.patch != home.patch:
        raise InputError(f"resize: patch_size={new.patch}, but torchvision's models keep their own, {home.patch}")
    if isinstance(model, VisionTransformer):
        if window is not None:
            raise InputError(f"resize: window={window}, but torchvision's VisionTransformer has no windows")
        if new.grid[0] != new.grid[1]:
            raise InputError(
                f"resize: a grid of {new.grid}, but torchvision's VisionTransformer takes squares only"
            )
        model.image_size = new.image[0]
        model.seq_length += new.grid[0] * new.grid[1] - home.grid[0] * home.grid[1]
        table = model.encoder.pos_embedding
        empty = table.new_empty(1, model.seq_length, table.shape[2])
        model.encoder.pos_embedding = nn.Parameter(empty, table.requires_grad)
        return
    for attention in model.modules():
        if window is not None and isinstance(attention, ShiftedWindowAttention):
            _to_window(attention, window)


def _to_window(attention: ShiftedWindowAttention, window: Pair) -> None:
    if isinstance(attention, ShiftedWindowAttentionV2):
        raise InputError(
            f"resize: window={window}, but torchvision's SwinV2 counts offsets in shares of its window"
        )
    shifted = any(cast(Sequence[int], attention.shift_size))
    attention.window_size = list(window)
    attention.shift_size = [n // 2 if shifted else 0 for n in window]
    table = attention.get_parameter("relative_position_bias_table")
    empty = table.new_empty((2 * window[0] - 1) * (2 * window[1] - 1), table.shape[1])
    attention.relative_position_bias_table = nn.Parameter(empty, table.requires_grad)
    with attention.get_buffer("relative_position_index").device:
        attention.define_relative_position_index()
