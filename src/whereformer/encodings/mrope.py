from collections.abc import Sequence

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import RotaryOfFrames, Scaling, Spectrum, check_theta
from whereformer.errors import InputError, check_numbers
from whereformer.grid import Grid


class MRoPE(RotaryOfFrames):
    """Pair m of a head's d features turns by θ^(−2m/d) times y, x or t; c and c + d/2 are a pair.

    Multimodal RoPE, interleaved: pairs 1, 4, 7 ... < 3 s_y have the row y, pairs 2, 5, 8 ... < 3 s_x the column x,
    all others the frame t, which is 0 in an image. So each axis has frequencies of all sizes.

    Args:
        sections: (s_t, s_y, s_x): how many pairs are to have each; s_t says only what is left.
        theta: θ.
        scaling: see docs/rotary.md; it stretches the one spectrum of d/2 frequencies, each by its axis.
    """

    formula = "R(θ^(−2m/d) p_a), a = t, y, x in turn"
    paper = "Bai et al. 2025, Qwen3-VL (interleaved MRoPE); M-RoPE: Wang et al. 2024, Qwen2-VL, section 2.1"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        sections: Sequence[int] = (8, 12, 12),
        theta: float = 10000.0,
        scaling: Scaling = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid, layout="half", scaling=scaling)
        check_theta("MRoPE: theta", theta)
        check_numbers("MRoPE: sections", sections, 3)
        if any(not isinstance(s, int) or s < 0 for s in sections):
            raise InputError(f"MRoPE: sections={sections!r}, expected three numbers of pairs, of t, y and x")
        self.sections, self.theta = tuple(sections), theta
        self.spectrum = Spectrum.of(self.share(1), theta)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        m = torch.arange(self.spectrum.count, device=device)
        rows, columns = ((m % 3 == a) & (m < 3 * self.sections[a]) for a in (1, 2))
        axis = torch.stack([~(rows | columns), rows, columns], -1)
        return (self.stretched(self.spectrum, grid, device) * axis)[None]

    def extra_repr(self) -> str:
        return f"sections={self.sections}, theta={self.theta}, scaling={self.scaling!r}"
