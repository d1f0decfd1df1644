"""One convolution per channel on a grid: what the convolutional encodings share."""

import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import InputError
from whereformer.grid import Grid


def depthwise(x: Tensor, grid: Grid, weight: Tensor, bias: Tensor | None) -> Tensor:
    """DWConv_k of the patches among tokens, zeros around the grid and where a patch was dropped.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, 1, k, k], for videos [channels, 1, k, k, k].
        bias: [channels] or None.

    Returns:
        [batch, patches, channels], in the dtype of `x`.
    """
    if weight.ndim != grid.axes + 2:
        raise InputError(f"a convolution over {weight.ndim - 2} axes, but {grid} has {grid.axes}")
    convolve = F.conv2d if grid.axes == 2 else F.conv3d
    bias = None if bias is None else bias.to(x.dtype)
    image = grid.lay(x).movedim(-1, 1)
    image = convolve(image, weight.to(x.dtype), bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return grid.pick(image.movedim(1, -1)).to(x.dtype)


def check_kernel_size(what: str, kernel_size: object) -> None:
    """Raise unless a kernel of that size has a centre."""
    if (
        isinstance(kernel_size, bool)
        or not isinstance(kernel_size, int)
        or kernel_size < 1
        or kernel_size % 2 == 0
    ):
        raise InputError(f"{what}: kernel_size={kernel_size!r}, expected an odd positive integer")
