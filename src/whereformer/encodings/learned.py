from typing import Literal

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError, check_bool, check_one_of, check_positive
from whereformer.grid import Grid
from whereformer.resample import resample


class Learned(PositionEncoding):
    """x_n += E_n, one learned row per token.   ViT, eq. 1; table of DeiT and timm.

    On another grid the patches' rows are resampled as an image; the prefix tokens' rows are not.

    Args:
        prefix_rows: whether prefix tokens have rows of their own (ViT, DeiT) or get nothing added (DeiT-III).
        mode: how patches' rows are resampled: "bicubic" or "bilinear".
        antialias: whether the kernel widens when shrinking. Checkpoints differ: timm resamples bicubically with
            antialias, DINOv2 bicubically without.
        std: of the truncated normal the table starts from (timm: .02).

    Shapes: table [prefix rows + patches, dim], prefix rows first.
    """

    formula = "x_n + E_n"
    paper = "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, eq. 1"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        prefix_rows: bool = True,
        mode: Literal["bicubic", "bilinear"] = "bicubic",
        antialias: bool = True,
        std: float = 0.02,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        for name, value in (("antialias", antialias), ("prefix_rows", prefix_rows)):
            check_bool(f"Learned: {name}", value)
        check_one_of("Learned: mode", mode, ("bicubic", "bilinear"))
        self.prefix_rows = grid.prefix if prefix_rows else 0
        check_positive("Learned: std", std)
        self.mode = mode
        self.antialias = antialias
        self.std = std
        self.table = nn.Parameter(torch.empty(self.prefix_rows + grid.patches, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=self.std)

    @torch.no_grad()
    def start_from(self, table: Tensor) -> None:
        """Take the rows of a trained table [prefix rows + patches, dim] of the same grid.

        Prefix rows that only one of the two has are zeros here, or left out.
        """
        patches = self.grid.patches
        prefix = table[: table.shape[0] - patches]
        if prefix.shape[0] != self.prefix_rows:
            prefix = table.new_zeros(self.prefix_rows, self.dim)
        self.table.copy_(torch.cat([prefix, table[-patches:]]))

    def extra_repr(self) -> str:
        return f"rows={self.prefix_rows} + {self.grid.height} * {self.grid.width}"

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        grid.check(x.shape[1], "x")
        if self.prefix_rows and grid.prefix != self.prefix_rows:
            raise InputError(f"Learned: rows for {self.prefix_rows} prefix tokens, but {grid} has {grid.prefix}")
        prefix, patches = self._read(grid)
        patches = grid.pick(patches)
        rows = torch.cat([prefix.expand(*patches.shape[:-2], -1, -1), patches], -2).to(x.dtype)
        untouched = grid.prefix - self.prefix_rows
        return torch.cat([x[:, :untouched], x[:, untouched:] + rows], 1)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        prefix, patches = self._read(grid)
        return {"table": torch.cat([prefix, patches.flatten(0, 1)])}

    def _read(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Rows of the prefix tokens [p, dim], and of the patches of a grid [height, width, dim]."""
        prefix, patches = self.table[: self.prefix_rows], self.table[self.prefix_rows :]
        patches = patches.unflatten(0, (self.grid.height, self.grid.width))
        patches = resample(patches, (grid.height, grid.width), mode=self.mode, antialias=self.antialias)
        return prefix, patches
