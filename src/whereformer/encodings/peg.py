from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.depthwise import check_kernel_size, depthwise
from whereformer.errors import InputError, check_bool
from whereformer.grid import Grid


class PEG(PositionEncoding):
    """X' = X + DWConv_k(X) on the grid of patches, zero padded.   CPVT.

    The zeros around the grid are what tells a patch where it is. Prefix tokens pass by. A patch that was dropped
    is zeros to its neighbours, as what lies beyond the edge is: each hole is a little edge.

    On videos the convolution has a third axis, time: the dynamic position embedding (DPE) of UniFormer (Li et al.
    2022), which stands before every block: after=(-1, 0, ..., depth - 2).

    Args:
        after: the block, or blocks, after which it stands, counted from 0: 0 is the paper's "position 0",
            (0, 1, 2, 3, 4) its "0-5", -1 its "position -1", before all blocks.
        kernel_size: k, odd.
        bias: of the convolution: the paper's listing, Twins and UniFormer have one; its count of 1,728 numbers for
            CPVT-Ti has none.

    Shapes: weight [dim, 1, k, k], videos [dim, 1, k, k, k]; bias [dim].
    Start: normal, std sqrt(2 / k²), videos sqrt(2 / k³) (fan-out of a depthwise convolution; Twins' code), bias 0.
    """

    formula = "X + DWConv_k(X)"
    paper = "Chu et al. 2021, Conditional Positional Encodings for Vision Transformers (CPVT)"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        after: int | Sequence[int] = 0,
        kernel_size: int = 3,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("PEG: bias", bias)
        found = (after,) if isinstance(after, int) else after
        self.after = tuple(found) if isinstance(found, tuple | list | range) else ()
        if not self.after or any(isinstance(a, bool) or not isinstance(a, int) or a < -1 for a in self.after):
            raise InputError(f"PEG: after={after!r}, expected a block, or blocks, counted from 0, or -1")
        if len(set(self.after)) < len(self.after):
            raise InputError(f"PEG: after={after!r} names a block twice")
        check_kernel_size("PEG", kernel_size)
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(dim, 1, *[kernel_size] * grid.axes))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=(2 / self.weight[0].numel()) ** 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        here = depthwise(x, grid, self.weight, self.bias)
        return torch.cat([x[:, : grid.prefix], x[:, grid.prefix :] + here], 1)

    def blocks(self, depth: int) -> Sequence[int]:
        if max(self.after) + 1 >= depth:
            raise InputError(
                f"PEG: after={max(self.after)}, but of {depth} blocks, {max(self.after)} is not followed by one"
            )
        return [after + 1 for after in self.after]

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.weight.numel()

    def extra_repr(self) -> str:
        without = ", bias=False" if self.bias is None else ""
        return f"after={self.after}, kernel_size={self.kernel_size}{without}"
