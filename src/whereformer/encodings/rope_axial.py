import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, axial, check_theta
from whereformer.forms import Layout
from whereformer.grid import Grid


class RoPEAxial(Rotary):
    """Half of a head's pairs turn by θ^(−4t/d) x, the other half by θ^(−4t/d) y, t = 0 ... d/4 − 1.

    RoPE-ViT, section 3.2, eq. 12. x and y are counted from 0. On videos each of x, y, t has a third of the
    pairs, with θ^(−6t/d); pairs left over do not turn.

    Args:
        theta: θ; the paper takes 100, as images have few patches along an axis.
        layout, scaling: see docs/rotary.md.
    """

    formula = "R(θ^(−4t/d) x), R(θ^(−4t/d) y)"
    paper = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer, section 3.2, eq. 12 (axial)"
    fixed = ("spectrum",)
    steady = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        theta: float = 100.0,
        layout: Layout = "interleaved",
        scaling: Scaling = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid, layout=layout, scaling=scaling)
        check_theta("RoPEAxial: theta", theta)
        self.theta = theta
        self.spectrum = Spectrum.of(self.share(grid.axes, rest=grid.axes == 3), theta)

    @property
    def by_size(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scaling != "none"

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        return axial(self.stretched(self.spectrum, grid, device), "x")

    def extra_repr(self) -> str:
        return f"theta={self.theta}, layout={self.layout!r}, scaling={self.scaling!r}"
