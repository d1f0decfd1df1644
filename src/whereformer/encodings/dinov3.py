import math
from typing import Literal

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, Spectrum, axial, check_theta, greater
from whereformer.errors import InputError, check_one_of, check_positive
from whereformer.grid import Grid


class DINOv3(Rotary):
    """Half of a head's pairs turn by 2π y / T_k, the other half by 2π x / T_k; c and c + d/2 are a pair.

        y = 2 (r + ½) / H − 1, x = 2 (c + ½) / W − 1,   T_k = base^(4k/d), k = 0 ... d/4 − 1

    DINOv3, section 3.2 and its code. r and c number rows and columns from 0: the image is the box [−1, 1]². So the
    encoding spans the same range on any grid, needs no scaling, and is relative within one size of grid.

    In training the box is moved and stretched at random, in this order: (y, x) += U(−shift, shift) for each axis;
    (y, x) *= exp U(−ln jitter, ln jitter) for each axis; (y, x) *= exp U(−ln rescale, ln rescale) for both. Each
    block draws its own, where the released code draws once for all blocks. Queries and keys of two grids would be
    drawn apart: then attention refuses them.

    Args:
        base: of the periods T_k.
        periods: (least, most): T_k from the one to the other, evenly in the logarithm, instead of `base`.
        normalise: what row and column numbers are divided by: "separate" H and W, "max" or "min" of the two.
        shift: half-width of the move, or None.
        jitter, rescale: the largest factor of the stretch, at least 1, or None. The paper trains with rescale 2.
    """

    axes = (2,)
    formula = "R(2π y / T_k), R(2π x / T_k), (y, x) in [−1, 1]²"
    paper = "Siméoni et al. 2025, DINOv3, section 3.2"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        base: float = 100.0,
        periods: tuple[float, float] | None = None,
        normalise: Literal["separate", "max", "min"] = "separate",
        shift: float | None = None,
        jitter: float | None = None,
        rescale: float | None = 2.0,
    ) -> None:
        super().__init__(dim, num_heads, grid, layout="half")
        check_theta("DINOv3: base", base)
        check_one_of("DINOv3: normalise", normalise, ("separate", "max", "min"))
        if periods is not None and not 0 < periods[0] < periods[1]:
            raise InputError(f"DINOv3: periods={periods!r}, expected (least, most), 0 < least < most, or None")
        if shift is not None:
            check_positive("DINOv3: shift", shift)
        for name, value in (("jitter", jitter), ("rescale", rescale)):
            if value is not None and not 1 <= value < math.inf:
                raise InputError(f"DINOv3: {name}={value!r}, expected a number of at least 1, or None")
        self.base, self.periods, self.normalise = base, periods, normalise
        self.shift, self.jitter, self.rescale = shift, jitter, rescale
        count = self.share(2)
        self.spectrum = Spectrum.of(count, base)
        if periods is not None:
            self.spectrum = Spectrum(count, (periods[1] / periods[0]) ** (1 / max(count - 1, 1)), 1 / periods[0])

    @property
    def crosses(self) -> bool:
        return not self.training or self.shift is self.jitter is self.rescale is None

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        return axial(2 * math.pi * self.spectrum.frequencies(device)[:, None].expand(-1, 2), "y")

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        height, width = grid.size
        most = greater(height, width)
        least = height + width - most
        over = {"separate": (height, width), "max": (most, most), "min": (least, least)}[self.normalise]
        y, x = (super().places(grid, device) + 0.5).unbind(-1)
        places = torch.stack([2 * (y / over[0]) - 1, 2 * (x / over[1]) - 1], -1)
        return self.augmented(places) if self.training else places

    def augmented(self, places: Tensor) -> Tensor:
        """Moved and stretched at random."""
        if self.shift is not None:
            places = places + places.new_empty(2).uniform_(-self.shift, self.shift)
        if self.jitter is not None:
            most = math.log(self.jitter)
            places = places * places.new_empty(2).uniform_(-most, most).exp()
        if self.rescale is not None:
            most = math.log(self.rescale)
            places = places * places.new_empty(1).uniform_(-most, most).exp()
        return places

    def extra_repr(self) -> str:
        said = ("base", "periods", "normalise", "shift", "jitter", "rescale")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)
