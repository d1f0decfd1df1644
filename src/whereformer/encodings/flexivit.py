from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import add, check_size
from whereformer.errors import check_positive
from whereformer.grid import Grid
from whereformer.resample import resample


class FlexiViT(PositionEncoding):
    """x_n += resize(E, (H, W))_n, E a learned table of a size of its own, resized linearly to each image's grid.

    The home grid leaves no trace. FlexiViT's E is 7 × 7; SigLIP 2 NaFlex is `size=(16, 16)`, for images of any
    height and width. Prefix tokens get nothing added (FlexiViT adds its class token afterwards).

    Args:
        size: height and width of E.
        antialias: widen the triangle when shrinking, as the released code of both does (jax.image.resize); timm's
            FlexiViT does not, which differs only on grids smaller than E.
        std: of the normal that E starts from; None: dim^(−1/2), as in the released code.

    Shapes: table [height, width, dim].
    """

    formula = "x_n + resize(E, (H, W))_n, E 7 × 7"
    paper = "Beyer et al. 2023, FlexiViT: One Model for All Patch Sizes; Tschannen et al. 2025, SigLIP 2 (NaFlex)"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        size: Sequence[int] = (7, 7),
        antialias: bool = True,
        std: float | None = None,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_size("FlexiViT: size", size)
        self.std: float = dim**-0.5 if std is None else std
        check_positive("FlexiViT: std", self.std)
        self.antialias = antialias
        self.table = nn.Parameter(torch.empty(*size, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        image = resample(self.table, (grid.height, grid.width), mode="bilinear", antialias=self.antialias)
        return add(x, grid, grid.pick(image))

    def extra_repr(self) -> str:
        return f"size={tuple(self.table.shape[:2])}, antialias={self.antialias}"
