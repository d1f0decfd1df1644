from collections.abc import Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import Exact, near, read, resized
from whereformer.errors import check_one_of
from whereformer.forms import BucketBias, BucketValues
from whereformer.grid import Grid
from whereformer.index import Buckets, Separable

Axis = Literal["height", "width"]


class AxialDeepLab(PositionEncoding):
    """Position-sensitive attention along one axis: queries, keys and values read the offset along it.

        e_ij = (q_i·k_j + q_i·r^q_{i − j} + k_j·r^k_{j − i}) / √d
        z_i  = Σ_j softmax_j(e_ij) (v_j + r^v_{i − j})

    Wang et al. 2020, Axial-DeepLab, sections 3.1 and 3.2, with the offsets as the released code indexes them. The
    paper attends along one axis at a time, and so should you: with `attention(..., mask=encoding.mask(grid))`, or
    with columns (rows) as images of their own. In attention over a whole image, which is not the paper, a query
    reads the offset along the axis to patches of every column (row).

    The paper divides nothing by √d and its code normalises the logits instead: for that, and for queries and keys
    of half the features, see `whereformer.layers.AxialAttention`.

    On another grid than the home the table is resized linearly. Pairs with a prefix token get nothing.

    Args:
        axis: "height" (offsets dy, within columns) or "width" (offsets dx, within rows).

    Shapes: relative [3 d, 2 n − 1], the rows of r^q, r^k and r^v in turn, on an axis of n patches, shared by all
    heads. It starts normal, std 1/√d.
    """

    formula = "e_ij + (q_i·r^q_{i − j} + k_j·r^k_{j − i})/√d; z_i + Σ_j a_ij r^v_{i − j}, along one axis"
    paper = "Wang et al. 2020, Axial-DeepLab: Stand-Alone Axial-Attention for Panoptic Segmentation, section 3"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, axis: Axis = "height") -> None:
        super().__init__(dim, num_heads, grid)
        check_axis("AxialDeepLab", axis)
        self.axis: Axis = axis
        self.relative = nn.Parameter(torch.empty(3 * self.head_dim, 2 * self._patches(grid) - 1))
        self.reset_parameters()

    def _patches(self, grid: Grid) -> int:
        return grid.height if self.axis == "height" else grid.width

    def reset_parameters(self) -> None:
        nn.init.normal_(self.relative, std=self.head_dim**-0.5)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[BucketBias]:
        (r_q, r_k, _), here, there = self._read(queries, keys)
        yield read(q, r_q.mT * self.head_dim**-0.5, here)
        yield read(k, r_k.mT * self.head_dim**-0.5, there, "key")

    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterator[BucketValues]:
        (_, _, r_v), here, _ = self._read(queries, keys)
        yield BucketValues(F.pad(r_v, (0, 1)).mT[None], here)

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {"relative": resized(self.relative.mT, self._patches(grid)).mT}

    def _read(self, queries: Grid, keys: Grid) -> tuple[tuple[Tensor, ...], Buckets, Buckets]:
        for grid in (queries, keys):
            grid.check_whole()
        patches = max(self._patches(queries), self._patches(keys))
        along = Exact(patches)
        mapping = Separable(along, None) if self.axis == "height" else Separable(None, along)
        tables = resized(self.relative.mT, patches).mT.chunk(3)
        return tables, Buckets(mapping, queries, keys), Buckets(mapping, keys, queries)

    def mask(self, grid: Grid, keys: Grid | None = None, device: torch.device | None = None) -> Tensor:
        """Which keys are in line with each query along the axis, prefix tokens with all: [tokens, tokens], bool.

        From `Points`: [b or 1, 1, tokens, tokens].

        >>> AxialDeepLab(8, 2, Grid(2, 2)).mask(Grid(2, 2)).int().tolist()
        [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
        """
        return near(lambda dy, dx: (dx if self.axis == "height" else dy) == 0, grid, keys or grid, device)

    def macs(self, grid: Grid) -> int:
        return 3 * grid.tokens * self.dim * (2 * self._patches(grid) - 1)

    def extra_repr(self) -> str:
        return f"axis={self.axis!r}"


def check_axis(what: str, axis: str) -> None:
    check_one_of(f"{what}: axis", axis, get_args(Axis))
