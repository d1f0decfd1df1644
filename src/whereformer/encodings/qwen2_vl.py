import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, axial, check_theta
from whereformer.grid import Grid


class Qwen2VL(Rotary):
    """The first half of a head's pairs turns by θ^(−4t/d) y, the second by θ^(−4t/d) x; c and c + d/2 are a pair.

    The vision encoder of Qwen2-VL, section 2.1, and of many after it. Attention stays within a frame: a video is a
    batch of images.

    Args:
        theta: θ.
        scaling: see docs/rotary.md.
    """

    axes = (2,)
    formula = "R(θ^(−4t/d) y), R(θ^(−4t/d) x)"
    paper = "Wang et al. 2024, Qwen2-VL: Enhancing Vision-Language Model's Perception of the World, section 2.1"

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, theta: float = 10000.0, scaling: Scaling = "none"
    ) -> None:
        super().__init__(dim, num_heads, grid, layout="half", scaling=scaling)
        check_theta("Qwen2VL: theta", theta)
        self.theta = theta
        self.spectrum = Spectrum.of(self.share(2), theta)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        return axial(self.stretched(self.spectrum, grid, device), "y")

    def extra_repr(self) -> str:
        return f"theta={self.theta}, scaling={self.scaling!r}"
