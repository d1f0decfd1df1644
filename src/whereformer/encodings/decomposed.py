import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import fitted, per_axis
from whereformer.errors import check_bool, check_positive
from whereformer.forms import AxisBias, BucketBias
from whereformer.grid import Grid


class Decomposed(PositionEncoding):
    """e_ij = q_i·k_j/√d + q_i·(R^h_{y_i − y_j} + R^w_{x_i − x_j}): q is not divided by √d in the second term.

    Between grids of two sizes, as where keys are pooled, each covers the whole image, and the offset is taken on
    the finer: along an axis of n queries and m keys

        y_i − y_j  stands for  y_i max(m/n, 1) − y_j max(n/m, 1)

    plus (m − 1) max(n/m, 1), so that key m − 1 is in row 0 of the table for query 0, and cut to a whole number.
    So in the code of MViTv2 (Li et al. 2022, section 4.1), of ViTDet and of SAM. R^h and R^w are learned, one
    row of d numbers for each offset. On another grid than the home they are resized linearly. Pairs with a
    prefix token get nothing.

    Args:
        scaled: divide by √d in the second term too, as the paper does (eq. 3: softmax((q·k + q·R)/√d)).
        std: of the truncated normal that the tables start from (MViTv2: .02), or 0 for zeros (ViTDet, SAM).

    Shapes: rows [2 height − 1, d], columns [2 width − 1, d], shared by all heads. A home grid is that of the finer
    of queries and keys.
    """

    formula = "e_ij + q_i·(R^h_{y_i − y_j} + R^w_{x_i − x_j})"
    paper = "Li et al. 2022, MViTv2: Improved Multiscale Vision Transformers, section 4.1, eq. 3-4; ViTDet; SAM"
    steady = True

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, scaled: bool = False, std: float = 0.02) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("Decomposed: scaled", scaled)
        if std != 0:
            check_positive("Decomposed: std", std)
        self.scaled = scaled
        self.std = std
        self.rows = nn.Parameter(torch.empty(2 * grid.height - 1, self.head_dim))
        self.columns = nn.Parameter(torch.empty(2 * grid.width - 1, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.rows, self.columns):
            nn.init.trunc_normal_(table, std=self.std) if self.std else nn.init.zeros_(table)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[AxisBias | BucketBias, ...]:
        rows, columns = self.rows, self.columns
        if self.scaled:
            rows, columns = rows * self.head_dim**-0.5, columns * self.head_dim**-0.5
        tables = fitted((rows, columns), queries, keys)
        return per_axis(q, tables, queries, keys, _place)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        rows, columns = fitted((self.rows, self.columns), grid, grid)
        return {"rows": rows, "columns": columns}

    def macs(self, grid: Grid) -> int:
        return grid.tokens * self.dim * sum(2 * n - 1 for n in grid.size)

    def extra_repr(self) -> str:
        return f"scaled={self.scaled}, std={self.std}"


def _place(query: Tensor, key: Tensor, queries: int, keys: int) -> Tensor:
    """y_i max(m/n, 1) + (m − 1 − y_j) max(n/m, 1), cut to a whole number, without a fraction on the way."""
    place = query * keys + (keys - 1 - key) * queries
    return place.div(min(queries, keys), rounding_mode="floor").long()
