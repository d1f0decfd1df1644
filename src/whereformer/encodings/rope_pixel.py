import math
from typing import Literal

import torch
from torch import Tensor

from whereformer.encodings.common.rotary import Rotary, axial, greater
from whereformer.errors import InputError, check_one_of, check_positive
from whereformer.grid import Grid


class RoPEPixel(Rotary):
    """A pair turns by f p, p from −1 at the first row (column) of patches to 1 at the last, f from π to π max / 2.

    Half of the pairs have the rows, half the columns. Places are told in units of the image, not in patches: any
    grid spans the same range, so that no scaling is needed, and scores are relative within one size of grid.

    Args:
        bands: how the frequencies are spaced: "linear" (vit-pytorch) or "log" (timm's default).
        max_freq: max (vit-pytorch: 10; timm: 224).
    """

    formula = "R(f y), R(f x), x, y from −1 to 1"
    paper = "Biderman et al. 2021, Rotary Embeddings: A Relative Revolution (2-D); code: vit-pytorch, rvt"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        bands: Literal["linear", "log"] = "linear",
        max_freq: float = 10.0,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_one_of("RoPEPixel: bands", bands, ("linear", "log"))
        check_positive("RoPEPixel: max_freq", max_freq)
        if max_freq < 2:
            raise InputError(f"RoPEPixel: max_freq={max_freq!r}, expected at least 2")
        self.bands, self.max_freq = bands, max_freq
        self.count = self.share(grid.axes, rest=grid.axes == 3)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        most = self.max_freq / 2
        if self.bands == "linear":
            frequencies = torch.linspace(1, most, self.count, device=device)
        else:
            frequencies = 2 ** torch.linspace(0, math.log2(most), self.count, device=device)
        return axial((math.pi * frequencies)[:, None].expand(-1, self.grid.axes), "y")

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        places = super().places(grid, device).unbind(-1)
        ends = [greater(n - 1, 1) for n in self.size(grid)]
        return torch.stack([2 * p / end - 1 for p, end in zip(places, ends, strict=True)], -1)

    def extra_repr(self) -> str:
        return f"bands={self.bands!r}, max_freq={self.max_freq}"
