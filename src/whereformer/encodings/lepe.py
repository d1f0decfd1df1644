from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.depthwise import check_kernel_size, depthwise
from whereformer.forms import AddedValues
from whereformer.grid import Grid


class LePE(PositionEncoding):
    """Z = softmax(Q Kᵀ / √d) V + DWConv_k(V) on the grid of patches, zero padded.   CSWin Transformer, LePE.

    The convolution sees the values of all heads, each channel alone. In attention within windows it sees a window
    at a time, as CSWin has it (give `attention` the windows' grid); in attention over the image, the image (RMT).
    Prefix tokens get nothing added and are not seen. A patch that was dropped is zeros to its neighbours.

    Args:
        kernel_size: k, odd; 3 in CSWin, 5 in RMT (Fan et al. 2024).

    Shapes: weight [dim, 1, k, k], videos [dim, 1, k, k, k]; bias [dim].
    Start: uniform in ± 1 / sqrt(k²), videos 1 / sqrt(k³) (torch's convolutions, left as they are by both codes).
    """

    formula = "Σ_j a_ij v_j + DWConv_k(V)_i"
    paper = "Dong et al. 2022, CSWin Transformer, Locally-enhanced Positional Encoding"
    axes = (2, 3)
    crosses = False

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, kernel_size: int = 3) -> None:
        super().__init__(dim, num_heads, grid)
        check_kernel_size("LePE", kernel_size)
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(dim, 1, *[kernel_size] * grid.axes))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight[0].numel() ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterator[AddedValues]:
        here = depthwise(v.transpose(1, 2).flatten(2), keys, self.weight, self.bias)
        here = F.pad(here, (0, 0, keys.prefix, 0))
        yield AddedValues(here.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2))

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.weight.numel()

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"
