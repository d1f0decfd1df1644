import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, first_rows, spread
from whereformer.errors import check_count
from whereformer.grid import Grid


class Pix2Struct(PositionEncoding):
    """x_n += R_y+1 + C_x+1: learned rows by absolute row and column.   Pix2Struct, section 2.2.

    The paper speaks of "2-dimensional absolute positional embeddings"; this is the released model. It counts from
    1: row 0 of both tables belongs to padding, and is kept so that checkpoints fit. (NaViT, section 2.1, describes
    Pix2Struct's as one table [maxLen, maxLen], which the released model does not have.)

    Args:
        size: rows of each table; an image has at most size − 1 patches a side.

    Shapes: rows (R), columns (C) [size, dim]; they start normal, std dim^(−1/2).
    """

    formula = "x_n + R_y+1 + C_x+1"
    paper = "Lee et al. 2022, Pix2Struct: Screenshot Parsing as Pretraining, section 2.2 (released model)"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, size: int = 4096) -> None:
        super().__init__(dim, num_heads, grid)
        check_count("Pix2Struct: size", size)
        self.rows = nn.Parameter(torch.empty(size, dim))
        self.columns = nn.Parameter(torch.empty(size, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rows, std=self.dim**-0.5)
        nn.init.normal_(self.columns, std=self.dim**-0.5)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        rows = first_rows(self.rows[1:], grid.height, "refuse", "Pix2Struct: rows")
        columns = first_rows(self.columns[1:], grid.width, "refuse", "Pix2Struct: columns")
        by_row, by_column = spread(rows, columns)
        return add(x, grid, grid.pick(by_row + by_column))

    def extra_repr(self) -> str:
        return f"size={len(self.rows)}"
