from collections.abc import Sequence

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Order, Rotary, Scaling, Spectrum, axial, check_theta
from whereformer.errors import check_numbers, check_one_of, check_size
from whereformer.forms import Layout
from whereformer.grid import Grid


class EVA02(Rotary):
    """Half of a head's pairs turn by θ^(−4t/d) y H₀/H, the other half by θ^(−4t/d) x W₀/W.

    EVA-02 and its code: on any grid places are interpolated into the grid H₀ x W₀ of the
    pretraining. On videos each of t, y, x has a third of the pairs; frames are interpolated into those of the home
    grid.

    Args:
        theta: θ.
        reference: (H₀, W₀) in patches; None: the home grid.
        grid_offset: the number of the first row and column; 1 in the Perception Encoder.
        order: which axis has the first half of the pairs; "x" in the Perception Encoder.
        layout, scaling: see docs/rotary.md.
    """

    formula = "R(θ^(−4t/d) y H₀/H), R(θ^(−4t/d) x W₀/W)"
    paper = "Fang et al. 2023, EVA-02: A Visual Representation for Neon Genesis"
    fixed = ("spectrum", "order", "grid_offset", "reference")
    steady = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        theta: float = 10000.0,
        reference: Sequence[int] | None = (16, 16),
        grid_offset: float = 0.0,
        order: Order = "y",
        layout: Layout = "interleaved",
        scaling: Scaling = "pi",
    ) -> None:
        super().__init__(dim, num_heads, grid, layout=layout, scaling=scaling)
        check_theta("EVA02: theta", theta)
        check_one_of("EVA02: order", order, ("y", "x"))
        check_numbers("EVA02: grid_offset", grid_offset, 1)
        if reference is not None:
            check_size("EVA02: reference", reference)
        self.theta, self.grid_offset = theta, grid_offset
        self.order: Order = order
        self.reference = None if reference is None else tuple(reference)
        self.spectrum = Spectrum.of(self.share(grid.axes, rest=grid.axes == 3), theta)

    def home(self) -> tuple[int, ...]:
        return super().home() if self.reference is None else (*self.trained.size[:-2], *self.reference)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        return axial(self.stretched(self.spectrum, grid, device), self.order)

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        return super().places(grid, device) + self.grid_offset

    def extra_repr(self) -> str:
        said = ("theta", "reference", "grid_offset", "order", "layout", "scaling")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)
