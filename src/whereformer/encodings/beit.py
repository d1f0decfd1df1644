from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import LowRankBias, OffsetBias
from whereformer.grid import Grid
from whereformer.resample import Stretch, check_stretch, resample_offsets


class BEiT(PositionEncoding):
    """e_ij = q_i·k_j/√d + B[p_i − p_j], with three more numbers per head for pairs with a class token.

    Bao et al. 2021, as in the released code: Swin's table over the whole image; class -> patch, patch ->
    class, and class -> class each have a number. Where there are more prefix tokens than one, each of them is
    treated as the class token, and a pair of two of them as class -> class. The released models have one such
    table per block, or one for all blocks, which is then the host's to share.

    Args:
        stretch: how the table is read on another grid: "geometric" (the released code, but linear between the
            offsets of the progression, as timm), "bicubic", or "bilinear".

    Shapes: table [heads, 2 height − 1, 2 width − 1], in a video with frames before height; prefix [heads, 3], in
    the order above, if the home grid has prefix tokens. They start at zero.
    """

    formula = "e_ij + B[p_i − p_j], and three numbers for pairs with a class token"
    paper = "Bao et al. 2021, BEiT: BERT Pre-Training of Image Transformers (released code)"
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, stretch: Stretch = "geometric") -> None:
        super().__init__(dim, num_heads, grid)
        check_stretch("BEiT", stretch)
        self.stretch: Stretch = stretch
        self.table = nn.Parameter(torch.empty(num_heads, *(2 * n - 1 for n in grid.size)))
        self.prefix = nn.Parameter(torch.empty(num_heads, 3)) if grid.prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[OffsetBias | LowRankBias]:
        table = self._read(queries, keys)
        yield OffsetBias(table, queries, keys)
        if not queries.prefix and not keys.prefix:
            return
        if self.prefix is None:
            raise InputError(f"BEiT: built for {self.grid}, without numbers for the prefix tokens of {keys}")
        to_patch, to_prefix, among = self.prefix[..., None].unbind(1)  # [h, 1] each
        ours, theirs = _is_prefix(queries, q), _is_prefix(keys, q)
        left = torch.stack([ours, 1 - ours], -1)
        right = torch.stack([(1 - theirs) * to_patch + theirs * among, theirs * to_prefix], -1)
        yield LowRankBias(left[None, None], right[None].to(q.dtype))

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": self._read(grid, grid)}

    def _read(self, queries: Grid, keys: Grid) -> Tensor:
        return resample_offsets(self.table, queries.size, keys.size, stretch=self.stretch)

    def extra_repr(self) -> str:
        return f"table={tuple(self.table.shape)}, stretch={self.stretch!r}"


def _is_prefix(grid: Grid, like: Tensor) -> Tensor:
    """[tokens]: 1 for prefix tokens, 0 for patches."""
    return F.pad(like.new_zeros(grid.patches), (grid.prefix, 0), value=1.0)
