import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError, check_one_of
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid

Method = Literal["sum", "product", "raster"]


class T5(PositionEncoding):
    """e_ij = q_i·k_j/√d + Σ_axes r[I(p_j − p_i)]: one learned number per head and bucket I of an offset.

    I(x), of key − query, counts one by one up to a quarter of the buckets, then in steps that grow with log x
    up to `farthest`, beyond which all share the last; half of the buckets are for x > 0. With B buckets,

        I(x) = B/2 [x > 0] + |x|                                                            if |x| < B/4
        I(x) = B/2 [x > 0] + min(B/2 − 1, int(B/4 + B/4 ln(4 |x| / B) / ln(4 farthest / B)))     otherwise

    Raffel et al. 2020, section 2.1, and the released code; of texts. Logarithms are in float32 there and here:
    what they give at whole steps is part of the encoding. T5 does not divide q·k by √d, and all its blocks
    share the first one's table: both are the host's to do. Pairs with a prefix token get 0.

    Args:
        method: how the offset of two patches makes a bucket: "sum", the numbers of its axes' buckets add up;
            "product", each pair of axes' buckets has a number; "raster", as in a text of patches row by row.
        buckets: B, a multiple of 4.
        farthest: in patches, more than B/4.

    Shapes: table [axes, heads, B] for "sum", [heads, B, B] for "product" (one B more in a video), [heads, B] for
    "raster". They start normal, of std D^(−1/2).

    >>> t5_bucket(torch.tensor([0, -1, 1, -8, 8, -128, 128]), 32, 128).tolist()
    [0, 1, 17, 8, 24, 15, 31]
    """

    formula = "e_ij + Σ_axes r[I(p_j − p_i)], I logarithmic from a quarter of its buckets on"
    paper = "Raffel et al. 2020, Exploring the Limits of Transfer Learning (T5), section 2.1"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        method: Method = "sum",
        buckets: int = 32,
        farthest: int = 128,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_one_of("T5: method", method, get_args(Method))
        if not isinstance(buckets, int) or isinstance(buckets, bool) or buckets < 4 or buckets % 4:
            raise InputError(f"T5: buckets={buckets!r}, expected a positive multiple of 4")
        if not isinstance(farthest, int | float) or isinstance(farthest, bool) or farthest <= buckets // 4:
            raise InputError(f"T5: farthest={farthest!r}, expected a number above buckets / 4 = {buckets // 4}")
        self.method: Method = method
        self.buckets = buckets
        self.farthest = farthest
        shapes = {
            "sum": (grid.axes, num_heads, buckets),
            "product": (num_heads, *[buckets] * grid.axes),
            "raster": (num_heads, buckets),
        }
        self.table = nn.Parameter(torch.empty(shapes[method]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.dim**-0.5)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        if self.method == "raster":
            queries, keys = queries.as_row(q.device), keys.as_row(q.device)
        return (OffsetBias.of(self._bias, queries, keys, q.device),)

    def _bias(self, offsets: Tensor) -> Tensor:
        at = t5_bucket(-offsets, self.buckets, self.farthest).unbind(-1)
        match self.method:
            case "sum":
                return torch.stack([table[:, t] for table, t in zip(self.table, at, strict=True)]).sum(0)
            case "product":
                return self.table[(slice(None), *at)]
            case "raster":
                return self.table[:, at[-1]]

    def extra_repr(self) -> str:
        return f"method={self.method!r}, buckets={self.buckets}, farthest={self.farthest}"


def t5_bucket(offset: Tensor, buckets: int, farthest: float) -> Tensor:
    """I(x), of key − query, whole or not: int64."""
    side, near = buckets // 2, buckets // 4
    size = offset.abs()
    far = (size.clamp(min=1).float() / near).log() / math.log(farthest / near) * (side - near)
    far = (near + far.long()).clamp(max=side - 1)
    return torch.where(size < near, size.long(), far) + side * (offset > 0)
