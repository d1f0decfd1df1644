import math

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, linear
from whereformer.errors import check_count, check_positive
from whereformer.grid import Grid


class Perceiver(PositionEncoding):
    """x_n += W (p, sin π f_k p, cos π f_k p) + b,   f_k evenly from 1 to μ / 2.   Perceiver, section 3.2.

    p is the place on each axis in −1 ... 1, the first patch at −1 and the last at 1 (a lone one at −1). The
    features are those of all axes: first p, then all sines, then all cosines, y before x (t before both). The
    Perceiver appends them to its inputs; where it adds, it projects them to the width of the tokens (Perceiver
    IO's code), as here. Prefix tokens get nothing added.

    Args:
        bands: how many f_k.
        resolution: μ, one number for all axes: f_k end at the Nyquist frequency of as many places.

    Shapes: weight [dim, axes (2 bands + 1)], truncated normal, std fan-in^(−1/2); bias [dim], zero.
    """

    formula = "x_n + W (p, sin π f_k p, cos π f_k p) + b, p in -1 ... 1"
    paper = "Jaegle et al. 2021, Perceiver: General Perception with Iterative Attention, section 3.2"
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, bands: int = 64, resolution: float = 224) -> None:
        super().__init__(dim, num_heads, grid)
        check_count("Perceiver: bands", bands)
        check_positive("Perceiver: resolution", resolution)
        self.bands = bands
        self.resolution = resolution
        self.weight = nn.Parameter(torch.empty(dim, grid.axes * (2 * bands + 1)))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.weight.shape[1] ** -0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(self.bias)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, grid, linear(self.features(grid, x.device), self.weight, self.bias))

    def features(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """[patches, axes (2 bands + 1)], float32 or as wide as the parameters."""
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        places = grid.coords(device).to(exact)
        p = [2 * at / max(n - 1, 1) - 1 for at, n in zip(places.unbind(-1), grid.size, strict=True)]
        p = torch.stack(p, -1)
        bands = torch.linspace(1, self.resolution / 2, self.bands, device=device, dtype=exact)
        angles = (math.pi * p[..., None] * bands).flatten(-2)
        return torch.cat([p, angles.sin(), angles.cos()], -1)

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.weight.numel()

    def extra_repr(self) -> str:
        return f"bands={self.bands}, resolution={self.resolution}"
