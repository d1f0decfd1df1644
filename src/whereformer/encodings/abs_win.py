from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add
from whereformer.errors import check_bool, check_positive, check_size
from whereformer.grid import Grid
from whereformer.resample import resample


class AbsWin(PositionEncoding):
    """x_n += resize(E, (H, W))_yx + E'_{y mod h, x mod w}: absolute win, for models with attention in windows.

    A table learned together with windows of h × w patches repeats itself in each, and is spoilt when resized as a
    whole. Here the background E alone is resized, bicubically, and the window's E' is tiled. Prefix tokens get
    nothing added.

    Args:
        window: h, w of the windows, in patches (Hiera: its mask units; SAM 2: the windows of the first stage).
        size: height and width of E. None: those of the home grid, and E is resized with it.
        antialias: widen the kernel when shrinking (timm's Hiera); SAM 2 does not.
        std: of the truncated normal that both tables start from.

    Shapes: table (E) [*size, dim], window (E') [*window, dim].
    """

    formula = "x_n + resize(E, (H, W))_n + E'_{y mod h, x mod w}"
    paper = "Bolya et al. 2024, Window Attention is Bugged: How not to Interpolate Position Embeddings"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        window: Sequence[int] = (8, 8),
        size: Sequence[int] | None = None,
        antialias: bool = True,
        std: float = 0.02,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("AbsWin: antialias", antialias)
        self.sized_by_grid = size is None
        size = grid.size if size is None else size
        check_size("AbsWin: window", window)
        check_size("AbsWin: size", size)
        check_positive("AbsWin: std", std)
        self.antialias = antialias
        self.std = std
        self.table = nn.Parameter(torch.empty(*size, dim))
        self.window = nn.Parameter(torch.empty(*window, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=self.std)
        nn.init.trunc_normal_(self.window, std=self.std)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        background = grid.pick(self._background(grid))
        h, w = self.window.shape[:2]
        row, column = grid.coords(x.device).unbind(-1)
        window = F.embedding(row % h * w + column % w, self.window.flatten(0, 1))
        return add(x, grid, background + window)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": self._background(grid)} if self.sized_by_grid else {}

    def _background(self, grid: Grid) -> Tensor:
        return resample(self.table, (grid.height, grid.width), antialias=self.antialias)

    def extra_repr(self) -> str:
        window, size = (tuple(table.shape[:2]) for table in (self.window, self.table))
        return f"window={window}, size={size}, antialias={self.antialias}"
