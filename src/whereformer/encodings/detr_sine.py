import math

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, sized, waves
from whereformer.errors import InputError, check_bool, check_numbers, check_positive
from whereformer.grid import Grid


class DETRSine(PositionEncoding):
    """x_n += (PE(y'), PE(x')),   y' = s (y + 1 + o) / (H + 10⁻⁶),   x' likewise;   PE as in Vaswani et al.

        PE(p)_2k = sin(p / T^(2k/c)),   PE(p)_2k+1 = cos(p / T^(2k/c)),   c = D/2 channels for each axis

    y, x count from 0; H, W are the image's own height and width in patches, without padding: on a `Padded` batch
    each image has its own. Prefix tokens get nothing added.

    Here, as in any absolute encoding, it is added to the tokens, once. DETR adds it to the queries and keys of
    every encoder layer and to the keys of cross-attention, and not to the values.

    Args:
        normalize: whether positions are divided by the size; if not, y' = y + 1 (the default of DETR's module;
            its models normalize).
        scale: s.
        offset: o; −0.5, for normalized positions only, in Deformable DETR and what descends from it.
        temperature: T of PE.
    """

    formula = "x_n + (PE(2π (y + 1) / H), PE(2π (x + 1) / W))"
    paper = "Carion et al. 2020, End-to-End Object Detection with Transformers (DETR), appendix A.4"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        normalize: bool = True,
        scale: float = 2 * math.pi,
        offset: float = 0.0,
        temperature: float = 10000.0,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("DETRSine: normalize", normalize)
        if dim % 4:
            raise InputError(f"DETRSine: dim={dim}, expected a multiple of 4")
        check_positive("DETRSine: scale", scale)
        check_positive("DETRSine: temperature", temperature)
        check_numbers("DETRSine: offset", offset, 1)
        if not normalize and (offset or scale != 2 * math.pi):
            raise InputError(f"DETRSine: scale={scale}, offset={offset} with normalize=False, which has neither")
        self.normalize = normalize
        self.scale = scale
        self.offset = offset
        self.temperature = temperature

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, grid, self.table(grid, x.device))

    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """What is added to the patches: [patches, dim], float32; on `Points` with a batch before."""
        places = sized(grid, device, self.offset) * self.scale if self.normalize else grid.coords(device) + 1
        return waves(places, self.dim // 4, self.temperature).flatten(-3)

    def extra_repr(self) -> str:
        own = f", scale={self.scale:.6g}, offset={self.offset}" if self.normalize else ""
        return f"normalize={self.normalize}{own}, temperature={self.temperature}"
