"""timm's NaFlexViT: images as they are, or batches of patches of images of several sizes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from timm.layers.attention import Attention
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, calculate_naflex_grid_sizes
from torch import Tensor

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own, Place, Stage, Start
from whereformer.adapters.swap import Equipped
from whereformer.adapters.timm.parts import (
    EquippedPatchDropout,
    EquippedPlain,
    any_of,
    attends,
    frequencies,
    fused,
    joined,
    rotations,
    rows,
)
from whereformer.adapters.timm.vit import EquippedVisionAttention
from whereformer.encoding import PositionEncoding
from whereformer.encodings import NaViT
from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.images import Images


def naflex(model: NaFlexVit) -> Host:
    embeds: Any = model.embeds
    attentions: list[Any] = [block.attn for block in cast(Any, model.blocks)]
    first = any_of(rows(embeds.pos_embed), _sides(embeds))
    blocks = [
        Block(
            block,
            [
                attends(
                    attention,
                    frequencies(model.rope, number),
                    behaviour=EquippedVisionAttention if type(attention) is Attention else None,
                )
            ],
            first if number == 0 else None,
        )
        for number, (block, attention) in enumerate(zip(cast(Any, model.blocks), attentions, strict=True))
    ]
    dropout = [] if model.patch_drop is None else [(model.patch_drop, EquippedPatchDropout)]
    return Host(
        [Stage(model.embed_dim, attentions[0].num_heads, _home(model), blocks)],
        own=[
            *(Own(embeds, name) for name in ("pos_embed", "pos_embed_y", "pos_embed_x")),
            Own(embeds, "pos_embed_type", "none", counts=False),
            Own(model, "rope"),
        ],
        switches=fused(attentions),
        swaps=[(embeds, EquippedNaFlexEmbeds), *dropout],
        behaviour=EquippedPlain,
        first=embeds.pos_drop,
        equal=joined([_equal(embeds), rotations(model.rope)]),
    )


def _home(model: NaFlexVit) -> Grid:
    """That of its table, or of the size it was configured for."""
    size = cast(Any, model.embeds).pos_embed_grid_size
    if size is None:
        configured = (cast(Any, model).pretrained_cfg or {}).get("input_size")
        if configured is None:
            raise InputError("equip: the model has no home grid; build it with pos_embed_grid_size")
        size = tuple(n // p for n, p in zip(configured[-2:], cast(Any, model.embeds).patch_size, strict=True))
    return Grid(*size, prefix=model.num_prefix_tokens)


def _equal(embeds: NaFlexEmbeds) -> str | None:
    """At home: elsewhere a table may keep its aspect ratio, or count from corners of patches."""
    if embeds.pos_embed_type == "none":
        return ""
    if embeds.pos_embed_type == "factorized":
        return "navit(coordinate='fractional')"
    return f"learned(mode={embeds.pos_embed_interp_mode!r}, antialias={embeds.pos_embed_antialias})"


def _sides(embeds: Any) -> Start | None:
    own = {"y": embeds.pos_embed_y, "x": embeds.pos_embed_x}
    if own["y"] is None:
        return None

    @torch.no_grad()
    def start(encoding: PositionEncoding) -> bool:
        fits = isinstance(encoding, NaViT) and all(
            table is not None and cast(Any, encoding.tables)[axis].shape == table.shape[1:]
            for axis, table in own.items()
        )
        if fits:
            for axis, table in own.items():
                cast(Any, encoding.tables)[axis].copy_(table[0])
        return fits

    return start


@dataclass(frozen=True)
class Rows(Images):
    """A batch of images, each in a row of its own: its tokens, then padding up to `length`."""

    length: int

    @property
    def tokens(self) -> int:
        return self.length

    def parts(self, device: torch.device | None = None) -> list[tuple[slice, Tensor]]:
        return [(slice(n, n + 1), torch.arange(g.tokens, device=device)) for n, g in enumerate(self.grids)]

    def _check_batch(self, batch: int, what: str) -> None:
        if batch != len(self.grids):
            raise InputError(f"{what} has a batch of {batch}, but there are {len(self.grids)} images")

    @classmethod
    def of(cls, coords: Tensor, prefix: int) -> "Rows":
        """From the (y, x) of each patch, [batch, patches, 2], row by row in each image."""
        grids = tuple(Grid(height, width, prefix) for height, width in calculate_naflex_grid_sizes(coords))
        return cls(grids, prefix + coords.shape[1])


class EquippedNaFlexEmbeds(Equipped, *((NaFlexEmbeds,) if TYPE_CHECKING else ())):
    """Tells where the patches are that it makes."""

    place: Place

    def forward(self, x: Tensor, patch_coord: Tensor | None = None, patch_valid: Tensor | None = None) -> Any:
        prefix = self.place.home.prefix
        if patch_coord is None:
            self.place.grid = Grid(*self.dynamic_feat_size((x.shape[-2], x.shape[-1])), prefix=prefix)
        else:
            self.place.grid = cast(Any, Rows.of(patch_coord, prefix))
        return super().forward(x, patch_coord, patch_valid)


HOSTS: Hosts = {NaFlexVit: naflex}
