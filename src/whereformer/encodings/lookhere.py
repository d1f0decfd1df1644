import math
from itertools import groupby

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError, check_positive
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid

FORBIDDEN = -1024.0
"""What stands for −∞: its power is 0 in every dtype; finite, as a mask may leave nothing else to attend to."""

VIEWS = {
    "none": ("all",) * 4,
    "halves": ("up", "down", "left", "right"),
    "corners": ("up left", "up right", "down left", "down right"),
    "triangles": ("tri_up", "tri_down", "tri_left", "tri_right"),
    "diagonals": ("tri_up|tri_right", "tri_up|tri_left", "tri_down|tri_right", "tri_down|tri_left"),
    "eighths1": ("tri_up left", "tri_down left", "tri_left up", "tri_right up"),
    "eighths2": ("tri_up right", "tri_down right", "tri_left down", "tri_right down"),
}
"""The fields of view of four heads each."""


class LookHere(PositionEncoding):
    """e_ij = q_i·k_j/√d − g m_l m_h |p_i − p_j|, and −∞ for keys j outside of the field of view of head h.

    Fuller et al. 2024, section 3, and the released code. Heads look in fixed directions, four by four, always
    at their own patch too; heads of "none" look everywhere. m_h is 2⁻¹ for the first four of heads in a row
    that look alike, 2⁻² for the next four, and so on; 4⁻¹ ... 4⁻⁴ for those that look everywhere. m_l falls
    evenly from the first layer to the last. For −∞ there is −1024. Pairs with a prefix token get 0.

    The paper has 12 heads, the code 6, 12 and 16: with more groups of four heads than kinds of `views`, the
    first kind takes those left over; with fewer, the last kinds have none. Other numbers of heads are divided
    by the same rule.

    Args:
        views: kinds of fields of view, joined by hyphens: "halves" (180 degrees), "corners", "triangles" (90),
            "eighths1", "eighths2" (45), "diagonals", "none". The paper's LH-90 is "corners-triangles-none".
        slope: g.
        layer_slopes: m_l of the first layer and of the last.
        layer, depth: l, counted from 0, and how many layers there are. `equip` tells them by itself.
    """

    formula = "e_ij − g m_l m_h |p_i − p_j|, −∞ outside of the head's field of view"
    paper = "Fuller et al. 2024, LookHere: Vision Transformers with Directed Attention, section 3"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        views: str = "corners-triangles-none",
        slope: float = 2.0,
        layer_slopes: tuple[float, float] = (1.5, 0.5),
        layer: int | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        kinds = views.split("-") if isinstance(views, str) else []
        if not kinds or not set(kinds) <= VIEWS.keys():
            raise InputError(f"LookHere: views={views!r}, expected some of {list(VIEWS)}, joined by hyphens")
        check_positive("LookHere: slope", slope)
        if not isinstance(layer_slopes, tuple | list) or len(layer_slopes) != 2:
            raise InputError(f"LookHere: layer_slopes={layer_slopes!r}, expected two numbers")
        if (layer is None) != (depth is None) or (layer is not None and not 0 <= layer < (depth or 0)):
            raise InputError(
                f"LookHere: layer={layer!r} of depth={depth!r}, expected 0 <= layer < depth, or neither"
            )
        self.views = views
        self.slope = slope
        self.layer_slopes = layer_slopes
        self.layer = layer
        self.depth = depth
        self.heads = _heads(kinds, num_heads)

    def at_block(self, block: int, depth: int) -> None:
        if self.layer is None:
            self.layer, self.depth = block, depth

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        if self.layer is None or self.depth is None:
            raise InputError(
                "LookHere: which layer is it? Expected layer= and depth=, or a model given to `equip`"
            )
        first, last = self.layer_slopes
        slope = self.slope * (first + (last - first) * self.layer / max(1, self.depth - 1))
        dtype = torch.promote_types(q.dtype, torch.float32)

        def bias(offsets: Tensor) -> Tensor:
            length = torch.linalg.vector_norm(offsets.to(dtype), dim=-1)
            return torch.stack(
                [
                    torch.where(_sees(view, *offsets.unbind(-1)), -slope * m * length, FORBIDDEN)
                    for view, m in self.heads
                ]
            )

        return (OffsetBias.of(bias, queries, keys, q.device),)

    def extra_repr(self) -> str:
        return f"views={self.views!r}, layer={self.layer}, depth={self.depth}"


def _heads(kinds: list[str], heads: int) -> list[tuple[str, float]]:
    """The field of view of each head, and m_h."""
    groups = max(len(kinds), math.ceil(heads / 4))
    times, rest = divmod(groups, len(kinds))
    names = [kind for i, kind in enumerate(kinds) for _ in range(4 * (times + rest * (i == 0)))]
    found = []
    for kind, run in groupby(names[:heads]):
        count = len(list(run))
        for n in range(count):
            m = 4.0 ** -(1 + n * 4 // max(4, count)) if kind == "none" else 2.0 ** -(1 + n // 4)
            found.append((VIEWS[kind][n % 4], m))
    return found


def _sees(view: str, dy: Tensor, dx: Tensor) -> Tensor:
    """Whether a query looking that way sees keys at these offsets, query − key."""
    sees = {
        "all": dy == dy,
        "up": dy >= 0,
        "down": dy <= 0,
        "left": dx >= 0,
        "right": dx <= 0,
        "tri_up": dy >= dx.abs(),
        "tri_down": -dy >= dx.abs(),
        "tri_left": dx >= dy.abs(),
        "tri_right": -dx >= dy.abs(),
    }
    if "|" in view:
        one, other = view.split("|")
        return sees[one] | sees[other]
    found = sees["all"]
    for part in view.split():
        found = found & sees[part]
    return found
