from typing import Literal, get_args

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, waves
from whereformer.errors import InputError, check_one_of, check_positive
from whereformer.grid import Grid

Layout = Literal["mae", "moco", "timm", "big_vision", "detr"]


class SinCos2D(PositionEncoding):
    """x_n += (sin ω_k x, cos ω_k x, sin ω_k y, cos ω_k y), ω_k = T^(−k / (D/4)), k = 0 ... D/4 − 1.

    Each axis has half of the D channels. Prefix tokens get nothing added. Patches are counted from 0.

    Args:
        layout: the order of the channels, by the code that uses it:
            "mae"         [sin x, cos x, sin y, cos y]
            "moco"        [sin y, cos y, sin x, cos x]  (timm: interleave_sin_cos; transformers' ViTMAE)
            "timm"        [sin y, sin x, cos y, cos x]  (its default)
            "big_vision"  as "mae", but ω_k = T^(−k / (D/4 − 1))
            "detr"        [y, x], in each sin and cos of one frequency side by side (positions not normalised)
        temperature: T.
    """

    formula = "x_n + (sin ω_k x, cos ω_k x, sin ω_k y, cos ω_k y)"
    paper = "Chen et al. 2021, MoCo v3; He et al. 2022, MAE; 2-D form of Vaswani et al. 2017, section 3.5"

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, layout: Layout = "mae", temperature: float = 10000.0
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_one_of("SinCos2D: layout", layout, get_args(Layout))
        if dim % 4 or (layout == "big_vision" and dim < 8):
            raise InputError(f"SinCos2D: dim={dim}, expected a multiple of 4 (and for 'big_vision' at least 8)")
        check_positive("SinCos2D: temperature", temperature)
        self.layout: Layout = layout
        self.temperature = temperature

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, grid, self.table(grid, x.device))

    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """What is added to the patches: [patches, dim], float32; on `Points` with a batch before."""
        count, temperature = self.dim // 4, self.temperature
        if self.layout == "big_vision":
            temperature **= count / (count - 1)
        pairs = waves(grid.coords(device), count, temperature)  # [patches, axis (y, x), frequency, (sin, cos)]
        match self.layout:
            case "mae" | "big_vision":
                pairs = pairs.flip(-3).mT
            case "moco":
                pairs = pairs.mT
            case "timm":
                pairs = pairs.movedim(-1, -3)
            case "detr":
                pass
        return pairs.flatten(-3)

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}, temperature={self.temperature}"
