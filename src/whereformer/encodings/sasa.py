from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import fitted, key_minus_query, near, per_axis
from whereformer.errors import InputError, check_bool
from whereformer.forms import Bias, LowRankBias
from whereformer.grid import Grid


class SASA(PositionEncoding):
    """e_ij = q_i·(k_j + (p^row_dy, p^column_dx)) / √d: half of the channels for each axis, on keys alone.

    The offset is key − query, as in the paper. Ramachandran et al. 2019, Stand-Alone Self-Attention in Vision
    Models, for windows of k x k patches around each query: `attention(..., mask=sasa.mask(grid))`.
    Without windows, over all of an image, as in iRPE (Wu et al. 2021, eq. 12 and Table 5). Pairs with a prefix
    token get nothing.

    Args:
        window: k, odd, in patches; None: every offset of the home grid has a row, and on another grid the tables
            are resized linearly.
        scaled: whether the logits are divided by √d (iRPE, eq. 12), or not, as in the paper (eq. 3).

    Shapes: rows [k or 2 height − 1, d / 2], columns [k or 2 width − 1, d / 2], shared by all heads. They start
    normal, std 1/√d.
    """

    formula = "e_ij + q_i·(p^row_dy, p^column_dx)/√d"
    paper = "Ramachandran et al. 2019, Stand-Alone Self-Attention in Vision Models (SASA), eq. 3"

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, window: int | None = None, scaled: bool = True
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("SASA: scaled", scaled)
        whole = window is None or (isinstance(window, int) and not isinstance(window, bool))
        if not whole or (window is not None and (window < 1 or window % 2 == 0)):
            raise InputError(f"SASA: window={window!r}, expected an odd positive integer, in patches, or None")
        if self.head_dim % 2:
            raise InputError(f"SASA: dim={dim}, num_heads={num_heads}, expected an even number of features a head")
        self.window = window
        self.scaled = scaled
        height, width = (window or 2 * n - 1 for n in grid.size)
        self.rows = nn.Parameter(torch.empty(height, self.head_dim // 2))
        self.columns = nn.Parameter(torch.empty(width, self.head_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.rows, self.columns):
            nn.init.normal_(table, std=self.head_dim**-0.5)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[Bias]:
        scale = self.head_dim**-0.5
        if not self.scaled:
            yield LowRankBias(q * (1 - scale), k)
            scale = 1.0
        tables, place = (self.rows, self.columns), self._place
        if self.window is None:
            tables, place = fitted(tables, queries, keys), key_minus_query
        half = self.head_dim // 2
        rows, columns = (table * scale for table in tables)
        yield from per_axis(q, (F.pad(rows, (0, half)), F.pad(columns, (half, 0))), queries, keys, place)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        if self.window is not None:
            return {}
        rows, columns = fitted((self.rows, self.columns), grid, grid)
        return {"rows": rows, "columns": columns}

    def _place(self, query: Tensor, key: Tensor, queries: int, keys: int) -> Tensor:
        assert self.window is not None
        return key - query + self.window // 2

    def mask(self, grid: Grid, keys: Grid | None = None, device: torch.device | None = None) -> Tensor:
        """Which keys are in the k x k window around each query, prefix tokens with all: [tokens, tokens], bool.

        From `Points`: [b or 1, 1, tokens, tokens]. Where a window reaches over the border it is cut.

        >>> SASA(8, 2, Grid(1, 4), window=3).mask(Grid(1, 4)).int().tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
        """
        if self.window is None:
            raise InputError("SASA: window=None has no mask, expected one that was built with a window")
        reach = self.window // 2
        return near(lambda dy, dx: (dy.abs() <= reach) & (dx.abs() <= reach), grid, keys or grid, device)

    def macs(self, grid: Grid) -> int:
        rows = sum(self.window or 2 * n - 1 for n in grid.size)
        return grid.tokens * self.dim * rows // 2

    def extra_repr(self) -> str:
        return f"window={self.window}, scaled={self.scaled}"
