"""Small models of every family of timm's plain transformers: architecture, how it is made small."""

from functools import partial

import timm
import torch
from timm.models.volo import VOLO
from torch import nn

from whereformer import PositionEncoding

SIZE = {"img_size": 32, "patch_size": 8, "num_classes": 5}
SMALL = {**SIZE, "embed_dim": 32, "depth": 2, "num_heads": 2}
ENCODER = {name: value for name, value in SMALL.items() if name != "num_classes"}
COAT = {"img_size": 64, "num_classes": 5, "serial_depths": [2] * 4}
PIT = {"img_size": 48, "stride": 8, "base_dims": [16] * 3, "heads": [1, 2, 2], "depth": [2] * 3, "num_classes": 5}
TNT = {**SIZE, "embed_dim": 32, "depth": 2, "inner_dim": 16, "num_heads_inner": 2, "num_heads_outer": 2}
VOLO_D1 = {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (2, 2, 2, 2), "stem_hidden_dim": 8}

FAMILIES = {
    "eva02": ("eva02_base_patch14_224", {**SMALL, "img_size": 28, "patch_size": 7}),
    "eva, table": ("eva_giant_patch14_224", {**SMALL, "mlp_ratio": 2}),
    "dinov3": ("vit_small_patch16_dinov3", SMALL),
    "rope-vit, axial": ("vit_small_patch16_rope_224", SMALL),
    "rope-vit, mixed": ("vit_small_patch16_rope_mixed_ape_224", SMALL),
    "perception encoder": ("vit_pe_core_tiny_patch16_384", SMALL),
    "beit": ("beit_base_patch16_224", SMALL),
    "beit, shared": (
        "beit_base_patch16_224",
        {**SMALL, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "use_abs_pos_emb": True},
    ),
    "relpos, mlp": ("vit_relpos_small_patch16_224", SMALL),
    "relpos, mlp as swin": ("vit_relpos_small_patch16_224", {**SMALL, "rel_pos_type": "mlp-swin"}),
    "relpos, shared table": (
        "vit_srelpos_small_patch16_224",
        {**SMALL, "rel_pos_type": "bias"},
    ),
    "relpos, class token": ("vit_relpos_base_patch16_clsgap_224", {**SMALL, "rel_pos_type": "bias"}),
    "sam": ("samvit_base_patch16", {**SMALL, "img_size": 40, "window_size": 3, "global_attn_indexes": (1,)}),
    "naflex": ("naflexvit_base_patch16_gap", {**SMALL, "pos_embed_grid_size": (4, 4)}),
    "naflex, factorized": ("naflexvit_base_patch16_parfac_gap", {**SMALL, "pos_embed_grid_size": (4, 4)}),
    "qwen3": ("qwen3_vit_88m", {**SMALL, "pos_embed_grid_size": 4}),
    "qwen3, encoder": ("qwen3_vit_88m_enc", {**ENCODER, "pos_embed_grid_size": 4, "global_pool": "avg"}),
    "deepseek": ("deepseek_vit_412m", SMALL),
    "gemma4": ("gemma4_vit_167m", {**SMALL, "head_dim": 16, "position_embedding_size": 20}),
    "cait": ("cait_xxs24_224", SMALL),
    "xcit": ("xcit_nano_12_p8_224", SMALL),
    "coat": ("coat_tiny", {**COAT, "embed_dims": [32] * 4, "parallel_depth": 1}),
    "coat lite": ("coat_lite_tiny", {**COAT, "embed_dims": [16, 16, 32, 32]}),
    "tnt": ("tnt_s_patch16_224", TNT),
    "convit": ("convit_tiny", {**SIZE, "embed_dim": 8, "depth": 3, "num_heads": 4, "local_up_to_layer": 2}),
    "crossvit": (
        "crossvit_tiny_240",
        {
            "img_size": 48,
            "img_scale": (1.0, 1.0),
            "patch_size": (8, 16),
            "embed_dim": (16, 32),
            "num_heads": (2, 2),
            "depth": ((1, 2, 0), (1, 1, 0)),
            "num_classes": 5,
        },
    ),
    "pit": ("pit_ti_224", PIT),
    "pit, distilled": ("pit_ti_distilled_224", PIT),
    "volo": ("volo_d1_224", VOLO_D1),
    "parallel": ("vit_base_patch16_xp_224", SMALL),
    "differential": ("vit_dlittle_patch16_reg1_gap_256", SMALL),
    "differential, parallel": ("vit_dpwee_patch16_reg1_gap_256", SMALL),
}
"""timm's VisionTransformer has tests of its own."""


def make(family: str, **options) -> nn.Module:
    """Random weights, large enough for every one of them to be seen in the output."""
    name, small = FAMILIES[family]
    torch.manual_seed(0)
    if family == "volo":  # its architectures let nobody change these
        model = VOLO(**small, img_size=64, num_classes=5, **options)
    else:
        model = timm.create_model(name, **{**small, **options})
    for where, parameter in model.named_parameters():
        if parameter.ndim >= 2 or "pos" in where or "gamma" in where or ".ls" in where:
            nn.init.normal_(parameter, std=0.5 if "pos" in where else 0.3)
    return model.eval()


def images(family: str, height: int = 0, width: int = 0) -> torch.Tensor:
    side = 64 if family == "volo" else FAMILIES[family][1]["img_size"]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, height or side, width or side, generator=generator)


def randomise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.5)


close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
