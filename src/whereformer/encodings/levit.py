import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import check_count
from whereformer.forms import OffsetBias
from whereformer.grid import Grid, Points
from whereformer.resample import Stretch, check_stretch, resample_offsets


class LeViT(PositionEncoding):
    """e_ij = q_i·k_j/√d + B[|y_i − y_j|, |x_i − x_j|]: one learned number per head and undirected offset.

    Graham et al. 2021, "attention bias instead of a positional embedding". LeViT's attention that shrinks has
    its queries on every second row and column of the keys' grid: `stride`. On another grid the table, mirrored
    to all signs, is stretched over it. Pairs with a prefix token get 0.

    Args:
        stride: how many rows and columns of the keys' grid lie between two neighbours of the queries' grid, if
            these are two. The home grid is that of the keys.
        stretch: how the table is read on another grid: "bicubic", "bilinear" or "geometric".

    Shapes: table [heads, height, width], in a video with frames before height. It starts at zero.
    """

    formula = "e_ij + B[|y_i − y_j|, |x_i − x_j|]"
    paper = "Graham et al. 2021, LeViT: a Vision Transformer in ConvNet's Clothing"
    axes = (2, 3)

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, stride: int = 1, stretch: Stretch = "bicubic"
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_count("LeViT: stride", stride)
        check_stretch("LeViT", stretch)
        self.stride = stride
        self.stretch: Stretch = stretch
        self.table = nn.Parameter(torch.empty(num_heads, *grid.size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias]:
        kept = not queries.regular and queries.size == keys.size  # some of the keys' own patches
        if self.stride > 1 and queries is not keys and not kept:
            queries = self._on_keys(queries, q.device)
        return (OffsetBias(self._read(queries, keys), queries, keys),)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        table = self._read(grid, grid)
        for axis, n in enumerate(grid.size, 1):
            table = table.narrow(axis, n - 1, n)
        return {"table": table}

    def _read(self, queries: Grid, keys: Grid) -> Tensor:
        """[heads, offsets, offsets]: the table mirrored to all signs, on two grids."""
        table = self.table
        for axis in range(1, table.ndim):
            table = torch.cat([table.narrow(axis, 1, table.shape[axis] - 1).flip(axis), table], axis)
        return resample_offsets(table, queries.size, keys.size, stretch=self.stretch)

    def _on_keys(self, queries: Grid, device: torch.device) -> Points:
        """Where the queries are, in patches of the keys' grid; each frame shrinks by itself."""
        *frames, height, width = queries.size
        stride = torch.tensor([*(1 for _ in frames), self.stride, self.stride], device=device)
        at = queries.coords(device) * stride
        height, width = (self.stride * (n - 1) + 1 for n in (height, width))
        return Points(height, width, queries.prefix, *frames, at=at[None] if at.ndim == 2 else at)

    def extra_repr(self) -> str:
        return f"table={tuple(self.table.shape)}, stride={self.stride}, stretch={self.stretch!r}"
