from typing import get_args

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import Longer, add, first_rows, spread
from whereformer.errors import InputError, check_count, check_one_of
from whereformer.grid import Grid


class DETRLearned(PositionEncoding):
    """x_n += (C_x, R_y): D/2 learned numbers for each column, and D/2 for each row.   DETR, learned.

    Whatever the grid, the first W columns and H rows of the tables are read. Prefix tokens get nothing added.
    DETR adds it where it adds the sinusoid: see `DETRSine`.

    Args:
        size: rows of each table.
        mode: what becomes of a grid with more rows or columns: "refuse" (an error, as in DETR), or "interpolate"
            (the whole table is stretched, linearly).

    Shapes: rows, columns [size, dim / 2]; they start uniform in 0 ... 1.
    """

    formula = "x_n + (C_x, R_y)"
    paper = "Carion et al. 2020, End-to-End Object Detection with Transformers (DETR), section 4.2"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, size: int = 50, mode: Longer = "refuse") -> None:
        super().__init__(dim, num_heads, grid)
        if dim % 2:
            raise InputError(f"DETRLearned: dim={dim}, expected an even number")
        check_count("DETRLearned: size", size)
        check_one_of("DETRLearned: mode", mode, get_args(Longer))
        self.mode: Longer = mode
        self.rows = nn.Parameter(torch.empty(size, dim // 2))
        self.columns = nn.Parameter(torch.empty(size, dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.rows)
        nn.init.uniform_(self.columns)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        rows = first_rows(self.rows, grid.height, self.mode, "DETRLearned: rows")
        columns = first_rows(self.columns, grid.width, self.mode, "DETRLearned: columns")
        by_row, by_column = spread(rows, columns)
        return add(x, grid, grid.pick(torch.cat([by_column, by_row], -1)))

    def extra_repr(self) -> str:
        return f"size={len(self.rows)}, mode={self.mode!r}"
