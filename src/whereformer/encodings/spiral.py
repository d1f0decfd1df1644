import math

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, check_theta
from whereformer.errors import InputError, check_bool, check_positive
from whereformer.grid import Grid


class SpiralRoPE(Rotary):
    """A pair turns by ω_m (x cos φ + y sin φ), φ one of K directions, evenly spread over 180°.

    Spiral RoPE. The first half of a head's pairs has the frequencies ω_m = max_freq θ^(−4m/d), m = 0 ... d/4 − 1;
    the second half has them again, along directions at right angles to the first. Two pairs in a row share a
    direction, the next two have the next: φ = 90° − i 180°/K in the first half, −i 180°/K in the second, i = ⌊m/2⌋
    mod K/2. A head needs 4K features for every direction to have its two pairs. (So in the released code. The
    paper, section 3.2, eq. 8-13, has i 180°/K and 90° more: x and y in exchange.)

    Args:
        directions: K, even; 2 is axial; the paper trains DeiT with 16. (`rotate` of the released code is K/2.)
        theta: θ.
        max_freq: ω_0; 1.5 in the paper's DeiT.
        shared: whether all directions have the same frequencies (`same_theta` of the released code): fewer ones,
            max_freq θ^(−2Km/d).
        clamped: as in the released code, which turns maps of angles as images, about the centre of a square grid:
            where a place so turned falls outside of the grid it is cut to the border. Scores of places near the
            corners are then no longer relative.
        scaling: see docs/rotary.md, component by component of the waves; the released code interpolates ("pi").
    """

    axes = (2,)
    formula = "R(ω_m (x cos φ_m + y sin φ_m)), K directions φ"
    paper = "Liu et al. 2026, Spiral RoPE: Rotate Your Rotary Positional Embeddings in the 2D Plane, section 3.2"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        directions: int = 4,
        theta: float = 10000.0,
        max_freq: float = 1.5,
        shared: bool = False,
        clamped: bool = False,
        scaling: Scaling = "pi",
    ) -> None:
        super().__init__(dim, num_heads, grid, scaling=scaling)
        for name, value in (("shared", shared), ("clamped", clamped)):
            check_bool(f"SpiralRoPE: {name}", value)
        if isinstance(directions, bool) or not isinstance(directions, int) or directions < 2 or directions % 2:
            raise InputError(f"SpiralRoPE: directions={directions!r}, expected an even number of at least 2")
        check_theta("SpiralRoPE: theta", theta)
        check_positive("SpiralRoPE: max_freq", max_freq)
        self.directions, self.theta, self.max_freq = directions, theta, max_freq
        self.shared, self.clamped = shared, clamped
        self.count = self.share(2)
        ratio = theta ** (1 / self.count)
        if shared:
            different = 2 * -(-self.count // directions)
            self.spectrum = Spectrum(min(different, self.count), ratio ** (directions / 2), max_freq)
        else:
            self.spectrum = Spectrum(self.count, ratio, max_freq)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        (f, turn), second = self.turned(grid, device), torch.tensor([-1, 1], device=device)
        cos_sin = torch.stack([turn.cos(), turn.sin()], -1)
        return torch.cat([cos_sin * f, cos_sin.flip(-1) * second * f])[None]

    def turned(self, grid: Grid, device: torch.device | None) -> tuple[Tensor, Tensor]:
        """The frequencies along each axis, [pairs / 2, 2], and by what the direction is turned, [pairs / 2]."""
        m = torch.arange(self.count, device=device)
        turn = m // 2 % (self.directions // 2) * (math.pi / self.directions)
        f = self.stretched(self.spectrum, grid, device)
        return f[m // self.directions * 2 + m % 2 if self.shared else m], turn

    def angles(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        if not self.clamped:
            return super().angles(grid, device)
        f, turn = self.turned(grid, device)
        (h, w), (y, x) = grid.size, self.places(grid, device)[..., None].unbind(-2)
        cos, sin, down, right = turn.cos(), turn.sin(), (h - 1) / 2, (w - 1) / 2
        rows = (cos * (y - down) + sin * (x - right) + down).clamp(0, h - 1) * f[:, 0]
        columns = (cos * (x - right) - sin * (y - down) + right).clamp(0, w - 1) * f[:, 1]
        return torch.cat([rows, columns], -1)[..., None, :, :]

    def extra_repr(self) -> str:
        said = ("directions", "theta", "max_freq", "shared", "clamped", "scaling")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)
