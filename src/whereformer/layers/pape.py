import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer import backends
from whereformer.attention import reference
from whereformer.backends.call import Call
from whereformer.errors import InputError, check_bool, check_count, check_heads
from whereformer.forms import DenseBias, Forms, LowRankBias
from whereformer.grid import Grid, Points
from whereformer.mask import Mask
from whereformer.resample import without_autocast


class PaPE(nn.Module):
    """e_ij = (q_i·k_j + Σ_m b_im (t_im − t_jm) − a_im (t_im − t_jm)²) / √d: parabolas of the offset.

    t = W p, a_i = softplus(W_a x_i) > 0, b_i = W_b x_i, for each of P parabolas m of a head. Parabolic position
    encoding, Øhrstrøm et al. 2026 (arXiv 2602.01418), after the released code. a and b depend on the token
    itself, not on its query, so that it is an attention module with projections of its own. Prefix tokens take
    part: they lie one row above and one column left of the first patch. The bias is a product of 3 P + 2 numbers
    per token, exactly.

    PaPE-RI, of the same paper, is invariant to rotations of the image: t_im = s_h p_im over the axes m, s_h drawn
    once and not learned, one a per head, no b.

    Args:
        dim: features of a token.
        num_heads: attention heads; divides `dim`.
        parabolas: P.
        rotation_invariant: PaPE-RI.
        axes: 2 for images, 3 for videos.

    Shapes: qkv_proj [3 dim, dim], out_proj [dim, dim], with biases; position [heads P, axes], over (x, y) or
    (x, y, t), and ab [2 heads P, dim]; or for PaPE-RI position_scales [heads], not learned, and a [heads, dim].
    They start as torch's linear layers do, the scales uniform in ±axes^(−1/2).

    >>> PaPE(24, 4)(torch.ones(1, 7, 24), Grid(2, 3, prefix=1)).shape
    torch.Size([1, 7, 24])
    """

    def __init__(
        self, dim: int, num_heads: int, *, parabolas: int = 50, rotation_invariant: bool = False, axes: int = 2
    ) -> None:
        super().__init__()
        check_heads("PaPE", dim, num_heads)
        check_count("PaPE: parabolas", parabolas)
        check_bool("PaPE: rotation_invariant", rotation_invariant)
        if axes not in (2, 3):
            raise InputError(f"PaPE: axes={axes!r}, expected 2 (images) or 3 (videos)")
        self.num_heads = num_heads
        self.axes = axes
        self.rotation_invariant = rotation_invariant
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        if rotation_invariant:
            self.position_scales = nn.Parameter(torch.empty(num_heads), requires_grad=False)
            self.a = nn.Linear(dim, num_heads, bias=False)
        else:
            self.position = nn.Linear(axes, num_heads * parabolas, bias=False)
            self.ab = nn.Linear(dim, 2 * num_heads * parabolas, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.children():
            assert isinstance(layer, nn.Linear)
            layer.reset_parameters()
        if self.rotation_invariant:
            nn.init.uniform_(self.position_scales, -(self.axes**-0.5), self.axes**-0.5)

    def forward(self, x: Tensor, grid: Grid, *, mask: Tensor | None = None) -> Tensor:
        """Tokens [batch, tokens, dim] that lie on `grid` to tokens; `mask` as `whereformer.attention` takes it."""
        grid.check(x.shape[1], "x")
        if isinstance(grid, Points):
            grid.check_batch(x.shape[0], "x")
        if grid.axes != self.axes:
            raise InputError(f"PaPE: built for {self.axes} axes, but {grid} has {grid.axes}")
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scale = q.shape[-1] ** -0.5
        bias = self.bias(x, grid)
        forms = Forms(biases=(LowRankBias(scale * bias.left, bias.right),))
        if q.dtype not in (torch.float32, torch.float64):
            # (tᵢ − tⱼ)² would drown in what half precision leaves of tᵢ² and tⱼ²
            with without_autocast(x.device):
                forms = Forms(biases=(DenseBias(forms.biases[0].dense()),))
        allowed = None if mask is None else Mask.read(mask, (*q.shape[:-1], k.shape[-2]))
        attend = backends.choose("auto", forms, Call(q, k, v, allowed)) or reference
        z = attend(q, k, v, forms, allowed, 0.0)
        return self.out_proj(z.transpose(1, 2).flatten(2))

    def bias(self, x: Tensor, grid: Grid) -> LowRankBias:
        """The bias, not yet divided by √d."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        p = F.pad(grid.coords(x.device).flip(-1) + 1, (0, 0, grid.prefix, 0)).to(dtype)
        p = p[None] if p.ndim == 2 else p
        if self.rotation_invariant:
            t = p[:, None] * self.position_scales.detach().to(dtype)[:, None, None]
            a = F.softplus(self.a(x).to(dtype)).transpose(1, 2)[..., None].expand(-1, -1, -1, self.axes)
            b = None
        else:
            with without_autocast(x.device):
                t = F.linear(p, self.position.weight.to(dtype)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            a, b = self.ab(x).to(dtype).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            a = F.softplus(a)
        # −a (tᵢ − tⱼ)² = −a tᵢ² − a tⱼ² + 2 a tᵢ tⱼ
        one = torch.ones_like(t[..., :1])
        left, right = [-(a * t**2).sum(-1, keepdim=True), a, 2 * a * t], [one, -(t**2), t]
        if b is not None:
            left, right = [*left, (b * t).sum(-1, keepdim=True), b], [*right, one, -t]
        return LowRankBias(torch.cat(left, -1), torch.cat(right, -1))
