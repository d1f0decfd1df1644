import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, spread
from whereformer.errors import InputError, check_positive
from whereformer.grid import Grid
from whereformer.resample import resample_line


class ViT2D(PositionEncoding):
    """x_n += (E_X[x], E_Y[y]), E_X and E_Y learned, D/2 wide.   ViT, appendix D.4, "2-dimensional".

    On another grid each table is resampled as `Learned`'s is (bicubic, antialiased). Prefix tokens get nothing
    added: the paper speaks of patches.

    Args:
        std: of the truncated normal the tables start from (the paper does not tell; as `Learned`).

    Shapes: columns (E_X) [width, dim / 2], rows (E_Y) [height, dim / 2].
    """

    formula = "x_n + (E_X[x], E_Y[y])"
    paper = "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, appendix D.4 (2-dimensional)"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, std: float = 0.02) -> None:
        super().__init__(dim, num_heads, grid)
        if dim % 2:
            raise InputError(f"ViT2D: dim={dim}, expected an even number")
        check_positive("ViT2D: std", std)
        self.std = std
        self.columns = nn.Parameter(torch.empty(grid.width, dim // 2))
        self.rows = nn.Parameter(torch.empty(grid.height, dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.columns, std=self.std)
        nn.init.trunc_normal_(self.rows, std=self.std)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        tables = self.tables_on(grid)
        by_row, by_column = spread(tables["rows"], tables["columns"])
        return add(x, grid, grid.pick(torch.cat([by_column, by_row], -1)))

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {
            "rows": resample_line(self.rows, grid.height, mode="bicubic", antialias=True),
            "columns": resample_line(self.columns, grid.width, mode="bicubic", antialias=True),
        }

    def extra_repr(self) -> str:
        return f"rows={len(self.rows)}, columns={len(self.columns)}"
