"""What a model costs: parameters and multiply-adds."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whereformer.adapters import equip
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.lab import models

LAYER_NORM_MACS = 5
"""Per element of a LayerNorm's input, as fvcore counts it."""


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: nn.Module, height: int, width: int) -> int:
    """Multiply-adds of one image [channels, height, width] through a timm vision transformer, equipped or not.

    Linear layers, convolutions, both products of attention (2 n² dim), scaled queries and activations (1 an
    element), LayerNorm (5 an element) and what the encodings say they cost: so counted, DeiT-Ti, S and B without
    an encoding have the 1261, 4613 and 17592 M of the iRPE paper's Table 5. Nothing is computed: the model runs on
    the meta device.

    Raises:
        InputError: the model is of another kind: attention in windows or with pooled keys is not counted.
    """
    from timm.layers.attention import Attention
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(model, VisionTransformer):
        raise InputError(f"macs: {type(model).__name__}, expected a timm VisionTransformer")
    model = copy.deepcopy(model).to("meta").eval()
    total = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        match module:
            case nn.Linear():
                total += output.numel() * module.in_features
            case nn.Conv2d():
                total += output.numel() * module.weight[0].numel()
            case nn.LayerNorm():
                total += output.numel() * LAYER_NORM_MACS
            case Attention():
                batch, tokens, _ = inputs[0].shape
                total += batch * (2 * tokens**2 + tokens) * module.attn_dim
            case nn.GELU() | nn.SiLU() | nn.ReLU():
                total += output.numel()

    for module in model.modules():
        module.register_forward_hook(count)
    channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
    with torch.no_grad():
        model(torch.empty(1, channels, height, width, device="meta"))
    place: Any = getattr(model, "place", None)
    ours = [module for module in model.modules() if isinstance(module, PositionEncoding)]
    return total + sum(encoding.macs(place.grid) for encoding in ours)


@dataclass(frozen=True)
class Cost:
    """One row of `whereformer cost`.

    Args:
        model, encoding: what was counted.
        parameters: all that the model learns.
        macs: multiply-adds per image.
        paper_parameters: millions, as printed in the iRPE paper or its model zoo; None where it prints none.
        paper_macs: millions, likewise.
    """

    model: str
    encoding: str
    parameters: int
    macs: int
    paper_parameters: float | None = None
    paper_macs: float | None = None


PAPER: tuple[tuple[str, str, float, float], ...] = (
    ("deit_tiny_patch16_224", "learned + irpe", 5.76, 1284),
    ("deit_small_patch16_224", "learned", 22.05, 4613),
    ("deit_small_patch16_224", "learned + irpe(mode='bias')", 22.05, 4613),
    ("deit_small_patch16_224", "learned + irpe(mode='bias', shared=False)", 22.05, 4613),
    ("deit_small_patch16_224", "learned + irpe", 22.09, 4659),
    ("deit_small_patch16_224", "learned + irpe(shared=False)", 22.28, 4659),
    ("deit_small_patch16_224", "learned + irpe(on='qk')", 22.13, 4706),
    ("deit_small_patch16_224", "learned + irpe(on='qkv')", 22.17, 4885),
    ("deit_base_patch16_224", "learned + irpe", 86.61, 17684),
    ("deit_base_patch16_224", "learned + irpe(on='qkv')", 86.68, 18137),
)
"""Model, encoding, parameters in M, MACs in M: Tables 2 and 5 and the model zoo of iRPE. For values they count the
dense product per pair of tokens, O(n² d), that their code does; ours sums per bucket first, O(n k d)."""


def paper_costs() -> Iterator[Cost]:
    """Our counts beside the iRPE paper's."""
    for name, encoding, millions, paper_macs in PAPER:
        yield _cost(name, encoding, None, millions, paper_macs)


def costs(model: str, encodings: Sequence[str], image_size: int | None = None) -> Iterator[Cost]:
    """Counts of a timm model with each encoding.

    Args:
        model: a timm name.
        encodings: texts for `whereformer.parse`.
        image_size: in pixels; the model's own if None.
    """
    for encoding in encodings:
        yield _cost(model, encoding, image_size)


def _cost(name: str, encoding: str, image_size: int | None, *paper: float) -> Cost:
    from timm.models.vision_transformer import VisionTransformer

    size: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
    with torch.device("meta"):
        model = models.create(name, **size)
    if not isinstance(model, VisionTransformer):
        raise InputError(
            f"model={name!r} is a {type(model).__name__}, but only a VisionTransformer's costs are known"
        )
    equip(model, encoding)
    height, width = model.patch_embed.img_size
    for side, patch in zip((height, width), model.patch_embed.patch_size, strict=True):
        if side % patch:
            raise InputError(f"image_size={side}, expected a multiple of the patch size, {patch} pixels")
    return Cost(name, encoding, parameters(model), macs(model, height, width), *paper)
