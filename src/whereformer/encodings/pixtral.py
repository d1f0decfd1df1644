from typing import Literal

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, axial, check_theta
from whereformer.errors import check_one_of
from whereformer.forms import Layout
from whereformer.grid import Grid


class Pixtral(Rotary):
    """Pairs m = 0, 2, 4 ... of a head's d features turn by θ^(−2m/d) y, pairs m = 1, 3, 5 ... by θ^(−2m/d) x.

    Pixtral 12B, section 2.2, eq. 1 (ROPE-2D): one spectrum, dealt out to rows and columns in turn.

    Args:
        theta: θ.
        order: how the pairs stand: "alternating" by m (the paper's matrix), or in "blocks", the rows' before the
            columns' (the released code and weights).
        layout: see docs/rotary.md; "half" for weights converted to transformers.
        scaling: see docs/rotary.md; it stretches the one spectrum of d/2 frequencies, each by its axis.
    """

    axes = (2,)
    formula = "R(θ^(−2m/d) y) for even m, R(θ^(−2m/d) x) for odd m"
    paper = "Agrawal et al. 2024, Pixtral 12B, section 2.2, eq. 1 (ROPE-2D)"
    fixed = ("spectrum", "order")
    steady = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        theta: float = 10000.0,
        order: Literal["alternating", "blocks"] = "alternating",
        layout: Layout = "interleaved",
        scaling: Scaling = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid, layout=layout, scaling=scaling)
        check_theta("Pixtral: theta", theta)
        check_one_of("Pixtral: order", order, ("alternating", "blocks"))
        self.theta, self.order = theta, order
        self.spectrum = Spectrum.of(2 * self.share(2), theta)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        blocks = axial(self.stretched(self.spectrum, grid, device), "y")[0].unflatten(0, (2, -1, 2))
        pairs = torch.stack([blocks[0, :, 0], blocks[1, :, 1]])  # [axis of the pair, pair, axes]
        return (pairs if self.order == "blocks" else pairs.transpose(0, 1)).flatten(0, 1)[None]

    def extra_repr(self) -> str:
        return f"theta={self.theta}, order={self.order!r}, layout={self.layout!r}, scaling={self.scaling!r}"
