"""timm's models of convolutions and attention on maps: most call torch's attention, and need but a line here."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from timm.layers.attention2d import Attention2d, MultiQueryAttention2d
from timm.models import edgenext, fastvit, iformer, lowformer, metaformer, nextvit, visformer
from timm.models._efficientnet_blocks import MobileAttention
from timm.models.cpubone import ConvAttention, CPUBone, CPUBoneBlock
from timm.models.csatv2 import CSATv2, TransformerBlock
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.mobilenetv5 import MobileNetV5, MobileNetV5Encoder
from torch import nn

from whereformer.adapters.behaviours import EquippedBlock, EquippedModel
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import TOKENS, Attention, Own, on_the_whole
from whereformer.adapters.timm.family import CHANNELS, NARROW, Family
from whereformer.adapters.timm.grids import between
from whereformer.adapters.timm.pyramids import Silent
from whereformer.grid import Grid


def heads_of(m: Any, **more: Any) -> Attention:
    """An attention with `num_heads` heads of `head_dim` features."""
    return Attention(m, m.num_heads * m.head_dim, m.num_heads, **more)


def gone(name: str, silent: type[nn.Module] | None = nn.Identity) -> Any:
    """A module's own encoding of that name, if it has one; in its place a module that passes through, or None."""

    def own(m: Any) -> Iterator[Own]:
        if getattr(m, name) is not None and not isinstance(getattr(m, name), nn.Identity):
            yield Own(m, name, silent and silent())

    return own


# ---------------------------------------------------------------------------------------------------------------
# MetaFormer: stages that attend lay their map out as tokens, and their blocks are told where these are.


class EquippedMetaFormer(EquippedModel):
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Each block that is told its grid computes itself again, on that grid."""
        cast(Any, super()).set_grad_checkpointing(enable)
        for stage in cast(Any, self).stages:
            for block in stage.blocks:
                if isinstance(block, EquippedBlock):
                    stage.grad_checkpointing = False
                    block.grad_checkpointing = enable


METAFORMER = Family(
    blocks={metaformer.MetaFormerBlock: TOKENS},
    attentions={metaformer.Attention: heads_of},
    tells=lambda model: [stage.downsample for stage in model.stages if not stage.use_nchw],
    behaviour=EquippedMetaFormer,
)

# ---------------------------------------------------------------------------------------------------------------
# On the whole map.

FASTVIT = Family(
    blocks={fastvit.AttentionBlock: CHANNELS},
    attentions={fastvit.Attention: heads_of},
    own={fastvit.FastVitStage: gone("pos_emb")},
)

VISFORMER = Family(
    blocks={visformer.Block: CHANNELS},
    attentions={visformer.Attention: heads_of},
    own={
        visformer.Visformer: lambda m: [
            own for name in ("pos_embed1", "pos_embed2", "pos_embed3") for own in gone(name, None)(m)
        ]
    },
)

# ---------------------------------------------------------------------------------------------------------------
# iFormer: one head, on the whole map or in windows; a convolution before each block says where its tokens are.


def single_head_grids(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    one = Grid(m.window_size, m.window_size) if m.window_size else grid
    return one, one


def single_head(m: Any) -> Attention:
    dim = round(m.scale**-2)
    return Attention(m, dim, 1, single_head_grids, takes=NARROW)


def convolutions(m: Any) -> Iterator[Own]:
    for name, block in m.named_children():
        if isinstance(block, iformer.RepCPE):
            yield Own(m, name, nn.Identity())


IFORMER = Family(
    blocks={iformer.SHMABlock: CHANNELS},
    attentions={iformer.SHMA: single_head},
    own={iformer.StageBlock: lambda m: convolutions(m.blocks)},
)

# ---------------------------------------------------------------------------------------------------------------
# LowFormer and CPUBone: on a map that strided convolutions have shrunk.


def shrunk(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    return between(m, grid, (m.att_stride, m.att_stride), (m.att_stride, m.att_stride))


LOWFORMER = Family(
    blocks={lowformer.LowFormerBlock: CHANNELS},
    attentions={lowformer.ConvAttention: partial(heads_of, grids=shrunk)},
)
CPUBONE = Family(
    blocks={CPUBoneBlock: CHANNELS},
    attentions={ConvAttention: partial(heads_of, grids=shrunk)},
)

# ---------------------------------------------------------------------------------------------------------------
# NextViT, EdgeNeXt: attention that takes nothing, in all blocks or in some.


def next_attention(m: Any) -> Attention:
    return heads_of(m, takes=()) if m.sr is not None else heads_of(m)


def next_deaf(block: Any) -> str:
    runs = block.e_mhsa.sr is not None
    return (
        "has for keys the means of runs of patches in raster order, which have no place on a grid" if runs else ""
    )


NEXTVIT = Family(
    blocks={nextvit.NextTransformerBlock: CHANNELS},
    attentions={nextvit.EfficientAttention: next_attention},
    deaf=next_deaf,
)

EDGENEXT = Family(
    blocks={edgenext.SplitTransposeBlock: CHANNELS},
    own={edgenext.SplitTransposeBlock: gone("pos_embd", None)},
    deaf=lambda block: "is between channels (cross-covariance), and has no logits between tokens",
)

# ---------------------------------------------------------------------------------------------------------------
# CSATv2: blocks that attend to a pooled map, or to the whole.


def halved(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    return between(m, grid, (2, 2), (2, 2))


def csat_attention(block: Any) -> Attention:
    m = block.attn
    return Attention(m, m.attn_dim, m.num_heads, halved if block.downsample else on_the_whole)


CSAT = Family(
    blocks={TransformerBlock: CHANNELS},
    attentions={TransformerBlock: csat_attention},
    own={TransformerBlock: gone("pos_embed", Silent)},
)

# ---------------------------------------------------------------------------------------------------------------
# MobileNet V4 and V5: queries of many heads, keys of one, on maps that are shrunk or not.


def strided(m: Any, grid: Grid) -> tuple[Grid, Grid]:
    return between(m, grid, tuple(m.query_strides), (m.kv_stride, m.kv_stride))


def multi_query(m: Any) -> Attention:
    takes = ("rotations", "biases", "values") if m.key_dim == m.value_dim else NARROW
    return Attention(m, m.num_heads * m.key_dim, m.num_heads, strided, takes=takes)


def multi_head(m: Any) -> Attention:
    return Attention(m, m.num_heads * m.dim_head, m.num_heads)


MOBILENET = Family(
    blocks={MobileAttention: CHANNELS},
    attentions={MultiQueryAttention2d: multi_query, Attention2d: multi_head},
    own={MobileAttention: gone("conv_cpe_dw", None)},
)

HOSTS: Hosts = {
    metaformer.MetaFormer: METAFORMER,
    fastvit.FastVit: FASTVIT,
    visformer.Visformer: VISFORMER,
    iformer.IFormer: IFORMER,
    lowformer.LowFormer: LOWFORMER,
    CPUBone: CPUBONE,
    nextvit.NextViT: NEXTVIT,
    edgenext.EdgeNeXt: EDGENEXT,
    CSATv2: CSAT,
    MobileNetV3: MOBILENET,
    MobileNetV5: MOBILENET,
    MobileNetV5Encoder: MOBILENET,
}
