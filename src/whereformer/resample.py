"""Tables learned on one grid, read on another: the only interpolation in the library."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor


def resample(table: Tensor, size: tuple[int, int], *, mode: str = "bicubic", antialias: bool = True) -> Tensor:
    """Resize a table over a grid as if it were an image.

    Interpolation is linear and works one axis at a time, new = A table Bᵀ: two small matrices, made by torch's own
    interpolation of the identity, in float32, or float64 for such tables. So it runs in every dtype, on every
    device, deterministically.

    Args:
        table: [height, width, channels].
        size: the new height and width, in patches.
        mode: "bicubic" or "bilinear" (align_corners=False).
        antialias: widen the kernel when shrinking (timm's and DeiT's recipe).

    Returns:
        [*size, channels], in the dtype of `table`; the very same values if the size stays.
    """
    exporting = torch.compiler.is_exporting()  # comparing sizes would bind the exported program to this one
    if not exporting and tuple(table.shape[:2]) == tuple(size):
        return table
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    rows, columns = (
        _weights(old, new, mode, antialias, exact) for old, new in zip(table.shape[:2], size, strict=True)
    )
    with without_autocast(table.device):
        new = torch.einsum("yh,hwc->ywc", rows, exact)
        new = torch.einsum("xw,ywc->yxc", columns, new)
    return new.to(table.dtype)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """What is multiplied inside keeps its precision."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _weights(old: int, new: int, mode: str, antialias: bool, like: Tensor) -> Tensor:
    """[new, old]: each new position as a mixture of old ones.

    The identity is given a second axis of two equal columns: at an output width of one, torch's antialiased
    interpolation is wrong on CPUs.
    """
    identity = torch.eye(old, device=like.device, dtype=like.dtype)[None, :, :, None].expand(1, old, old, 2)
    weights = F.interpolate(identity, (new, 2), mode=mode, align_corners=False, antialias=antialias)
    return weights[0, :, :, 0].mT
