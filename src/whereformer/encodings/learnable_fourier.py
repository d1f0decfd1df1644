from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, linear
from whereformer.errors import InputError, check_count, check_one_of, check_positive
from whereformer.grid import Grid
from whereformer.resample import exact


class LearnableFourier(PositionEncoding):
    """x_n += GeLU(r W_1 + b_1) W_2 + b_2,   r = F^(−1/2) (cos p W_r, sin p W_r).   Li et al., algorithm 1.

    p = (y, x), in patches; with one axis in each group, p = y in one and p = x in the other, both through the
    same W, and the results side by side, D / groups wide. At the start r_i·r_j is near half of the Gaussian
    exp(−|p_i − p_j|² / 2γ²). Prefix tokens get nothing added.

    Args:
        features: F, the width of r.
        hidden: the width of the MLP.
        groups: "together" (one group of all axes) or "apart" (one group for each axis).
        gamma: γ, in patches; W_r starts from N(0, γ⁻²), γ⁻² being its variance. (Public ports of the code take it
            as the standard deviation; the two agree at γ = 1.)

    Shapes: W_r [axes in a group, F / 2], weight_1 [hidden, F], bias_1 [hidden], weight_2 [dim / groups, hidden],
    bias_2 [dim / groups]; but for W_r they start as torch's linear layers do (the paper does not tell).
    """

    formula = "x_n + MLP((cos p W_r, sin p W_r) / √F)"
    paper = "Li et al. 2021, Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        features: int = 768,
        hidden: int = 32,
        groups: Literal["together", "apart"] = "together",
        gamma: float = 1.0,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_count("LearnableFourier: features", features)
        if features % 2:
            raise InputError(f"LearnableFourier: features={features}, expected an even number")
        check_count("LearnableFourier: hidden", hidden)
        check_one_of("LearnableFourier: groups", groups, ("together", "apart"))
        check_positive("LearnableFourier: gamma", gamma)
        self.groups = grid.axes if groups == "apart" else 1
        if dim % self.groups:
            raise InputError(
                f"LearnableFourier: dim={dim}, expected a multiple of {self.groups}, one group an axis"
            )
        self.gamma = gamma
        self.W_r = nn.Parameter(torch.empty(grid.axes // self.groups, features // 2))
        self.weight_1 = nn.Parameter(torch.empty(hidden, features))
        self.bias_1 = nn.Parameter(torch.empty(hidden))
        self.weight_2 = nn.Parameter(torch.empty(dim // self.groups, hidden))
        self.bias_2 = nn.Parameter(torch.empty(dim // self.groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.W_r, std=1 / self.gamma)
        for weight, bias in ((self.weight_1, self.bias_1), (self.weight_2, self.bias_2)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        W_r = exact(self.W_r)
        p = grid.coords(x.device).to(W_r.dtype).unflatten(-1, (self.groups, -1))
        angles = (p[..., None] * W_r).sum(-2)  # [patches, groups, features / 2]
        r = torch.cat([angles.cos(), angles.sin()], -1) * self.weight_1.shape[1] ** -0.5
        h = F.gelu(linear(r, self.weight_1, self.bias_1))
        return add(x, grid, linear(h, self.weight_2, self.bias_2).flatten(-2))

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.groups * (self.W_r.numel() + self.weight_1.numel() + self.weight_2.numel())

    def extra_repr(self) -> str:
        hidden, features = self.weight_1.shape
        return f"features={features}, hidden={hidden}, groups={self.groups}, gamma={self.gamma}"
