from typing import Literal

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, waves
from whereformer.errors import InputError, check_positive
from whereformer.grid import Grid


class SinCos1D(PositionEncoding):
    """x_n += PE(n),   PE(n)_2k = sin(n / T^(2k/D)),   PE(n)_2k+1 = cos(n / T^(2k/D)).   Vaswani et al., 3.5.

    n numbers the patches row by row, from 0 (frame by frame in a video, as VideoMAE does), prefix tokens left
    out: they get nothing added. So the last patch of a row is next to the first of the row below.

    Args:
        layout: "interleaved" (the equation, sin and cos of one frequency side by side), or "half" (all sines, then
            all cosines).
        temperature: T.
    """

    formula = "x_n + (sin n/T^(2k/D), cos n/T^(2k/D)), n in raster order"
    paper = "Vaswani et al. 2017, Attention Is All You Need, section 3.5"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        layout: Literal["interleaved", "half"] = "interleaved",
        temperature: float = 10000.0,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        if layout not in ("interleaved", "half"):
            raise InputError(f"SinCos1D: layout={layout!r}, expected 'interleaved' or 'half'")
        if dim % 2:
            raise InputError(f"SinCos1D: dim={dim}, expected an even number")
        check_positive("SinCos1D: temperature", temperature)
        self.layout = layout
        self.temperature = temperature

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, grid, self.table(grid, x.device))

    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """What is added to the patches: [patches, dim], float32; on `Points` with a batch before."""
        pairs = waves(grid.raster(device), self.dim // 2, self.temperature)
        return (pairs if self.layout == "interleaved" else pairs.mT).flatten(-2)

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}, temperature={self.temperature}"
