import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import fitted, per_axis
from whereformer.errors import check_bool
from whereformer.forms import AxisBias, BucketBias
from whereformer.grid import Grid


class BoTNet(PositionEncoding):
    """e_ij = q_i·(k_j + r^row_dy + r^column_dx) / √d, (dy, dx) = key − query.

    Attention-augmented convolutions (Bello et al. 2019, section 3.1), BoTNet (Srinivas et al. 2021) and HaloNet
    (Vaswani et al. 2021). r^row and r^column are learned, one row of d numbers for each offset along an axis. On
    another grid than the home the tables are resized linearly. Pairs with a prefix token get nothing.

    Args:
        scaled: whether the relative logits are divided by √d too, as in the papers' code, or not (timm's default,
            scale_pos_embed=False).

    Shapes: rows [2 height − 1, d], columns [2 width − 1, d], shared by all heads. They start normal, std 1/√d.
    """

    formula = "e_ij + q_i·(r^row_dy + r^column_dx)/√d"
    paper = "Bello et al. 2019, Attention Augmented Convolutional Networks, 3.1; Srinivas et al. 2021, BoTNet"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, scaled: bool = True) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("BoTNet: scaled", scaled)
        self.scaled = scaled
        self.rows = nn.Parameter(torch.empty(2 * grid.height - 1, self.head_dim))
        self.columns = nn.Parameter(torch.empty(2 * grid.width - 1, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.rows, self.columns):
            nn.init.normal_(table, std=self.head_dim**-0.5)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[AxisBias | BucketBias, ...]:
        scale = self.head_dim**-0.5 if self.scaled else 1.0
        tables = fitted((self.rows * scale, self.columns * scale), queries, keys)
        return per_axis(q, tables, queries, keys)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        rows, columns = fitted((self.rows, self.columns), grid, grid)
        return {"rows": rows, "columns": columns}

    def macs(self, grid: Grid) -> int:
        return grid.tokens * self.dim * sum(2 * n - 1 for n in grid.size)

    def extra_repr(self) -> str:
        return f"scaled={self.scaled}"
