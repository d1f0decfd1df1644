from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import (
    RotaryOfFrames,
    Scaling,
    Spectrum,
    axial,
    beside_identity,
    check_theta,
)
from whereformer.errors import check_one_of
from whereformer.forms import MatrixRotation, Rotation
from whereformer.grid import Grid


class VJEPA2(RotaryOfFrames):
    """Three equal parts of a head's features turn by θ^(−2m/D) t, θ^(−2m/D) y and θ^(−2m/D) x: 3D-RoPE.

    V-JEPA 2, section 2.1. D = 2 ⌊⌊d/3⌋/2⌋ features have each of the frame t, the row y and the column x, counted
    from 0; d − 3D features are left over. An image is frame 0.

    Args:
        theta: θ.
        pairing: which angle each of D features takes. "paired": 2m and 2m + 1 take that of m, a rotation.
            "repeated", with which the released weights were trained: c takes that of c mod D/2, although 2m and 2m
            + 1 are still a pair. That is no rotation: neither norms nor offsets are kept.
        scaling: see docs/rotary.md.
    """

    axes = (2, 3)
    formula = "R(θ^(−2m/D) t), R(θ^(−2m/D) y), R(θ^(−2m/D) x)"
    paper = "Assran et al. 2025, V-JEPA 2: Self-Supervised Video Models, section 2.1 (3D-RoPE)"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        theta: float = 10000.0,
        pairing: Literal["paired", "repeated"] = "paired",
        scaling: Scaling = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid, scaling=scaling)
        check_theta("VJEPA2: theta", theta)
        check_one_of("VJEPA2: pairing", pairing, ("paired", "repeated"))
        self.theta, self.pairing = theta, pairing
        self.spectrum = Spectrum.of(self.share(3, rest=True), theta)

    @property
    def keeps_norms(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.pairing == "paired"

    @property
    def by_offset(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.pairing == "paired"

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        return axial(self.stretched(self.spectrum, grid, device), "y")

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation | MatrixRotation]:
        if self.pairing == "paired":
            yield from super().rotations(grid, device)
        else:
            yield MatrixRotation(self.matrices(grid, device))

    def matrices(self, grid: Grid, device: torch.device | None) -> Tensor:
        """[(b or 1,) 1, patches, d, d]: x_c cos φ_c ∓ x_c' sin φ_c for feature c, c' being its partner."""
        angles = self.angles(grid, device).unflatten(-1, (3, self.spectrum.count))
        angles = torch.cat([angles, angles], -1).flatten(-2)[..., None]
        one = torch.eye(angles.shape[-2], device=device)
        partner = one.unflatten(0, (-1, 2)).flip(1) * one.new_tensor([-1, 1])[:, None]
        matrices = angles.cos() * one + angles.sin() * partner.flatten(0, 1)
        return beside_identity(self.temperature(grid) * matrices, self.head_dim)

    def macs(self, grid: Grid) -> int:
        return super().macs(grid) if self.pairing == "paired" else 2 * grid.patches * self.dim * self.head_dim

    def extra_repr(self) -> str:
        return f"theta={self.theta}, pairing={self.pairing!r}, scaling={self.scaling!r}"
