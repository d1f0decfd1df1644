"""Small models, and their weights under the names and in the shapes that the official repositories have.

Written from what the repositories say, the other way round than the library goes, and without it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn

from whereformer import equip

State = dict[str, Tensor]


def small(name: str, **options: Any) -> nn.Module:
    options = {"num_classes": 5, **options}
    model = timm.create_model(name, **options).eval()
    randomised(model)
    return model


def randomised(model: nn.Module) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=0.2)


def renamed(state: State, *pairs: tuple[str, str]) -> State:
    """Each pattern in turn, as `re.sub` has them."""
    found = {}
    for name, value in state.items():
        for pattern, new in pairs:
            name = re.sub(pattern, new, name)
        found[name] = value
    return found


@dataclass
class Case:
    """A layout, a model, what its weights are called officially, and what the repository has besides."""

    layout: str
    model: Callable[[], nn.Module]
    official: Callable[[State], State]
    besides: State = field(default_factory=dict)
    size: int = 32
    exact: bool = True
    """Whether the numbers are the same to the bit, not only the outputs."""
    back: bool = True
    """Whether the way back leads to the same official names."""

    def image(self) -> Tensor:
        return torch.randn(2, 3, self.size, self.size)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
PYRAMID = {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (1, 2), "num_heads": (1, 2)}


def buffers(*names: str) -> State:
    """Derived buffers of a size that fits nothing."""
    return {name: torch.zeros(3, 3) for name in names}


def dinov2_with_registers(state: State) -> State:
    state = dict(state)
    state["register_tokens"] = state.pop("reg_token")
    row = torch.randn_like(state["cls_token"])
    state["cls_token"] = state["cls_token"] - row
    state["pos_embed"] = torch.cat([row, state["pos_embed"]], 1)
    return state


def eva02(state: State) -> State:
    return renamed(
        state,
        (r"mlp\.fc1_g", "mlp.w1"),
        (r"mlp\.fc1_x", "mlp.w2"),
        (r"mlp\.norm", "mlp.ffn_ln"),
        (r"attn\.norm", "attn.inner_attn_ln"),
        (r"(fc2)(\.\w+)$", r"w3\2"),
        (r"([qv])_proj\.bias", r"\1_bias"),
        (r"mlp\.fc1\.", "mlp.w12."),
    )


def dinov3(state: State) -> State:
    state = renamed(
        state,
        ("reg_token", "storage_tokens"),
        (r"gamma_(\d)", r"ls\1.gamma"),
        (r"fc1_g", "w1"),
        (r"fc1_x", "w2"),
        (r"(mlp\.)fc2", r"\1w3" if any("fc1_g" in name for name in state) else r"\1fc2"),
    )
    for block in range(2):
        stem = f"blocks.{block}.attn."
        q, v = state.pop(f"{stem}q_bias", torch.zeros(48)), state.pop(f"{stem}v_bias", torch.zeros(48))
        state[f"{stem}qkv.bias"] = torch.cat([q, torch.randn(48), v])  # that of keys is masked
        state[f"{stem}qkv.bias_mask"] = torch.full((144,), torch.nan)
    return state


def swin(state: State) -> State:
    return {
        re.sub(r"layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name).replace(
            "head.fc.", "head."
        ): value
        for name, value in state.items()
    }


def unfolded(rows: Tensor, features: int) -> Tensor:
    """From timm's order of the features of 2 x 2 patches to that of nn.Unfold, feature by feature."""
    new = torch.empty_like(rows)
    for dx in range(2):
        for dy in range(2):
            for feature in range(features):
                new[..., feature * 4 + dy * 2 + dx] = rows[..., (dx * 2 + dy) * features + feature]
    return new


def mm_swin(state: State) -> State:
    found = {}
    for name, value in state.items():
        name = re.sub(r"layers\.(\d+)\.downsample", lambda m: f"stages.{int(m[1]) - 1}.downsample", name)
        name = re.sub(r"^layers\.(\d+)\.blocks\.(\d+)\.attn\.", r"stages.\1.blocks.\2.attn.w_msa.", name)
        name = name.replace("layers.", "stages.", 1) if name.startswith("layers.") else name
        name = name.replace("mlp.fc1", "ffn.layers.0.0").replace("mlp.fc2", "ffn.layers.1")
        name = name.replace("patch_embed.proj", "patch_embed.projection")
        name = re.sub(r"^norm\.", "norm3.", name)
        if name.endswith("downsample.reduction.weight") or (
            ".downsample.norm" in name and value.shape[-1] % 48 == 0
        ):
            value = unfolded(value, value.shape[-1] // 4)
        found[name if name.startswith("head") else f"backbone.{name}"] = value
    return found


def mm_vit(state: State) -> State:
    state = renamed(
        state,
        (r"patch_embed\.proj", "patch_embed.projection"),
        (r"blocks\.(\d+)\.norm(\d)", r"layers.\1.ln\2"),
        (r"blocks\.(\d+)\.ls1\.gamma", r"layers.\1.attn.gamma1.weight"),
        (r"blocks\.(\d+)\.ls2\.gamma", r"layers.\1.ffn.gamma2.weight"),
        (r"mlp\.fc1", "ffn.layers.0.0"),
        (r"mlp\.fc2", "ffn.layers.1"),
        (r"^blocks", "layers"),
        (r"^norm\.", "ln1."),
        (r"^fc_norm\.", "ln2."),
    )
    return {
        f"backbone.{name}" if not name.startswith("head") else name.replace("head.", "head.layers.head."): value
        for name, value in state.items()
    }


def detectron2(state: State) -> State:
    state = {f"backbone.net.{name}": value for name, value in state.items() if not name.startswith("head")}
    table = state["backbone.net.pos_embed"]
    state["backbone.net.pos_embed"] = torch.cat([torch.randn(1, 1, 48), table.flatten(1, 2)], 1)
    return state


SAM = {**VIT, "global_attn_indexes": (1,), "window_size": 3}
BEIT_INDEX = "blocks.0.attn.relative_position_index"

CASES = {
    "deit3": Case(
        "deit3",
        lambda: small("deit3_small_patch16_224", **VIT),
        lambda s: renamed(s, (r"ls(\d)\.gamma", r"gamma_\1")),
    ),
    "rope-vit-mixed": Case(
        "rope-vit-mixed",
        lambda: small("vit_small_patch16_rope_mixed_224", **VIT),
        lambda s: {k.replace("rope.freqs", "freqs"): v.flatten(2) if "freqs" in k else v for k, v in s.items()},
        buffers("freqs_t_x", "freqs_t_y"),
    ),
    "rope-vit-mixed, with a table": Case(
        "rope-vit-mixed",
        lambda: small("vit_small_patch16_rope_mixed_ape_224", **VIT),
        lambda s: {k.replace("rope.freqs", "freqs"): v.flatten(2) if "freqs" in k else v for k, v in s.items()},
        buffers("freqs_t_x", "freqs_t_y"),
    ),
    "rope-vit-axial": Case("rope-vit-axial", lambda: small("vit_small_patch16_rope_224", **VIT), dict),
    "rope-vit-axial, with a table": Case(
        "deit3", lambda: small("vit_small_patch16_rope_ape_224", **VIT), dict, back=False
    ),
    "swin": Case(
        "swin",
        lambda: small("swin_tiny_patch4_window7_224", **PYRAMID),
        swin,
        buffers("layers.0.blocks.0.attn.relative_position_index", "layers.0.blocks.1.attn_mask"),
    ),
    "swinv2": Case(
        "swinv2",
        lambda: small("swinv2_tiny_window8_256", **PYRAMID),
        swin,
        buffers("layers.0.blocks.0.attn.relative_coords_table", "layers.0.blocks.0.attn.relative_position_index"),
    ),
    "beit": Case(
        "beit",
        lambda: small("beit_base_patch16_224", **VIT),
        dict,
        buffers(BEIT_INDEX, "mask_token", "lm_head.weight"),
    ),
    "sam": Case(
        "sam",
        lambda: small("samvit_base_patch16", **SAM, num_classes=0),
        lambda s: {f"image_encoder.{name.replace('mlp.fc', 'mlp.lin')}": value for name, value in s.items()},
        buffers("prompt_encoder.no_mask_embed.weight", "mask_decoder.iou_token.weight", "pixel_mean"),
    ),
    "dinov2": Case(
        "dinov2", lambda: small("vit_small_patch14_dinov2", **VIT, num_classes=0), dict, buffers("mask_token")
    ),
    "dinov2, giant": Case(
        "dinov2",
        lambda: small("vit_giant_patch14_dinov2", **VIT, num_classes=0),
        lambda s: renamed(s, (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3")),
        buffers("mask_token"),
    ),
    "dinov2, with registers": Case(
        "dinov2-reg",
        lambda: small("vit_small_patch14_reg4_dinov2", **VIT, num_classes=0),
        dinov2_with_registers,
        buffers("mask_token"),
        exact=False,
    ),
    "dinov2, of its training": Case(
        "dinov2-training",
        lambda: small("vit_small_patch14_dinov2", **VIT, num_classes=0),
        lambda s: {f"backbone.{name}".replace("blocks.", "blocks.0."): value for name, value in s.items()},
        {"backbone.mask_token": torch.zeros(1, 48), **buffers("dino_head.last_layer.weight_g")},
        back=False,
    ),
    "dinov3": Case(
        "dinov3",
        lambda: small("vit_small_patch16_dinov3", **VIT, num_classes=0),
        dinov3,
        buffers("mask_token", "rope_embed.periods"),
    ),
    "dinov3, with biases": Case(
        "dinov3",
        lambda: small("vit_small_patch16_dinov3_qkvb", **VIT, num_classes=0),
        dinov3,
        buffers("mask_token", "rope_embed.periods", "local_cls_norm.weight"),
    ),
    "dinov3, gated": Case(
        "dinov3",
        lambda: small("vit_small_plus_patch16_dinov3", **VIT, num_classes=0),
        dinov3,
        buffers("mask_token", "rope_embed.periods"),
    ),
    "eva02, base": Case(
        "eva02",
        lambda: small("eva02_base_patch14_448", **VIT),
        eva02,
        buffers("rope.freqs_cos", "rope.freqs_sin", "blocks.0.attn.rope.freqs_cos"),
    ),
    "eva02, tiny": Case(
        "eva02", lambda: small("eva02_tiny_patch14_336", **VIT), eva02, buffers("rope.freqs_cos", "rope.freqs_sin")
    ),
    "mae": Case(
        "mae",
        lambda: small("vit_base_patch16_224", **VIT, num_classes=0),
        dict,
        buffers("mask_token", "decoder_embed.weight", "decoder_blocks.0.attn.qkv.weight", "decoder_pos_embed"),
    ),
    "mmpretrain": Case("mmpretrain", lambda: small("vit_base_patch16_224", **VIT), mm_vit),
    "mmpretrain, deit3": Case("mmpretrain", lambda: small("deit3_small_patch16_224", **VIT), mm_vit),
    "mmpretrain-beit": Case(
        "mmpretrain-beit",
        lambda: small("beit_base_patch16_224", **VIT),
        lambda s: {
            re.sub(r"(gamma_\d)$", r"\1", name): value
            for name, value in renamed(mm_vit(s), (r"head\.layers\.head", "head.fc")).items()
        },
        buffers("backbone.layers.0.attn.relative_position_index"),
        back=False,
    ),
    "mmpretrain-swin": Case(
        "mmpretrain-swin",
        lambda: small("swin_tiny_patch4_window7_224", **PYRAMID),
        mm_swin,
        buffers("backbone.stages.0.blocks.0.attn.w_msa.relative_position_index", "backbone.norm0.weight"),
    ),
    "mmpretrain-swinv2": Case(
        "mmpretrain-swinv2",
        lambda: small("swinv2_tiny_window8_256", **PYRAMID),
        mm_swin,
        buffers("backbone.stages.0.blocks.0.attn.w_msa.relative_coords_table", "neck.conv.weight"),
    ),
    "detectron2": Case(
        "detectron2",
        lambda: small("samvit_base_patch16", **SAM, num_classes=0, neck_chans=0),
        detectron2,
        buffers("backbone.simfp_2.0.weight", "roi_heads.mask_head.weight", "pixel_std"),
        back=False,
    ),
    "twins": Case(
        "twins",
        lambda: small(
            "twins_pcpvt_small", img_size=64, embed_dims=(8, 8, 8, 8), depths=(2, 2, 2, 2), num_heads=(1, 1, 1, 1)
        ),
        dict,
        size=64,
    ),
}
"""Layouts of models that timm has."""


def lookhere() -> nn.Module:
    """The released head is an MLP with tanh."""
    options = {**VIT, "embed_dim": 96, "num_heads": 12, "num_classes": 0, "dynamic_img_size": True}
    model = timm.create_model("deit3_small_patch16_224", **options)
    model = equip(model, "lookhere").eval()
    model.head = timm.layers.Mlp(96, 384, 5, act_layer=nn.Tanh)
    randomised(model)
    return model


def of_detr(state: State) -> State:
    """The official names of what transformers' DetrForObjectDetection holds, without its encodings."""
    found = {}
    for name, value in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            value = torch.cat([state[name.replace("q_proj", f"{side}_proj")] for side in "qkv"])
        found[name] = value
    return renamed(
        found,
        (r"encoder_attn\.", "multihead_attn."),
        (r"(self_attn|multihead_attn)\.q_proj\.", r"\1.in_proj_"),
        (r"o_proj", "out_proj"),
        (r"mlp\.fc", "linear"),
        (r"self_attn_layer_norm", "norm1"),
        (r"encoder_attn_layer_norm", "norm2"),
        (r"(encoder\.layers\.\d)\.final_layer_norm", r"\1.norm2"),
        (r"(decoder\.layers\.\d)\.final_layer_norm", r"\1.norm3"),
        (r"decoder\.layernorm", "decoder.norm"),
        (r"^model\.(encoder|decoder)", r"transformer.\1"),
        (r"model\.query_position_embeddings", "query_embed"),
        (r"model\.input_projection", "input_proj"),
        (r"class_labels_classifier", "class_embed"),
        (r"bbox_predictor", "bbox_embed"),
        (r"model\.backbone\.model", "backbone.0.body"),
    )
