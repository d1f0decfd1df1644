import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import check_positive
from whereformer.forms import OffsetBias
from whereformer.grid import Grid
from whereformer.resample import Stretch, check_stretch, resample_offsets


class MaxViT(PositionEncoding):
    """e_ij = q_i·k_j/√d + B[p_j − p_i]: one learned number per head and offset, key − query.

    Tu et al. 2022, section 3.1 and appendix A.1, relative attention as in CoAtNet. As in Swin, but the released
    code counts offsets from the query to the key, and starts from a normal distribution that is not truncated.
    (torchvision's MaxViT counts from the key to the query, as `Swin` here; it also scales q·k by the square root
    of all features of a token instead of those of a head.)

    Args:
        std: of the normal distribution the table starts from.
        stretch: how the table is read on another grid: "bicubic", "bilinear", or "geometric" (timm's).

    Shapes: table [heads, 2 height − 1, 2 width − 1]. Offset 0 is in the middle.
    """

    formula = "e_ij + B[p_j − p_i]"
    paper = "Tu et al. 2022, MaxViT: Multi-Axis Vision Transformer, section 3.1, appendix A.1"
    axes = (2, 3)

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, std: float = 0.02, stretch: Stretch = "bicubic"
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_positive("MaxViT: std", std)
        check_stretch("MaxViT", stretch)
        self.std = std
        self.stretch: Stretch = stretch
        self.table = nn.Parameter(torch.empty(num_heads, *(2 * n - 1 for n in grid.size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias]:
        return (OffsetBias(self._read(queries, keys), queries, keys),)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": _mirrored(self._read(grid, grid))}

    def _read(self, queries: Grid, keys: Grid) -> Tensor:
        """[heads, offsets, offsets], of query − key."""
        return resample_offsets(_mirrored(self.table), queries.size, keys.size, stretch=self.stretch)

    def extra_repr(self) -> str:
        return f"table={tuple(self.table.shape)}, stretch={self.stretch!r}"


def _mirrored(table: Tensor) -> Tensor:
    return table.flip(tuple(range(1, table.ndim)))
