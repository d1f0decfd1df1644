import math

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, linear, sized, waves
from whereformer.errors import InputError, check_count, check_positive
from whereformer.grid import Grid


class XCiT(PositionEncoding):
    """x_n += W (PE(y'), PE(x')) + b,   y' = 2π (y + 1) / (H + 10⁻⁶): DETR's sinusoid, few channels, projected.

        PE(p)_2k = sin(p / T^(2k/c)),   PE(p)_2k+1 = cos(p / T^(2k/c)),   c channels for each axis

    H, W are the image's height and width in patches. Prefix tokens get nothing added (XCiT's class token comes
    later).

    Args:
        channels: c.
        temperature: T.

    Shapes: weight [dim, 2 channels], bias [dim]: a 1 × 1 convolution, started as torch starts one, uniform in
    ± (2 channels)^(−1/2).
    """

    formula = "x_n + W (PE(2π (y + 1) / H), PE(2π (x + 1) / W)) + b"
    paper = "El-Nouby et al. 2021, XCiT: Cross-Covariance Image Transformers"

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, channels: int = 32, temperature: float = 10000.0
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_count("XCiT: channels", channels)
        if channels % 2:
            raise InputError(f"XCiT: channels={channels}, expected an even number")
        check_positive("XCiT: temperature", temperature)
        self.channels = channels
        self.temperature = temperature
        self.weight = nn.Parameter(torch.empty(dim, 2 * channels))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = (2 * self.channels) ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        places = 2 * math.pi * sized(grid, x.device, dtype=exact)
        features = waves(places, self.channels // 2, self.temperature).flatten(-3)
        return add(x, grid, linear(features, self.weight, self.bias))

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.weight.numel()

    def extra_repr(self) -> str:
        return f"channels={self.channels}, temperature={self.temperature}"
