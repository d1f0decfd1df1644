from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid


class PEG(PositionEncoding):
    """X' = X + DWConv_k(X) on the grid of patches, zero padded.   CPVT, section 3.3.

    The zeros around the grid are what tells a patch where it is. Prefix tokens pass by. Patches that were dropped
    are zeros to their neighbours.

    Args:
        after: the block, or blocks, after which it stands, counted from 0: 0 is the paper's "position 0",
            (0, 1, 2, 3, 4) its "0-5".
        kernel_size: k, odd.

    Start: normal, std sqrt(2 / k²) (fan-out of a depthwise convolution; Twins' code), bias 0.
    """

    formula = "X + DWConv_k(X)"
    paper = "Chu et al. 2021, Conditional Positional Encodings for Vision Transformers (CPVT), section 3.3"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        after: int | Sequence[int] = 0,
        kernel_size: int = 3,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        self.after = tuple(after) if isinstance(after, Sequence) else (after,)
        if not self.after or any(isinstance(a, bool) or not isinstance(a, int) or a < 0 for a in self.after):
            raise InputError(f"PEG: after={after!r}, expected a block, or blocks, counted from 0")
        if len(set(self.after)) < len(self.after):
            raise InputError(f"PEG: after={after!r} names a block twice")
        if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
            raise InputError(f"PEG: kernel_size={kernel_size!r}, expected an odd positive integer")
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(dim, 1, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=(2 / self.kernel_size**2) ** 0.5)
        nn.init.zeros_(self.bias)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        grid.check(x.shape[1], "x")
        image = grid.lay(x).permute(0, 3, 1, 2)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        here = F.conv2d(image, weight, bias, padding=self.kernel_size // 2, groups=self.dim)
        here = grid.pick(here.permute(0, 2, 3, 1)).to(x.dtype)
        return torch.cat([x[:, : grid.prefix], x[:, grid.prefix :] + here], 1)

    def blocks(self, depth: int) -> Sequence[int]:
        if max(self.after) + 1 >= depth:
            raise InputError(
                f"PEG: after={max(self.after)}, but of {depth} blocks, {max(self.after)} is not followed by one"
            )
        return [after + 1 for after in self.after]

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.dim * self.kernel_size**2

    def extra_repr(self) -> str:
        return f"after={self.after}, kernel_size={self.kernel_size}"
