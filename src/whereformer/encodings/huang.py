from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import Offsets, check_offsets, clipped, mirrored
from whereformer.errors import InputError, check_bool
from whereformer.forms import Bias, BucketBias, DenseBias, Scores
from whereformer.grid import Grid


class Huang(PositionEncoding):
    """Relative position embeddings a_ij that interact with queries and keys, by one of four methods.

        1   e_ij = (q_i·k_j) a_ij / √d                                      a_ij = w_{|i − j|}, a number
        2   e_ij = (q_i·k_j) a_ij / √d                                      a_ij = w_{i − j}, a number
        3   e_ij = Σ_c q_ic k_jc a_ijc / √d                                 a_ij = w_{i − j}, a vector
        4   e_ij = (q_i·k_j + q_i·a_ij + k_j·a_ij) / √d
                 = ((q_i + a_ij)·(k_j + a_ij) − a_ij·a_ij) / √d             a_ij = w_{i − j}, a vector

    Huang, Liang, Xu, Xiang 2020, section 3.5, for sequences. On images as in iRPE (Wu et al. 2021, eq. 11 and
    Table 5, of method 4): a_ij = w_{clip(dy, K), clip(dx, K)}, and all pairs with a prefix token share one more
    row, the last.

    Methods 1 and 2 multiply q and k once more. Method 3 makes a number for each pair and feature, O(n² d): it is
    for small grids.

    Args:
        method: 1 to 4.
        offsets: "product" for (dy, dx), or "raster" for the paper's offset along a sequence, of the patches in
            row-by-row order.
        clip: K, in patches; if None, 3 for "product" (49 offsets, as in iRPE), and for "raster" every offset of
            the home grid.
        shared: one table for all heads, or one each.

    Shapes: table [1 or heads, rows], for methods 3 and 4 [1 or heads, rows, d]; (2 K + 1)² or 2 K + 1 rows from
    −K on, for method 1 (K + 1)² or K + 1 from 0 on, and 1 more if there are prefix tokens. The factors of methods
    1 to 3 start at 1, attention without positions; method 4 starts normal, std .02.
    """

    formula = "e_ij + (q_i + k_j)·w_{clip(p_i − p_j)}/√d"
    paper = "Huang et al. 2020, Improve Transformer Models with Better Relative Position Embeddings, methods 1-4"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        method: int = 4,
        offsets: Offsets = "product",
        clip: int | None = None,
        shared: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("Huang: shared", shared)
        if isinstance(method, bool) or not isinstance(method, int) or method not in (1, 2, 3, 4):
            raise InputError(f"Huang: method={method!r}, expected one of the paper's, 1 to 4")
        check_offsets("Huang", offsets, clip)
        self.method = method
        self.offsets: Offsets = offsets
        self.sized_by_grid = clip is None and offsets == "raster"
        self.clip = clip or (3 if offsets == "product" else _every(grid))
        self.shared = shared
        buckets = clipped(offsets, self.clip, grid, grid)
        rows = buckets.count
        if method == 1:
            rows += self._distances() - buckets.mapping.count
        self.table = nn.Parameter(torch.empty(1 if shared else num_heads, rows, *[self.head_dim] * (method > 2)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.method == 4:
            nn.init.normal_(self.table, std=0.02)
        else:
            nn.init.ones_(self.table)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[Bias]:
        buckets = clipped(self.offsets, self.clip, queries, keys)
        if self.method == 4:
            table = self.table * self.head_dim**-0.5
            yield BucketBias(Scores(q, table.mT), buckets)
            mirror = mirrored(table, buckets.mapping.count)
            there = clipped(self.offsets, self.clip, keys, queries)
            yield BucketBias(Scores(k, mirror.mT), there, "key")
        elif self.method == 3:
            if self.table.shape[1] < buckets.count:
                raise InputError(f"Huang: built for {self.grid}, without prefix tokens, but queries on {queries}")
            more = ((self.table - 1) * self.head_dim**-0.5).to(q.dtype).transpose(0, 1)  # [rows, heads, d]
            a = F.embedding(buckets.dense(q.device), more.flatten(1)).unflatten(-1, more.shape[1:]).movedim(-2, -4)
            yield DenseBias((q[..., :, None, :] * a * k[..., None, :, :]).sum(-1))
        else:
            more = ((self.table - 1) * self.head_dim**-0.5).to(q.dtype)
            if self.method == 1:
                more = self._undirected(more)
            yield DenseBias(q @ k.mT * BucketBias(more[None, :, None], buckets).dense())

    def _undirected(self, factors: Tensor) -> Tensor:
        """Method 1's factors [heads, distances] at each offset."""
        distance = torch.arange(-self.clip, self.clip + 1, device=factors.device).abs()
        if self.offsets == "product":
            distance = (distance[:, None] * (self.clip + 1) + distance).flatten()
        rest = factors.shape[-1] - self._distances()
        return factors.index_select(-1, F.pad(distance, (0, rest), value=self._distances()))

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        """Farther offsets than there were read the last row of their side."""
        if not self.sized_by_grid:
            return {}
        first = 0 if self.method == 1 else -_every(grid)
        offset = torch.arange(first, _every(grid) + 1, device=self.table.device).clamp(-self.clip, self.clip)
        rows = offset if self.method == 1 else offset + self.clip
        prefix = self.table[:, self._distances() if self.method == 1 else 2 * self.clip + 1 :]
        return {"table": torch.cat([self.table[:, rows], prefix], 1)}

    def resize(self, grid: Grid) -> Self:
        super().resize(grid)
        if self.sized_by_grid:
            self.clip = _every(grid)
        return self

    def _distances(self) -> int:
        return (self.clip + 1) ** (2 if self.offsets == "product" else 1)

    def macs(self, grid: Grid) -> int:
        pairs = grid.tokens**2
        if self.method == 4:
            return 2 * grid.tokens * self.dim * self.table.shape[1]
        return 2 * pairs * self.dim if self.method == 3 else pairs * (self.dim + self.num_heads)

    def extra_repr(self) -> str:
        said = ("method", "offsets", "clip", "shared")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)


def _every(grid: Grid) -> int:
    """The clip that leaves every offset of the patches' numbers as it is."""
    return max(grid.patches - 1, 1)
