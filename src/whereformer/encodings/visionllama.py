import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, check_theta
from whereformer.grid import Grid


class VisionLLaMA(Rotary):
    """Pairs 2t of a head's d features turn by θ^(−4t/d) x B/W, pairs 2t + 1 by θ^(−4t/d) y B/H: AS2DRoPE.

    VisionLLaMA, section 3.3, eq. 4: places on any grid are scaled into the grid of the training, B x B, here the
    home grid, each axis by its own length. (The paper and its code have square images, and one B.)

    Args:
        theta: θ.
        scaling: see docs/rotary.md; "pi" is auto-scaled, "none" plain 2-D RoPE.
    """

    axes = (2,)
    formula = "R(θ^(−4t/d) x B/W), R(θ^(−4t/d) y B/H) in turn"
    paper = "Chu et al. 2024, VisionLLaMA: A Unified LLaMA Backbone for Vision Tasks, section 3.3, eq. 4"
    fixed = ("spectrum",)
    steady = True

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, theta: float = 10000.0, scaling: Scaling = "pi"
    ) -> None:
        super().__init__(dim, num_heads, grid, scaling=scaling)
        check_theta("VisionLLaMA: theta", theta)
        self.theta = theta
        self.spectrum = Spectrum.of(self.share(2), theta)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        return torch.diag_embed(self.stretched(self.spectrum, grid, device)).flip(1).flatten(0, 1)[None]

    def extra_repr(self) -> str:
        return f"theta={self.theta}, scaling={self.scaling!r}"
