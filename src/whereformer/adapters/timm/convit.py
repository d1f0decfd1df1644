"""timm's ConViT: attention gated between contents and positions, then blocks with a class token."""

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from timm.models import convit as timm_convit
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, attend
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Block, Counted, Host, Own, Stage
from whereformer.adapters.timm.parts import EquippedStemmed, attends, rows, swaps
from whereformer.grid import Grid


def convit(model: timm_convit.ConVit) -> Host:
    blocks: list[Any] = list(model.blocks)
    heads = blocks[0].attn.num_heads
    described = [
        Block(
            block, [_attention(block.attn)], rows(model.pos_embed) if number == 0 and model.use_pos_embed else None
        )
        for number, block in enumerate(blocks)
    ]
    gated = [block.attn for block in blocks if isinstance(block.attn, timm_convit.GPSA)]
    own = [Own(attention, name) for attention in gated for name in ("pos_proj", "gating_param")]
    own += [Own(a, "get_attention", partial(_contents, a), counts=False) for a in gated]
    if model.use_pos_embed:
        own += [Own(model, "pos_embed"), Own(model, "use_pos_embed", False, counts=False)]
    grid = Grid(*cast(Any, model.patch_embed).grid_size)
    return Host(
        [Stage(model.embed_dim, heads, grid, described, Counted())],
        own=own,
        swaps=swaps(model),
        behaviour=EquippedStemmed,
        first=model.pos_drop,
    )


def _attention(module: nn.Module) -> Attention:
    if isinstance(module, timm_convit.GPSA):
        return attends(module, behaviour=EquippedGPSA)
    return attends(module, behaviour=EquippedMHSA, grids=_with_class)


def _with_class(attention: nn.Module, grid: Grid) -> tuple[Grid, Grid]:
    """At home too, where the grid is that of the first blocks, the class token is there."""
    grid = grid if grid.prefix else Grid(grid.height, grid.width, 1)
    return grid, grid


def _contents(module: Any, x: Tensor) -> Tensor:
    """The weights of a GPSA that has lost its positions."""
    q, k = module.qk(x).unflatten(-1, (2, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return module.attn_drop((q @ k.mT * module.scale).softmax(-1))


class EquippedGPSA(EquippedAttention, *((timm_convit.GPSA,) if TYPE_CHECKING else ())):
    """Encodings speak in the attention to contents; that to positions, and the gate, are as they were, or gone."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = attend(self, q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        if self.gating_param is not None:
            if self.rel_indices.shape[1] != x.shape[1]:
                self.rel_indices = self.get_rel_indices(x.shape[1])
            positions = self.attn_drop(self.pos_proj(self.rel_indices).movedim(-1, 1).softmax(-1))
            gate = self.gating_param.sigmoid()[:, None, None]
            out = (1 - gate) * out + gate * (positions @ v)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class EquippedMHSA(EquippedAttention, *((timm_convit.MHSA,) if TYPE_CHECKING else ())):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = attend(self, q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


HOSTS: Hosts = {timm_convit.ConVit: convit}
