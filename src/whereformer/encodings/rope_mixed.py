import math

import torch
from torch import Tensor, nn

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, check_theta
from whereformer.errors import check_one_of
from whereformer.grid import Grid
from whereformer.resample import exact


class RoPEMixed(Rotary):
    """Pair t of a head's d features turns by θ^x_t x + θ^y_t y, both learned, for each head of its own.

    RoPE-ViT, section 3.2, eq. 14. x and y are counted from 0.

    Args:
        theta: θ of the start: lengths θ^(−4t/d), t = 0 ... d/4 − 1, along a random direction for each head, and
            again at right angles to it.
        scaling: "none" or "pi", see docs/rotary.md. Learned frequencies have no θ that NTK or YaRN could change.

    Shapes: frequencies [2, num_heads, d/2], (x, y) first. The released checkpoints hold those of all blocks as
    (2, blocks, num_heads * d/2).
    """

    axes = (2,)
    formula = "R(θ^x_t x + θ^y_t y), θ^x, θ^y learned"
    paper = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer, section 3.2, eq. 14 (mixed)"

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, theta: float = 10.0, scaling: Scaling = "none"
    ) -> None:
        check_one_of("RoPEMixed: scaling", scaling, ("none", "pi"))
        super().__init__(dim, num_heads, grid, scaling=scaling)
        check_theta("RoPEMixed: theta", theta)
        self.theta = theta
        self.frequencies = nn.Parameter(torch.empty(2, num_heads, 2 * self.share(2)))
        self.reset_parameters()

    @property
    def by_size(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scaling != "none"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        length = Spectrum.of(self.share(2), self.theta).frequencies(self.frequencies.device)
        direction = 2 * math.pi * torch.rand(self.num_heads, 1, device=length.device)
        turned = torch.cat(
            [direction.expand(-1, len(length)), (direction + math.pi / 2).expand(-1, len(length))], 1
        )
        self.frequencies.copy_(torch.stack([turned.cos(), turned.sin()]) * length.repeat(2))

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        waves = exact(self.frequencies).permute(1, 2, 0).flip(-1)
        if self.scaling == "none":
            return waves
        squeeze = [then / now for now, then in zip(self.size(grid), self.home(), strict=True)]
        return torch.stack([waves[..., a] * s for a, s in enumerate(squeeze)], -1)

    def extra_repr(self) -> str:
        return f"theta={self.theta}, scaling={self.scaling!r}"
