import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import check_positive
from whereformer.forms import OffsetBias
from whereformer.grid import Grid
from whereformer.resample import Stretch, check_stretch, resample_offsets


class Swin(PositionEncoding):
    """e_ij = q_i·k_j/√d + B[p_i − p_j]: one learned number per head and offset.

    Liu et al. 2021, section 3.2, eq. 4; in a video as in Video Swin (Liu et al. 2022). In the paper the home
    grid is a window of M x M patches, whence (2M − 1)² offsets. On another grid the table is stretched over
    it. Pairs with a prefix token get 0.

    Args:
        std: of the truncated normal the table starts from.
        stretch: "bicubic" (the released code), "bilinear", or "geometric" (that of BEiT, and timm's).

    Shapes: table [heads, 2 height − 1, 2 width − 1], in a video with frames before height. Offset 0 is in the
    middle.
    """

    formula = "e_ij + B[p_i − p_j]"
    paper = "Liu et al. 2021, Swin Transformer, section 3.2, eq. 4"
    steady = True
    axes = (2, 3)

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, std: float = 0.02, stretch: Stretch = "bicubic"
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_positive("Swin: std", std)
        check_stretch("Swin", stretch)
        self.std = std
        self.stretch: Stretch = stretch
        self.table = nn.Parameter(torch.empty(num_heads, *(2 * n - 1 for n in grid.size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=self.std)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias]:
        table = self._read(queries, keys)
        return (OffsetBias(table, queries, keys),)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": self._read(grid, grid)}

    def _read(self, queries: Grid, keys: Grid) -> Tensor:
        return resample_offsets(self.table, queries.size, keys.size, stretch=self.stretch)

    def extra_repr(self) -> str:
        return f"table={tuple(self.table.shape)}, stretch={self.stretch!r}"
