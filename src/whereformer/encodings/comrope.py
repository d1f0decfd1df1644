from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.rotary import exponential
from whereformer.errors import InputError, check_at_least, check_one_of, check_positive
from whereformer.forms import MatrixRotation
from whereformer.grid import Grid
from whereformer.resample import exact


class ComRoPE(PositionEncoding):
    """Patch p multiplies a head's queries and keys by R(p) = exp(Σ_a p_a A_a), A_a learned such that they commute.

    ComRoPE, section 3. As they commute, R(p)ᵀ R(p') = R(p' − p): the encoding is relative. Block j of A_a is

        kind "ld" (linearly dependent)   θ_aj (P_j − P_jᵀ)
        kind "ap" (axial partition)      P_j − P_jᵀ if j ≡ a (mod number of axes), otherwise 0

    with P_j any matrix, and so P_j − P_jᵀ skew-symmetric. Places are in units of the image, from its centre: p =
    (k + ½) / n − ½ for row, column or frame k of n. Any grid spans the same range, so that no scaling is needed.
    (The released code counts from 0 to 1 and turns the class token by ½. As R is relative, scores are the same
    here, where prefix tokens are not turned.)

    Args:
        kind: "ld" or "ap".
        block: the size of the blocks; divides the features of a head, in "ap" those of one axis.
        perturb: in training (section 3.4.2) each patch moves by ½ perturb N(0, 1) rows and columns, at most ½.
            Each block of the transformer draws its own; queries and keys of two grids would be drawn apart, and
            are refused.
        std: of the normal distribution from which P starts.

    Shapes: generators [num_heads, blocks, block, block], the P_j; in "ld" scales [axes, blocks], θ, from N(0, 1).
    """

    axes = (2, 3)
    formula = "exp(Σ_a p_a A_a), A_a skew-symmetric, commuting, learned"
    paper = "Yu et al. 2025, ComRoPE: Scalable and Robust Rotary Position Embedding, section 3"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        kind: Literal["ld", "ap"] = "ld",
        block: int = 8,
        perturb: float = 0.0,
        std: float = 1.0,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_one_of("ComRoPE: kind", kind, ("ld", "ap"))
        parts = grid.axes if kind == "ap" else 1
        if isinstance(block, bool) or not isinstance(block, int) or block < 2 or self.head_dim % (block * parts):
            features = f"the {self.head_dim} features a head" + (f", in {parts} parts" if parts > 1 else "")
            raise InputError(f"ComRoPE: block={block!r}, expected at least 2, and to divide {features}")
        check_at_least("ComRoPE: perturb", perturb, 0)
        check_positive("ComRoPE: std", std)
        self.kind, self.block, self.perturb, self.std = kind, block, perturb, std
        count = self.head_dim // block
        self.generators = nn.Parameter(torch.empty(num_heads, count, block, block))
        self.scales = nn.Parameter(torch.empty(grid.axes, count)) if kind == "ld" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.generators, std=self.std)
        if self.scales is not None:
            nn.init.normal_(self.scales)

    @property
    def crosses(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not (self.training and self.perturb)

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[MatrixRotation]:
        skew = exact(self.generators)
        skew = (skew - skew.mT) * self.of_axes(skew)[:, None, :, None, None]
        yield exponential(skew, self.places(grid, skew.device), self.head_dim)

    def of_axes(self, like: Tensor) -> Tensor:
        """What of each block each axis has: [axes, blocks]."""
        if self.scales is not None:
            return exact(self.scales)
        own = torch.arange(like.shape[1], device=like.device) % self.grid.axes
        return (own == torch.arange(self.grid.axes, device=like.device)[:, None]).to(like.dtype)

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        """Where each patch is: [(b or 1,) patches, axes], in the dtype of the generators, float32 or more."""
        coords = grid.coords(device).to(exact(self.generators).dtype)
        if self.training and self.perturb:
            moved = (0.5 * self.perturb * torch.randn_like(coords[..., -2:])).clamp(-0.5, 0.5)
            coords = coords + F.pad(moved, (grid.axes - 2, 0))
        return torch.stack([(coords[..., a] + 0.5) / n - 0.5 for a, n in enumerate(grid.size)], -1)

    def macs(self, grid: Grid) -> int:
        """The products with queries and keys; not the exponentials, which are taken once for all of a batch."""
        return 2 * grid.patches * self.dim * self.head_dim

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, block={self.block}, perturb={self.perturb}, std={self.std}"
