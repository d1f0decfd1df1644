"""timm's VisionTransformer as a host of encodings."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from timm.layers.attention import Attention
from timm.layers.patch_dropout import PatchDropout, patch_dropout_forward
from timm.models import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from whereformer.adapters.shared import attach, build, held, names_of_parameters
from whereformer.adapters.swap import Equipped, swap_class
from whereformer.attention import attention, encode
from whereformer.catalog import Factory, spell
from whereformer.encoding import PositionEncoding
from whereformer.encodings import Learned
from whereformer.errors import InputError
from whereformer.grid import Grid


class Place(threading.local):
    """Where the tokens of this thread's forward are: filled before the first block, read by every layer."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (self.grid,)


@dataclass
class Placement:
    """The encodings that come to one block."""

    tokens: list[PositionEncoding] = field(default_factory=list)
    attentions: list[list[PositionEncoding]] = field(default_factory=list)


class EquippedModel(Equipped, *((VisionTransformer,) if TYPE_CHECKING else ())):
    """Encodings of tokens before the first block; the grid for all layers."""

    encodings: nn.ModuleList
    place: Place
    encoding: str

    def _pos_embed(self, x: Tensor) -> Tensor:
        self.place.grid = grid = _grid_of(self, x)
        if self.pos_embed is not None:
            x = super()._pos_embed(x)
        else:
            x = torch.cat([*_prefix_tokens(self, x.shape[0]), x.flatten(1, -2)], 1)
        x = encode(x, grid, held(self.encodings))
        return x if self.pos_embed is not None else self.pos_drop(x)

    @property
    def home_grid(self) -> Grid:
        """Where tokens are at the size the model was built for."""
        return _home_grid(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Each block computes itself again, on the grid it was computed on; timm's own way knows no grid."""
        super().set_grad_checkpointing(enable)
        self.grad_checkpointing = False
        for block in self.blocks:
            cast(EquippedBlock, block).grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | names_of_parameters(self)

    def group_matcher(self, coarse: bool = False) -> dict:
        groups = super().group_matcher(coarse)
        return {**groups, "stem": f"{groups['stem']}|encodings"}


class EquippedBlock(Equipped, *((nn.Module,) if TYPE_CHECKING else ())):
    """Encodings of tokens before a later block; the grid it was computed on, when it is computed again."""

    encodings: nn.ModuleList
    place: Place
    grad_checkpointing: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        compute = partial(self._compute, self.place.grid)
        if self.grad_checkpointing:
            return checkpoint(compute, x, *args, **kwargs)
        return compute(x, *args, **kwargs)

    def _compute(self, grid: Grid, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.place.grid is not grid:  # computed again, the place is a later forward's, or another thread's
            self.place.grid = grid
        x = encode(x, grid, held(self.encodings))
        return super().forward(x, *args, **kwargs)


class EquippedPatchDropout(Equipped, *((PatchDropout,) if TYPE_CHECKING else ())):
    """Tells the layers which patches it kept."""

    place: Place

    def forward(self, x: Tensor) -> Tensor:
        x, kept = patch_dropout_forward(x, self.prob, self.num_prefix_tokens, self.ordered, self.training)
        if kept is not None:
            self.place.grid = self.place.grid.keep(kept)
        return x


class EquippedAttention(Equipped, *((Attention,) if TYPE_CHECKING else ())):
    """timm's `Attention`, its own projections around ours."""

    encodings: nn.ModuleList
    place: Place

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if is_causal:
            attn_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        out = attention(
            q,
            k,
            v,
            self.place.grid,
            held(self.encodings),
            mask=attn_mask,
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


def equip(model: nn.Module, factories: Sequence[Factory], *, keep_own: bool) -> None:
    """As `whereformer.equip`: first everything that can fail, then the changes, which cannot."""
    model = _accept(model)
    grid = _home_grid(model)
    if len({id(block) for block in model.blocks}) < len(model.blocks):
        raise InputError("equip: one block stands in several places of the model; each needs encodings of its own")
    placements = [Placement(attentions=[[] for _ in _attentions(block)]) for block in model.blocks]
    for factory in factories:
        _distribute(factory, model, grid, placements)
    if not keep_own:
        _start_from_own(model, placements[0].tokens)

    place = Place(grid)
    if not keep_own:
        model.pos_embed = None
    for block, placement in zip(model.blocks, placements, strict=True):
        for module, encodings in zip(_attentions(block), placement.attentions, strict=True):
            if encodings:
                _attach(module, EquippedAttention, encodings, place)
    before_blocks = [[], *(placement.tokens for placement in placements[1:])]
    for block, encodings in zip(model.blocks, before_blocks, strict=True):
        _attach(block, EquippedBlock, encodings, place)
    if isinstance(model.patch_drop, PatchDropout):
        swap_class(model.patch_drop, EquippedPatchDropout)
        cast(EquippedPatchDropout, model.patch_drop).place = place
    _attach(model, EquippedModel, placements[0].tokens, place)
    equipped = cast(EquippedModel, model)
    equipped.encoding = " + ".join(map(spell, factories))
    equipped.set_grad_checkpointing(equipped.grad_checkpointing)


def _accept(model: nn.Module) -> VisionTransformer:
    if isinstance(model, EquippedModel):
        raise InputError(f"equip: the model has {model.encoding!r} already; equip a fresh one")
    if not isinstance(model, VisionTransformer):
        raise InputError(
            f"equip: {type(model).__name__} is not a timm VisionTransformer, Twins or PyramidVisionTransformerV2"
            " (and equip comes before torch.compile, DDP or FSDP)"
        )
    if type(model)._pos_embed not in (VisionTransformer._pos_embed, VisionTransformerDistilled._pos_embed):
        raise InputError(f"equip: {type(model).__name__} adds positions in a way of its own (_pos_embed)")
    if model.patch_embed.grid_size is None:
        raise InputError("equip: the model has no home grid; build it with an img_size")
    if not (model.dynamic_img_size or getattr(model.patch_embed, "strict_img_size", True)):
        raise InputError(
            "equip: the patch embedding takes any size without telling which (strict_img_size=False);"
            " build the model with dynamic_img_size=True"
        )
    return model


def _distribute(factory: Factory, model: VisionTransformer, grid: Grid, placements: list[Placement]) -> None:
    """Build one encoding for each place that asks for it."""
    like = next(model.patch_embed.parameters())
    heads = next((module.num_heads for block in model.blocks for module in _attentions(block)), 1)
    scout = build(factory, like, model.embed_dim, heads, grid)
    attends = set(scout.moments()) - {"tokens"}
    for number in scout.blocks(len(placements)):
        if not 0 <= number < len(placements):
            raise InputError(
                f"equip: {spell(factory)} asks for block {number} of {len(placements)}, counted from 0"
            )
        placement = placements[number]
        if not attends:
            placement.tokens.append(build(factory, like, model.embed_dim, heads, grid))
            placement.tokens[-1].at_block(number, len(placements))
            continue
        modules = _attentions(model.blocks[number])
        if not modules:
            raise InputError(
                f"equip: block {number} is a {type(model.blocks[number]).__name__} without timm's Attention,"
                f" so {spell(factory)} cannot act there; encodings of tokens can"
            )
        for module, encodings in zip(modules, placement.attentions, strict=True):
            encodings.append(build(factory, like, module.attn_dim, module.num_heads, grid))
            encodings[-1].at_block(number, len(placements))
        if "tokens" in scout.moments():
            placement.tokens.append(placement.attentions[0][-1])


def _start_from_own(model: VisionTransformer, encodings: list[PositionEncoding]) -> None:
    """A learned table is what the model had: it goes on from there."""
    for encoding in encodings:
        if isinstance(encoding, Learned) and model.pos_embed is not None:
            encoding.start_from(model.pos_embed[0])
            return


def _attach(module: nn.Module, behaviour: type[Equipped], encodings: list[PositionEncoding], place: Place) -> None:
    attach(module, behaviour, encodings)
    cast(EquippedBlock, module).place = place


def _attentions(block: nn.Module) -> list[Attention]:
    """Exactly timm's Attention: a subclass may do something else."""
    return [module for module in block.modules() if type(module) is Attention]


def _home_grid(model: VisionTransformer) -> Grid:
    return Grid(*model.patch_embed.grid_size, prefix=model.num_prefix_tokens)


def _grid_of(model: VisionTransformer, x: Tensor) -> Grid:
    """From the patch embedding's output: [batch, height, width, dim] (dynamic size) or [batch, patches, dim]."""
    if x.ndim == 3:
        return _home_grid(model)
    return Grid(x.shape[1], x.shape[2], model.num_prefix_tokens)


def _prefix_tokens(model: VisionTransformer, batch: int) -> Iterator[Tensor]:
    for name in ("cls_token", "dist_token", "reg_token"):
        token = getattr(model, name, None)
        if token is not None:
            yield token.expand(batch, -1, -1)
