import math
from typing import Literal

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add
from whereformer.errors import InputError, check_one_of, check_positive
from whereformer.grid import Grid
from whereformer.resample import exact


class Fourier(PositionEncoding):
    """x_n += (cos 2πBv, sin 2πBv), B_kc ~ N(0, σ²) and never trained: Gaussian Fourier features.

    v, in 0 ... 1, is the place in the image: v = (x / W, y / H). Prefix tokens get nothing added.

    Args:
        layout: "tancik" is the above. "sam" is Segment Anything's: sines first, and v = 2 (p + 1/2) / size − 1,
            centres of patches in −1 ... 1.
        sigma: σ, in periods over the image (SAM starts from 1, over half of it).

    Shapes: B [axes, dim / 2], its rows x, y (and t in a video), frozen.
    """

    formula = "x_n + (cos 2πBv, sin 2πBv), v = (x / W, y / H), B random"
    paper = "Tancik et al. 2020, Fourier Features Let Networks Learn High Frequency Functions"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        layout: Literal["tancik", "sam"] = "tancik",
        sigma: float = 10.0,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        if dim % 2:
            raise InputError(f"Fourier: dim={dim}, expected an even number")
        check_one_of("Fourier: layout", layout, ("tancik", "sam"))
        check_positive("Fourier: sigma", sigma)
        self.layout = layout
        self.sigma = sigma
        self.B = nn.Parameter(torch.empty(grid.axes, dim // 2), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.B, std=self.sigma)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        B = exact(self.B.detach())  # drawn once: it stays as it is if a recipe unfreezes all parameters
        places = grid.coords(x.device).to(B.dtype) + (0.5 if self.layout == "sam" else 0.0)
        v = torch.stack([p / n for p, n in zip(places.unbind(-1), grid.size, strict=True)][::-1], -1)
        v = 2 * v - 1 if self.layout == "sam" else v
        angles = 2 * math.pi * (v[..., None] * B).sum(-2)
        both = (angles.sin(), angles.cos()) if self.layout == "sam" else (angles.cos(), angles.sin())
        return add(x, grid, torch.cat(both, -1))

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.B.numel()

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}, sigma={self.sigma}"
