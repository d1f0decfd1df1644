from typing import Literal

import torch
from torch import Tensor, nn

from whereformer.encodings.common.rotary import Rotary, Scaling, Spectrum, check_theta
from whereformer.errors import check_one_of
from whereformer.forms import Layout
from whereformer.grid import Grid
from whereformer.resample import exact


class NDRoPE(Rotary):
    """A pair turns by θ^(−s/S) ω_k · p: for each scale s, ω_0 ... ω_n point to the corners of a regular simplex.

    nD-RoPE. p is the place of the patch, in patches. For n axes n + 1 waves, on images three at 120°, make each
    scale isotropic: Σ_k ω_k ω_kᵀ is a multiple of the identity. Each head turns its simplex at random, once and
    for all. A head has S (n + 1) pairs, s = 0 ... S − 1, those of one direction together.

    Args:
        theta: θ.
        turned: what has a random turn of its own: each "head", all its scales together (the released code), each
            "scale" of each head, or "none".
        layout: see docs/rotary.md.
        scaling: see docs/rotary.md, component by component of the waves. (The YaRN of the paper's tables has
            another ramp.)

    Shapes: directions [num_heads, 1 or S, n + 1, n], (x, y) or (x, y, t) last; not trained. The released
    checkpoints hold those of all blocks as (num_heads, blocks, n + 1, n). turned="none" has none.
    """

    formula = "R(θ^(−s/S) ω_k · p), ω_k the corners of a regular simplex"
    paper = "Li et al. 2026, nD-RoPE: A Generalized RoPE for n-Dimensional Position Embedding"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        theta: float = 100.0,
        turned: Literal["head", "scale", "none"] = "head",
        layout: Layout = "interleaved",
        scaling: Scaling = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid, layout=layout, scaling=scaling)
        check_theta("NDRoPE: theta", theta)
        check_one_of("NDRoPE: turned", turned, ("head", "scale", "none"))
        self.theta, self.turned = theta, turned
        n = grid.axes
        self.spectrum = Spectrum.of(self.share(n + 1, rest=True), theta)
        own = self.spectrum.count if turned == "scale" else 1
        self.directions = None
        if turned != "none":
            self.directions = nn.Parameter(torch.empty(num_heads, own, n + 1, n), requires_grad=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.directions is None:
            return
        heads, own, _, n = self.directions.shape
        like = {"device": self.directions.device, "dtype": torch.float32}
        corner = simplex(n, self.directions.device)
        turn, triangle = torch.linalg.qr(torch.randn(heads, own, n, n, **like))
        turn = turn * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # uniform over all orthogonal ones
        mirrored = torch.linalg.det(turn).sign()[..., None, None]
        turn = torch.cat([turn[..., :1] * mirrored, turn[..., 1:]], -1)
        self.directions.copy_(corner @ turn.mT)

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        directions = self.corners(device)
        scales = self.stretched(self.spectrum, grid, directions.device)  # [S, n]
        waves = exact(directions).flip(-1) * scales[:, None]  # [h, S, n + 1, n]
        return waves.transpose(1, 2).flatten(1, 2)

    def corners(self, device: torch.device | None = None) -> Tensor:
        """The ω_k of each head and scale: [num_heads or 1, 1 or S, n + 1, n]."""
        return simplex(self.grid.axes, device)[None, None] if self.directions is None else self.directions.detach()

    def extra_repr(self) -> str:
        said = ("theta", "turned", "layout", "scaling")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)


def simplex(n: int, device: torch.device | None = None) -> Tensor:
    """The n + 1 corners of a regular simplex on the unit sphere: [n + 1, n]; the product of any two is −1/n."""
    corners = torch.zeros(n + 1, n, device=device, dtype=torch.float32)
    for axis in range(n):
        corners[axis, axis] = (1 - corners[axis].square().sum()).sqrt()
        corners[axis + 1 :, axis] = (-1 / n - (corners[axis + 1 :] * corners[axis]).sum(-1)) / corners[axis, axis]
    return corners
