import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid
from whereformer.resample import without_autocast


class DPB(PositionEncoding):
    """e_ij = q_i·k_j/√d + DPB(p_i − p_j): an MLP makes the bias of a head from the offset, in patches.

    CrossFormer's dynamic position bias. Wang et al. 2022: a linear layer axes -> width, then three times
    LayerNorm, ReLU and a linear layer, the last of them to the heads. It serves every grid. Pairs with a prefix
    token get 0.

    Args:
        width: features between the layers: by default D/4, as in vit-pytorch; the released models have D/16 (their
            code divides D by 4 twice).

    Shapes: linear[0] axes -> width, linear[1] and linear[2] width -> width, linear[3] width -> heads, each with a
    bias; norm[0] to norm[2], of width. Weights start truncated normal, of std .02, biases at zero.
    """

    formula = "e_ij + MLP(p_i − p_j)"
    paper = "Wang et al. 2022, CrossFormer: a Versatile Vision Transformer"
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, width: int | None = None) -> None:
        super().__init__(dim, num_heads, grid)
        width = dim // 4 if width is None else width
        if not isinstance(width, int) or isinstance(width, bool) or width < 2:
            raise InputError(f"DPB: width={width!r}, expected an integer of at least 2, for LayerNorm")
        self.width = width
        self.linear = nn.ModuleList(
            nn.Linear(n, m) for n, m in ((grid.axes, width), (width, width), (width, width), (width, num_heads))
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.linear:
            nn.init.trunc_normal_(layer.get_parameter("weight"), std=0.02)
            nn.init.zeros_(layer.get_parameter("bias"))
        for layer in self.norm:
            nn.init.ones_(layer.get_parameter("weight"))
            nn.init.zeros_(layer.get_parameter("bias"))

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        dtype = torch.promote_types(q.dtype, torch.float32)

        def read(layer: nn.Module) -> tuple[Tensor, Tensor]:
            return layer.get_parameter("weight").to(dtype), layer.get_parameter("bias").to(dtype)

        def bias(offsets: Tensor) -> Tensor:
            first, *later = self.linear
            x = F.linear(offsets.to(dtype), *read(first))
            for norm, layer in zip(self.norm, later, strict=True):
                x = F.linear(F.layer_norm(x, (self.width,), *read(norm)).relu(), *read(layer))
            return x.movedim(-1, 0)

        with without_autocast(q.device):
            return (OffsetBias.of(bias, queries, keys, q.device),)

    def macs(self, grid: Grid) -> int:
        offsets = math.prod(2 * n - 1 for n in grid.size)
        return offsets * self.width * (grid.axes + 2 * self.width + self.num_heads)

    def extra_repr(self) -> str:
        return f"width={self.width}"
