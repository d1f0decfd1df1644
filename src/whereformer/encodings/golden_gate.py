import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum
from whereformer.errors import InputError, check_at_least, check_positive
from whereformer.grid import Grid


class GoldenGate(Rotary):
    """Pair m of head h turns by ω_m u_hm · p, the u_hm spread over all directions; c and c + d/2 are a pair.

    Golden Gate RoPE. p is the place of the patch, in patches. The frequencies ω_m rise from min_freq to max_freq,
    evenly in the logarithm. The directions, of all pairs of all heads, one head after the other, are a
    quasi-random sequence: number i, from 1, is Φ⁻¹(i α mod 1), normalised, Φ⁻¹ the inverse of the normal
    distribution, α_a = g^(−a), a = 1 ... A for A axes, and g the root of g^(A+1) = g + 1.

    Args:
        min_freq, max_freq: in radians per patch. vit-pytorch's 1 to 10000 turn pairs many times round from a patch
            to the next.
        zero_freqs: the share of pairs, those of the lowest frequencies, that do not turn.
        scaling: see docs/rotary.md, component by component of ω_m u_hm; `m` counts from max_freq down.
    """

    formula = "R(ω_m u_hm · p), u_hm quasi-random directions"
    paper = "Xiong 2025, On N-dimensional Rotary Positional Embeddings (Golden Gate RoPE); code: vit-pytorch"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        min_freq: float = 1.0,
        max_freq: float = 10000.0,
        zero_freqs: float = 0.0,
        scaling: Scaling = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid, layout="half", scaling=scaling)
        check_positive("GoldenGate: min_freq", min_freq)
        check_positive("GoldenGate: max_freq", max_freq)
        if min_freq >= max_freq:
            raise InputError(f"GoldenGate: min_freq={min_freq}, expected less than max_freq={max_freq}")
        check_at_least("GoldenGate: zero_freqs", zero_freqs, 0)
        if zero_freqs >= 1:
            raise InputError(f"GoldenGate: zero_freqs={zero_freqs!r}, expected a share, 0 <= zero_freqs < 1")
        self.min_freq, self.max_freq, self.zero_freqs = min_freq, max_freq, zero_freqs
        self.zeros = round(zero_freqs * self.share(1))
        count = self.share(1) - self.zeros
        # One frequency alone is the lowest.
        first = max_freq if count > 1 else min_freq
        self.spectrum = Spectrum(count, (max_freq / min_freq) ** (1 / max(count - 1, 1)), first)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        rising = self.stretched(self.spectrum, grid, device).flip(0)
        return self.directions(device) * F.pad(rising, (0, 0, self.zeros, 0))

    def directions(self, device: torch.device | None) -> Tensor:
        """The u_hm: [num_heads, pairs, axes], float32. Large numbers are taken modulo 1, hence float64 within."""
        axes = self.grid.axes
        g = 2.0
        for _ in range(10):
            g = (1 + g) ** (1 / (axes + 1))
        number = torch.arange(1, self.num_heads * self.share(1) + 1, dtype=torch.float64, device=device)
        places = torch.stack([number * g ** -(a + 1) % 1 for a in range(axes)], -1)
        return F.normalize(torch.erfinv(2 * places - 1), dim=-1).float().unflatten(0, (self.num_heads, -1))

    def extra_repr(self) -> str:
        said = ("min_freq", "max_freq", "zero_freqs", "scaling")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)
