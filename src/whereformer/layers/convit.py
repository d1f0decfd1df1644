import torch
from torch import Tensor, nn

from whereformer.attention import attention
from whereformer.errors import InputError, check_bool, check_heads, check_positive
from whereformer.forms import OffsetBias
from whereformer.grid import Grid
from whereformer.mask import Mask
from whereformer.resample import without_autocast


class GPSA(nn.Module):
    """A_h = (1 − σ(λ_h)) softmax(q_i·k_j/√d) + σ(λ_h) softmax(w_h·(δx, δy, δx² + δy²) + c_h),  z = A v.

    ConViT's gated positional self-attention, that starts as a convolution. d'Ascoli et al. 2021, section 3;
    (δy, δx) is key − query, in patches. Two softmaxes are more than a bias can say, so that it is
    a module with projections of its own; their names are those of the released code and of timm. c_h cancels in
    the softmax, and λ is gating_param. ConViT's class token joins after these layers: prefix tokens are refused.

    Args:
        dim: features of a token.
        num_heads: attention heads; divides `dim`.
        locality_strength: α, by which the convolution of the start is sharper.
        qkv_bias: whether queries, keys and values have a bias.

    Shapes: qk [2 dim, dim], v [dim, dim], proj [dim, dim], pos_proj [heads, 3], gating_param [heads]. λ starts
    at 1, v at the identity, and head h₁ + k h₂, k = int(√heads), looks at δ = (h₁, h₂) − (k − 1)/2: see
    `reset_parameters`. The others start truncated normal, of std .02, biases at zero.

    >>> GPSA(24, 4)(torch.ones(1, 6, 24), Grid(2, 3)).shape
    torch.Size([1, 6, 24])
    """

    def __init__(
        self, dim: int, num_heads: int, *, locality_strength: float = 1.0, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        check_heads("GPSA", dim, num_heads)
        check_positive("GPSA: locality_strength", locality_strength)
        check_bool("GPSA: qkv_bias", qkv_bias)
        self.num_heads = num_heads
        self.locality_strength = locality_strength
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.pos_proj = nn.Linear(3, num_heads)
        self.gating_param = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """w_h = α (2 δx, 2 δy, −1): the logits are −α |(δx, δy) − (those of head h)|² but for a constant."""
        for layer in (self.qk, self.v, self.proj, self.pos_proj):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.ones_(self.gating_param)
        nn.init.eye_(self.v.weight)
        side = int(self.num_heads**0.5)
        middle = (side - 1) / 2
        for row in range(side):
            for column in range(side):
                place = (2 * (column - middle), 2 * (row - middle), -1.0)
                self.pos_proj.weight[row + side * column] = self.pos_proj.weight.new_tensor(place)
        self.pos_proj.weight *= self.locality_strength

    def forward(self, x: Tensor, grid: Grid, *, mask: Tensor | None = None) -> Tensor:
        """Tokens [batch, tokens, dim] that lie on `grid` to tokens; `mask` as `attention` takes it."""
        if grid.prefix or grid.axes != 2:
            raise InputError(f"GPSA: {grid}, expected an image without prefix tokens")
        grid.check(x.shape[1], "x")
        q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        logits = self.positions(grid, torch.promote_types(v.dtype, torch.float32))
        if mask is None:
            weights = logits.softmax(-1)
        else:
            weights = Mask.read(mask, (*q.shape[:-1], k.shape[-2])).softmax(logits)
        gate = self.gating_param.sigmoid()[:, None, None]
        z = (1 - gate) * attention(q, k, v, grid, mask=mask) + gate * (weights.to(v.dtype) @ v)
        return self.proj(z.transpose(1, 2).flatten(2))

    def positions(self, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
        """w_h·(δx, δy, δx² + δy²) + c_h: [1 or batch, heads, queries, keys]."""
        weight, bias = self.pos_proj.weight.to(dtype), self.pos_proj.bias.to(dtype)

        def logits(offsets: Tensor) -> Tensor:
            dy, dx = (-offsets.to(dtype)).unbind(-1)
            return nn.functional.linear(torch.stack([dx, dy, dx**2 + dy**2], -1), weight, bias).movedim(-1, 0)

        with without_autocast(weight.device):
            return OffsetBias.of(logits, grid, grid, weight.device).dense()
