import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, waves
from whereformer.errors import InputError, check_positive
from whereformer.grid import Grid


class SinCos3D(PositionEncoding):
    """x_n += (PE(t), PE(y), PE(x)),   PE(p) = (sin ω_k p, cos ω_k p), ω_k = T^(−k / count), k = 0 ... count − 1.

    All sines of an axis, then all its cosines. The axes share the D channels as V-JEPA's do: each has
    2 count = 2 ⌈D / 6⌉, and what is more than D is cut off, from the end of PE(x). In an image, without t,
    2 ⌈D / 4⌉ (I-JEPA), which is `SinCos2D(layout='moco')`. Prefix tokens get nothing added.

    Args:
        temperature: T.
    """

    formula = "x_n + (sin ω_k t, cos ω_k t, sin ω_k y, cos ω_k y, sin ω_k x, cos ω_k x)"
    paper = (
        "Bardes et al. 2024, Revisiting Feature Prediction for Learning Visual Representations from Video (V-JEPA)"
    )
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, temperature: float = 10000.0) -> None:
        super().__init__(dim, num_heads, grid)
        if dim % 2:
            raise InputError(f"SinCos3D: dim={dim}, expected an even number")
        check_positive("SinCos3D: temperature", temperature)
        self.temperature = temperature

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, grid, self.table(grid, x.device))

    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """What is added to the patches: [patches, dim], float32; on `Points` with a batch before."""
        count = -(-self.dim // (2 * grid.axes))
        return waves(grid.coords(device), count, self.temperature).mT.flatten(-3)[..., : self.dim]

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"
