import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.rotary import exponential, greater
from whereformer.errors import InputError, check_bool, check_one_of
from whereformer.forms import MatrixRotation
from whereformer.grid import Grid
from whereformer.resample import exact


class LieRE(PositionEncoding):
    """Patch p multiplies a head's queries and keys by R(p) = exp(Σ_a p_a A_a), A_a skew-symmetric, learned.

    LieRE. The A_a do not commute, so that R(p)ᵀ R(p') is not R(p' − p): this rotation keeps norms but is not
    exactly relative. Places run, as in the released code, from 0 at the first row (column, frame) to n/N at the
    last, n the length of the axis and N that of the grid it was built for. Exponentials are taken in float32 or
    more.

    Args:
        block: the size of the blocks on the diagonal of each A_a, LieRE_8 of the paper for 8; None: one block of
            all features of a head. Features left over do not turn. Blocks of 2 are RoPE-Mixed, and relative.
        shared: whether heads share their A_a.
        scaling: "none", or "pi": places run to 1 on every grid.

    Shapes: generators [axes, num_heads or 1, blocks, block (block − 1) / 2], the entries above the diagonal of
    each block, row by row; at the start uniform in [0, 2π).
    """

    axes = (2, 3)
    formula = "exp(Σ_a p_a A_a), A_a skew-symmetric, learned"
    paper = "Ostmeier et al. 2025, LieRE: Lie Rotational Positional Encodings"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        block: int | None = None,
        shared: bool = False,
        scaling: Literal["none", "pi"] = "none",
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("LieRE: shared", shared)
        check_one_of("LieRE: scaling", scaling, ("none", "pi"))
        self.block = self.head_dim if block is None else block
        if isinstance(block, bool) or not isinstance(self.block, int) or not 2 <= self.block <= self.head_dim:
            raise InputError(f"LieRE: block={block!r}, expected 2 to {self.head_dim} features, or None")
        self.shared, self.scaling = shared, scaling
        self.trained = grid
        blocks, entries = self.head_dim // self.block, self.block * (self.block - 1) // 2
        self.generators = nn.Parameter(torch.empty(grid.axes, 1 if shared else num_heads, blocks, entries))
        self.reset_parameters()

    @property
    def by_offset(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.block == 2

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.generators, 0, 2 * math.pi)

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        """Where each patch is: [(b or 1,) patches, axes], in the dtype of the generators, float32 or more."""
        scale = [
            (1.0 if self.scaling == "pi" else n / home) / greater(n - 1, 1)
            for n, home in zip(grid.size, self.trained.size, strict=True)
        ]
        coords = grid.coords(device).to(exact(self.generators).dtype)
        return torch.stack([coords[..., a] * s for a, s in enumerate(scale)], -1)

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[MatrixRotation]:
        places = self.places(grid, self.generators.device)
        yield exponential(self.skew(), places, self.head_dim)

    def skew(self) -> Tensor:
        """The A_a: [axes, num_heads or 1, blocks, block, block], float32 or more."""
        entries = exact(self.generators)
        row, column = torch.triu_indices(self.block, self.block, 1, device=entries.device)
        above = entries.new_zeros(*entries.shape[:-1], self.block, self.block)
        above[..., row, column] = entries
        return above - above.mT

    def macs(self, grid: Grid) -> int:
        """The products with queries and keys; not the exponentials, which are taken once for all of a batch."""
        return 2 * grid.patches * self.dim * self.head_dim

    def extra_repr(self) -> str:
        return f"block={self.block}, shared={self.shared}, scaling={self.scaling!r}"
