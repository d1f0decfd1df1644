"""Encodings in float64 on the CPU, and back."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError


def exact(encodings: Iterable[PositionEncoding]) -> list[PositionEncoding]:
    """Copies in float64, on the CPU, not training."""
    found = list(encodings)
    for encoding in found:
        if any(parameter.is_meta for parameter in encoding.parameters()):
            raise InputError(
                f"translate: {type(encoding).__name__} is on the meta device, expected one with numbers"
            )
    return [copy.deepcopy(encoding).to("cpu", torch.float64).eval() for encoding in found]


@torch.no_grad()
def loud(encodings: Iterable[PositionEncoding]) -> list[PositionEncoding]:
    """Copies with random parameters: tables that start at zero say nothing."""
    generator = torch.Generator().manual_seed(0)
    copies = [copy.deepcopy(encoding) for encoding in encodings]
    for parameter in (parameter for encoding in copies for parameter in encoding.parameters()):
        parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype))
    return copies


def learned(encodings: Iterable[PositionEncoding]) -> list[Tensor]:
    """The parameters that require gradients, each once."""
    return list({id(p): p for e in encodings for p in e.parameters() if p.requires_grad}.values())


@torch.no_grad()
def write(found: Iterable[PositionEncoding], targets: Iterable[PositionEncoding]) -> None:
    """What was found, to where it belongs, rounded to the dtype there: all of it, or an error."""
    pairs = []
    for copied, target in zip(found, targets, strict=True):
        pairs += [(p, t) for p, t in zip(copied.parameters(), target.parameters(), strict=True) if t.requires_grad]
    rounded = [(p.to(t.dtype), t) for p, t in pairs]
    if not all(p.isfinite().all() for p, _ in rounded):
        raise InputError(
            "translate: the target would hold numbers that are not finite, or too large for its dtype"
        )
    for p, t in rounded:
        t.copy_(p)


def spelled(encoding: PositionEncoding) -> str:
    """Class and options."""
    return f"{type(encoding).__name__}({encoding.extra_repr()})"
