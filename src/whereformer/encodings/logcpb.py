import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import check_count, check_size
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid
from whereformer.resample import without_autocast


class LogCPB(PositionEncoding):
    """e_ij = q_i·k_j/√d + 16 σ(MLP(Δ̂)),  Δ̂ = sign(Δ) log₂(1 + 8 |Δ| / (M − 1)) / log₂ 8,  Δ = p_i − p_j.

    SwinV2's log-spaced continuous position bias. Liu et al. 2022, section 3.3, eq. 3-4, as in the released code:
    the paper has Δ̂ = sign(Δ) ln(1 + |Δ|), and no 16 σ, the sigmoid that keeps the bias in 0 ... 16. M is the
    window of the pre-training, along each axis; MLP is 2 -> hidden -> heads with a ReLU between, so that it
    serves every grid. Along an axis of M = 1 there is but offset 0. Pairs with a prefix token get 0.

    SwinV2's q·k is a cosine (eq. 2: cos(q, k) / τ), which is the host's: call `attention` with normalize(q) · √d ·
    exp(min(t, ln 100)) for q and normalize(k) for k; t, ln(1/τ), is learned, one number per head, from ln 10.

    Args:
        hidden: features between the two layers.
        pretrained: M along each axis: (height, width), frames before height in a video; by default the home
            grid's size.

    Shapes: w1 [hidden, axes], b1 [hidden], w2 [heads, hidden]. They start truncated normal, of std .02; b1 at
    zero.
    """

    formula = "e_ij + 16 σ(MLP(sign(Δ) log₂(1 + 8 |Δ|/(M − 1)) / 3)), Δ = p_i − p_j"
    paper = "Liu et al. 2022, Swin Transformer V2, section 3.3, eq. 3-4"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        hidden: int = 512,
        pretrained: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        pretrained = grid.size if pretrained is None else pretrained
        check_size("LogCPB: pretrained", pretrained, grid.axes)
        check_count("LogCPB: hidden", hidden)
        self.pretrained = tuple(pretrained)
        self.w1 = nn.Parameter(torch.empty(hidden, grid.axes))
        self.b1 = nn.Parameter(torch.empty(hidden))
        self.w2 = nn.Parameter(torch.empty(num_heads, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.w1, std=0.02)
        nn.init.zeros_(self.b1)
        nn.init.trunc_normal_(self.w2, std=0.02)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        w1, b1, w2 = (parameter.to(dtype) for parameter in (self.w1, self.b1, self.w2))
        reach = torch.tensor([max(1, m - 1) for m in self.pretrained], device=q.device)

        def bias(offsets: Tensor) -> Tensor:
            scaled = 8 * offsets.to(dtype) / reach
            logs = scaled.sign() * (1 + scaled.abs()).log2() / 3
            return 16 * F.linear(F.linear(logs, w1, b1).relu(), w2).sigmoid().movedim(-1, 0)

        with without_autocast(q.device):
            return (OffsetBias.of(bias, queries, keys, q.device),)

    def macs(self, grid: Grid) -> int:
        offsets = math.prod(2 * n - 1 for n in grid.size)
        return offsets * self.w1.shape[0] * (grid.axes + self.num_heads)

    def extra_repr(self) -> str:
        return f"hidden={self.w1.shape[0]}, pretrained={self.pretrained}"
