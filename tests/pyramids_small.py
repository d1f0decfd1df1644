"""timm's families with windows, pyramids and attention on maps, as small as they can be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from timm.models.cpubone import CPUBone
from timm.models.efficientformer_v2 import EfficientFormerV2
from timm.models.gcvit import GlobalContextVit
from timm.models.metaformer import Attention as MetaAttention
from timm.models.metaformer import LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.nest import Nest
from torch import nn


@dataclass(frozen=True)
class Small:
    """One model of a family.

    Args:
        name: timm's.
        options: what makes it small.
        size: of its images.
        other: another size that it takes, if it takes any.
        equal: the encodings that are its own, if there are any.
        speaks: encodings of attention that it takes.
    """

    name: str | Callable[..., nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    size: tuple[int, int] = (64, 64)
    other: tuple[int, int] | None = None
    equal: str | dict[Any, str] = ""
    speaks: str = "irpe(on='qkv') + rope_axial"


TWO = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 32}
FOUR = {"depths": (1, 1, 1, 1)}
NARROW = "irpe(on='qk') + rope_axial"


def mvit(**options: Any) -> nn.Module:
    kinds = {"depths": (1, 2), "embed_dim": (16, 32), "num_heads": (1, 2), "stride_q": ((1, 1), (2, 2)), **options}
    return MultiScaleVit(MultiScaleVitCfg(**kinds), img_size=(32, 32), num_classes=5)


def byob(kind: str, size: int = 64, **options: Any) -> nn.Module:
    block = ByoBlockCfg("self_attn", d=2, c=16, s=1, gs=0, br=0.5, self_attn_layer=kind, self_attn_kwargs=options)
    first = ByoBlockCfg("bottle", d=1, c=16, s=2, gs=0, br=0.5)
    cfg = ByoModelCfg((first, block), stem_chs=8, stem_pool="", num_features=0)
    model = ByobNet(cfg, num_classes=5, img_size=size)
    model.pretrained_cfg = {"input_size": (3, size, size)}
    return model


SMALL = {
    "swin": Small("swin_tiny_patch4_window7_224", {**TWO, "strict_img_size": False}, (32, 32), (24, 40), "swin"),
    "swin v2": Small("swinv2_tiny_window8_256", TWO, (32, 32), equal="log_cpb"),
    "swin v2 cr": Small("swinv2_cr_tiny_ns_224", TWO, (32, 32)),
    "maxvit tf": Small("maxvit_tiny_tf_224", {"img_size": 64, "embed_dim": (32, 32, 64, 64), **FOUR, "stem_width": 16}, equal="maxvit"),
    "coatnet": Small("test_coatnet", {"img_size": 64}),
    "davit": Small("davit_tiny", {"embed_dims": (8, 16, 32, 64), **FOUR, "num_heads": (1, 2, 4, 8)}, other=(32, 96)),
    "nest": Small(partial(Nest, img_size=32, embed_dims=(16, 32, 32), num_heads=(2, 2, 4), depths=(1, 1, 2), num_classes=5), size=(32, 32), equal="learned"),
    "gcvit": Small(partial(GlobalContextVit, img_size=64, embed_dim=16, depths=(2, 2, 1, 1), num_heads=(2, 2, 4, 4), num_classes=5), equal="swin"),
    "tinyvit": Small("tiny_vit_5m_224", {"embed_dims": (8, 16, 32, 64), **FOUR, "num_heads": (1, 2, 2, 2), "window_sizes": (2, 2, 3, 2)}, other=(32, 96), equal="levit"),
    "levit": Small("levit_128s", {"img_size": 64, "embed_dim": (32, 48), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 3)}, equal="levit", speaks=NARROW),
    "levit conv": Small("levit_conv_128s", {"img_size": 64, "embed_dim": (32, 48), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 3)}, equal="levit", speaks=NARROW),
    "efficientformer": Small("efficientformer_l1", {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 2)}, (224, 224), equal="levit", speaks=NARROW),
    "efficientformer v2": Small(partial(EfficientFormerV2, (1, 1, 2, 1), img_size=64, embed_dims=(8, 16, 16, 32), downsamples=(False, True, True, True), num_vit=1, num_classes=5), equal="levit", speaks=NARROW),
    "efficientvit": Small("efficientvit_m0", {"img_size": 64, "embed_dim": (16, 32, 32), "key_dim": (4, 8, 8), "depth": (1, 1, 1), "num_heads": (2, 2, 2), "window_size": (2, 2, 2)}, equal="levit", speaks=NARROW),
    "shvit": Small("shvit_s1", {"embed_dim": (32, 32, 48), "partial_dim": (8, 9, 12), "qk_dim": (8, 8, 8), "depth": (1, 1, 1)}, other=(64, 96), speaks=NARROW),
    "caformer": Small(partial(MetaFormer, depths=(1, 2, 1), dims=(8, 32, 64), token_mixers=(SepConv, MetaAttention, MetaAttention), norm_layers=(LayerNorm2dNoBias, LayerNormNoBias, LayerNormNoBias), num_classes=5), other=(64, 96)),
    "fastvit": Small("fastvit_sa12", {"embed_dims": (8, 16, 32, 64), "layers": (1, 1, 1, 1)}, other=(64, 96)),
    "visformer": Small("visformer_tiny", {"img_size": 64, "embed_dim": 32, "init_channels": 8, "depth": (1, 1, 1), "num_heads": 2}),
    "iformer": Small("iformer_t", {"dims": (8, 16, 32, 64), "depths": (1, 1, 3, 3), "attn_groups": (0, 0, 1, 1)}, other=(64, 96), speaks=NARROW),
    "lowformer": Small("lowformer_b0", {"width_list": (8, 8, 8, 64, 128), "depth_list": (0, 1, 1, 1, 1)}, other=(64, 128)),
    "cpubone": Small(partial(CPUBone, (8, 8, 8, 64, 128), (0, 1, 1, 1, 1), num_classes=5), other=(64, 128)),
    "mobilevit": Small("mobilevit_xxs", {}, (32, 32), (32, 64)),
    "botnet": Small(partial(byob, "bottleneck", num_heads=2), equal="botnet(scaled=False)"),
    "halonet": Small(partial(byob, "halo", num_heads=2, block_size=4, halo_size=2), other=(64, 96), equal="botnet(scaled=False)"),
    "hiera": Small("hiera_tiny_224", {"img_size": (64, 64), "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1)}, equal={0: "learned"}),
    "hiera abswin": Small("hiera_tiny_224", {"img_size": (64, 64), "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1), "abs_win_pos_embed": True, "global_pos_size": (5, 5)}, equal={0: "abs_win(size=(5, 5))"}),
    "sam2": Small("sam2_hiera_tiny", {"embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2), "window_spec": (4, 4, 2), "global_att_blocks": (3,), "q_pool": 2}, other=(64, 96), equal={0: "abs_win(window=(4, 4), size=(7, 7), antialias=False)"}),
    "mvit": Small(mvit, size=(32, 32), equal="decomposed"),
    "mvit with class": Small(partial(mvit, use_cls_token=True, use_abs_pos=True), size=(32, 32), equal={0: "learned + decomposed", range(1, 3): "decomposed"}),
    "pvt v2": Small("pvt_v2_b0", {"embed_dims": (8, 16), "num_heads": (1, 2), "depths": (1, 2), "sr_ratios": (8, 4)}, other=(64, 96)),
    "pvt v2 linear": Small("pvt_v2_b2_li", {"embed_dims": (8, 16), "num_heads": (1, 2), "depths": (1, 2)}, other=(64, 96)),
    "twins pcpvt": Small("twins_pcpvt_small", {"img_size": 64, "embed_dims": (8, 16), "num_heads": (1, 2), "depths": (2, 2), "sr_ratios": (8, 4)}, equal="peg"),
    "twins svt": Small("twins_svt_small", {"img_size": 64, "embed_dims": (8, 16), "num_heads": (1, 2), "depths": (2, 2), "sr_ratios": (4, 2), "wss": (3, 3)}, equal="peg"),
}  # fmt: skip


def small(kind: str, **more: Any) -> nn.Module:
    """Random weights, in float64, that do something: what the model says itself of where tokens are shows in its output."""
    chosen = SMALL[kind]
    torch.manual_seed(0)
    if isinstance(chosen.name, str):
        model = timm.create_model(chosen.name, **{"num_classes": 5, **chosen.options, **more})
    else:
        model = chosen.name(**more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.5)
            if parameter.ndim == 1 or parameter.abs().max() < 1e-3:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if any(
                word in name
                for word in (
                    "bias_table",
                    "attention_biases",
                    "rel_pos",
                    "_rel",
                    "pos_embed",
                    "cpb_mlp",
                    "meta_mlp",
                )
            ):
                parameter.add_(torch.randn_like(parameter))
    return model.double().eval()


def images(kind: str, size: tuple[int, int] | None = None) -> torch.Tensor:
    height, width = size or SMALL[kind].size
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
