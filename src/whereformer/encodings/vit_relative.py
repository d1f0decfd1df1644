import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import along_row, read, resized
from whereformer.errors import check_positive
from whereformer.forms import BucketBias
from whereformer.grid import Grid


class ViTRelative(PositionEncoding):
    """e_ij = q_i·(k_j + r_{p_i − p_j})/√d, p the number of a patch in row-by-row order.   ViT, appendix D.4.

    Extra attention, before the softmax, of the content of the queries to embeddings of one-dimensional offsets:
    the end of a row and the start of the next are neighbours. Pairs with a prefix token get nothing.

    The paper does not say whether the extra logits are scaled, nor what is shared: here they are scaled as the
    others are, and the heads of a block share a table. On another grid the table is resized linearly.

    Args:
        std: of the normal distribution that the table starts from.

    Shapes: table [2 N − 1, d] for N patches, the offset 0 in the middle.
    """

    formula = "e_ij + q_i·r_{p_i − p_j}/√d, p = row-by-row number"
    paper = "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, appendix D.4 (relative)"
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, std: float = 0.02) -> None:
        super().__init__(dim, num_heads, grid)
        check_positive("ViTRelative: std", std)
        self.std = std
        self.table = nn.Parameter(torch.empty(2 * grid.as_row().width - 1, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[BucketBias]:
        queries, keys = queries.as_row(), keys.as_row()
        table = resized(self.table, max(queries.width, keys.width)) * self.head_dim**-0.5
        return (read(q, table, along_row(queries, keys)),)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": resized(self.table, grid.as_row().width)}

    def macs(self, grid: Grid) -> int:
        return grid.tokens * self.dim * (2 * grid.patches - 1)
