from typing import Literal, get_args

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.distance import Distance, by_distance, check_distance
from whereformer.errors import check_one_of
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid

Kernel = Literal["log", "power"]
LEAST = 0.01


class KERPLE(PositionEncoding):
    """e_ij = q_i·k_j/√d − r₁ ln(1 + r₂ |i − j|), or − r₁ |i − j|^r₂: r₁, r₂ > 0 learned per head.

    Chi et al. 2022, the logarithmic and the power variant. Both are kernels that are conditionally positive
    definite: of places in a text there, in the image here. In the power r₂ <= 2. Where training moves r₁ or r₂
    beyond their bounds, the bound is read instead (.01 for 0, as in the released code, which moves them back);
    the gradient passes. Pairs with a prefix token get 0.

    Args:
        kernel: "log" (the better one in the paper) or "power".
        distance: |i − j|: "euclidean" or "manhattan" between places in the image, or "raster", patches numbered
            row by row (the paper's, of texts).

    Shapes: r1, r2 [heads]. They start uniform: in the log r₁ in (0, 2), r₂ in (0, 1); in the power r₁ in (0, 1),
    r₂ in (0, 2).
    """

    formula = "e_ij − r₁ ln(1 + r₂ |p_i − p_j|), or e_ij − r₁ |p_i − p_j|^r₂"
    paper = "Chi et al. 2022, KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        kernel: Kernel = "log",
        distance: Distance = "euclidean",
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_one_of("KERPLE: kernel", kernel, get_args(Kernel))
        check_distance("KERPLE", distance)
        self.kernel: Kernel = kernel
        self.distance: Distance = distance
        self.r1 = nn.Parameter(torch.empty(num_heads))
        self.r2 = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.r1, 0, 2 if self.kernel == "log" else 1)
        nn.init.uniform_(self.r2, 0, 1 if self.kernel == "log" else 2)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        def bias(length: Tensor) -> Tensor:
            r1, r2 = (r.to(length.dtype).reshape(-1, *[1] * length.ndim) for r in (self.r1, self.r2))
            if self.kernel == "log":
                return -_bounded(r1) * (_bounded(r2) * length).log1p()
            return -_bounded(r1) * length ** _bounded(r2, 2.0)

        return (by_distance(bias, self.distance, queries, keys, q),)

    def extra_repr(self) -> str:
        return f"kernel={self.kernel!r}, distance={self.distance!r}"


def _bounded(r: Tensor, most: float | None = None) -> Tensor:
    """r within its bounds; its gradient as if there were none."""
    return r + (r.clamp(LEAST, most) - r).detach()
