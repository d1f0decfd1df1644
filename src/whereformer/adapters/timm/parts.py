"""What timm's plain transformers share, as parts of a host."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from timm.layers.patch_dropout import PatchDropout, PatchDropoutWithIndices, patch_dropout_forward
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
)
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedBlock, EquippedModel
from whereformer.adapters.host import Attention, Own, Place, Start
from whereformer.adapters.starts import from_table
from whereformer.adapters.swap import Equipped
from whereformer.encoding import PositionEncoding
from whereformer.encodings import BEiT, RoPEMixed, Swin
from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.images import Images

Module = nn.Module if TYPE_CHECKING else object


# ---------------------------------------------------------------------------------------------------------------
# Behaviours.


class EquippedStemmed(EquippedModel, Module):
    """A model that holds the encodings of tokens that come first in its `pos_drop`."""

    def group_matcher(self, coarse: bool = False) -> Any:
        """They decay with the stem."""
        groups: Any = cast(Any, super()).group_matcher(coarse)
        if callable(groups):
            return lambda name: 0 if "pos_drop." in name else groups(name)
        return {**groups, "stem": rf"{groups['stem']}|.*pos_drop\."}


class EquippedPlain(EquippedStemmed):
    """And whose blocks are told the grid, once."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Each block computes itself again, on the grid it was computed on; timm's own way knows no grid."""
        cast(Any, super()).set_grad_checkpointing(enable)
        for module in self.modules():
            if "grad_checkpointing" in module.__dict__:
                cast(Any, module).grad_checkpointing = enable and isinstance(module, EquippedBlock)


class EquippedPatchEmbed(Equipped, *((PatchEmbed,) if TYPE_CHECKING else ())):
    """Tells where the patches are that it makes."""

    place: Place

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        self.place.grid = Grid(height, width, self.place.home.prefix)
        return super().forward(x)


class EquippedPatchDropout(Equipped, *((PatchDropout,) if TYPE_CHECKING else ())):
    """Tells the layers which patches it kept."""

    place: Place

    def forward(self, x: Tensor) -> Any:
        x, kept = patch_dropout_forward(x, self.prob, self.num_prefix_tokens, self.ordered, self.training)
        if kept is not None:
            if isinstance(self.place.grid, Images):
                raise InputError("patch_drop: the images are of several sizes; set its prob to 0")
            self.place.grid = self.place.grid.keep(kept)
        return (x, kept) if isinstance(self, PatchDropoutWithIndices) else x


def swaps(model: Any) -> list[tuple[nn.Module, type[Equipped]]]:
    """How a model tells the grid that has timm's patch embedding and, it may be, a dropout of patches."""
    found: list[tuple[nn.Module, type[Equipped]]] = [(model.patch_embed, EquippedPatchEmbed)]
    dropout = getattr(model, "patch_drop", None)
    if isinstance(dropout, PatchDropout | PatchDropoutWithIndices):
        found.append((dropout, EquippedPatchDropout))
    return found


def fused(attentions: Iterable[nn.Module]) -> list[Own]:
    """timm's attentions that do as their `fused_attn` says must call torch's."""
    return [Own(module, "fused_attn", True, counts=False) for module in attentions]


def attends(module: Any, start: Start | None = None, **more: Any) -> Attention:
    """One of timm's attentions, with heads of `head_dim` features."""
    head_dim = getattr(module, "head_dim", None) or module.proj.in_features // module.num_heads
    return Attention(module, module.num_heads * head_dim, module.num_heads, start=start, **more)


# ---------------------------------------------------------------------------------------------------------------
# Going on from what a model has itself.


def any_of(*starts: Start | None) -> Start | None:
    """The first that fits."""
    given = [start for start in starts if start is not None]
    return (lambda encoding: any(start(encoding) for start in given)) if given else None


def rows(table: Tensor | None) -> Start | None:
    """`learned` goes on from a table [1, prefix rows + patches, dim]; or [1, height, width, dim]."""
    return None if table is None else from_table(table.flatten(0, -2))


def offsets(*tables: Tensor | None) -> Start | None:
    """`swin` or `beit` goes on from a table [offsets (+ 3 of the class token), heads], or the sum of several."""
    given = [table for table in tables if table is not None]
    if not given:
        return None

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        table = torch.stack(list(given)).sum(0).mT  # [heads, offsets]
        if not isinstance(encoding, Swin | BEiT) or (isinstance(encoding, Swin) and encoding.grid.prefix):
            return False
        patches = encoding.table[0].numel()
        encoding.table.copy_(table[:, :patches].reshape(encoding.table.shape))
        if isinstance(encoding, BEiT) and encoding.prefix is not None:
            encoding.prefix.copy_(table[:, patches:])
        return True

    return start


# ---------------------------------------------------------------------------------------------------------------
# timm's rotations.


def rotations(rope: nn.Module | None) -> str | None:
    """The encoding that turns as a rotation of timm's does; None if none does, "" if there is no rotation."""
    match rope:
        case None:
            return ""
        case RotaryEmbeddingMixed():
            return f"rope_mixed(theta={float(rope.temperature)})"
        case RotaryEmbeddingDinoV3() if rope.rotate_half and rope.grid_indexing == "ij" and not rope.grid_offset:
            periods = "" if rope.min_period is None else f"periods={(rope.min_period, rope.max_period)}, "
            return (
                f"dinov3(base={rope.temperature}, {periods}normalize={rope.normalize_coords!r},"
                f" shift={rope.shift_coords}, jitter={rope.jitter_coords}, rescale={rope.rescale_coords})"
            )
        case RotaryEmbeddingMRope():
            return f"mrope(sections={tuple(rope.mrope_section)}, theta={float(rope.temperature)})"
        case RotaryEmbeddingCat() if rope.grid_type == "index" and not rope.in_pixels:
            reference = None if rope.ref_feat_shape is None else tuple(rope.ref_feat_shape)
            return (
                f"eva02(theta={float(rope.temperature)}, reference={reference}, grid_offset={rope.grid_offset},"
                f" order={'y' if rope.grid_indexing == 'ij' else 'x'!r},"
                f" layout={'half' if rope.rotate_half else 'interleaved'!r},"
                f" scaling={'none' if reference is None else 'pi'!r})"
            )
    return None


def frequencies(rope: nn.Module | None, block: int) -> Start | None:
    """`rope_mixed` goes on from those that timm's mixed rotation has for a block."""
    if not isinstance(rope, RotaryEmbeddingMixed):
        return None

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        fits = isinstance(encoding, RoPEMixed)
        if fits:
            own = rope.freqs[:, block]
            encoding.frequencies.copy_(own if rope.grid_indexing == "xy" else own.flip(0))
        return fits

    return start


def joined(parts: Sequence[str | None]) -> str | None:
    """Texts of encodings as one; None if one of them is None, "none" if there is nothing."""
    if None in parts:
        return None
    return " + ".join(part for part in parts if part) or "none"
