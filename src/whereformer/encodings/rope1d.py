import math

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, check_theta
from whereformer.forms import Layout
from whereformer.grid import Grid


class RoPE1D(Rotary):
    """Pair m of a head's d features turns by n θ^(−2m/d), n the number of the patch.   Su et al., eq. 15.

    Patches are counted from 0, row by row: the end of a row and the start of the next are neighbours, as in any
    1-D encoding of an image. On `Grid(1, n)` they are a sequence.

    Args:
        theta: θ.
        layout, scaling: see docs/rotary.md. The home size is the number of patches of the home grid.
    """

    formula = "R(n θ^(−2m/d))"
    paper = "Su et al. 2021, RoFormer: Enhanced Transformer with Rotary Position Embedding, eq. 15"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        theta: float = 10000.0,
        layout: Layout = "interleaved",
        scaling: Scaling = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid, layout=layout, scaling=scaling)
        check_theta("RoPE1D: theta", theta)
        self.theta = theta
        self.spectrum = Spectrum.of(self.share(1), theta)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        return self.stretched(self.spectrum, grid, device)[None]

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        return grid.raster(device)[..., None].float()

    def size(self, grid: Grid) -> tuple[int, ...]:
        return (math.prod(grid.size),)

    def extra_repr(self) -> str:
        return f"theta={self.theta}, layout={self.layout!r}, scaling={self.scaling!r}"
