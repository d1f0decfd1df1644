import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.distance import Distance, by_distance, check_distance, farthest
from whereformer.errors import check_count, check_positive
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid
from whereformer.resample import without_autocast


class FIRE(PositionEncoding):
    """e_ij = q_i·k_j/√d + f_h(ψ(|i − j|) / ψ(max(L, E))), ψ(x) = ln(1 + |c| x), f an MLP of one hidden layer.

    f has a ReLU within; c and L are learned. Functional interpolation, Li et al. 2024, and the code of their
    appendix. Distances are divided by the largest one, after ψ, so that f sees 0 ... 1 on every grid; L keeps
    small grids from being stretched. In the paper's causal texts E = i, the farthest that query i can look back.
    In images, where all keys are seen, E is the largest distance on the grids: one number for all queries, so
    that the bias stays a function of the offset. Pairs with a prefix token get 0.

    Args:
        hidden: features of f's hidden layer.
        threshold: L at the start, in patches. On grids whose E is less, nothing is interpolated.
        distance: |i − j|: "euclidean" or "manhattan" between places in the image, or "raster", patches numbered
            row by row (the paper's, of texts).

    Shapes: w1, b1 [hidden], w2 [heads, hidden], b2 [heads], that start as torch's linear layers do; c, starts at
    .1; multiplier, L = |multiplier| threshold, starts at 1.
    """

    formula = "e_ij + MLP(ln(1 + c |p_i − p_j|) / ln(1 + c max(L, E)))"
    paper = "Li et al. 2024, Functional Interpolation for Relative Positions (FIRE)"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        hidden: int = 32,
        threshold: float = 512.0,
        distance: Distance = "euclidean",
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_count("FIRE: hidden", hidden)
        check_positive("FIRE: threshold", threshold)
        check_distance("FIRE", distance)
        self.threshold = threshold
        self.distance: Distance = distance
        self.w1 = nn.Parameter(torch.empty(hidden))
        self.b1 = nn.Parameter(torch.empty(hidden))
        self.w2 = nn.Parameter(torch.empty(num_heads, hidden))
        self.b2 = nn.Parameter(torch.empty(num_heads))
        self.c = nn.Parameter(torch.empty(()))
        self.multiplier = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.w1, -1, 1)
        nn.init.uniform_(self.b1, -1, 1)
        bound = self.w2.shape[1] ** -0.5
        nn.init.uniform_(self.w2, -bound, bound)
        nn.init.uniform_(self.b2, -bound, bound)
        nn.init.constant_(self.c, 0.1)
        nn.init.ones_(self.multiplier)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        def bias(length: Tensor) -> Tensor:
            parameters = (self.w1, self.b1, self.w2, self.b2, self.c, self.multiplier)
            w1, b1, w2, b2, c, multiplier = (parameter.to(length.dtype) for parameter in parameters)
            extent = farthest(self.distance, queries, keys, length)
            normalizer = (c.abs() * torch.maximum(multiplier.abs() * self.threshold, extent)).log1p()
            x = (c.abs() * length).log1p() / (normalizer + 1e-6)
            return F.linear((x[..., None] * w1 + b1).relu(), w2, b2).movedim(-1, 0)

        with without_autocast(q.device):
            return (by_distance(bias, self.distance, queries, keys, q),)

    def macs(self, grid: Grid) -> int:
        sides = (math.prod(grid.size),) if self.distance == "raster" else grid.size
        offsets = math.prod(2 * n - 1 for n in sides)
        return offsets * self.w1.shape[0] * (1 + self.num_heads)

    def extra_repr(self) -> str:
        return f"hidden={self.w1.shape[0]}, threshold={self.threshold}, distance={self.distance!r}"
