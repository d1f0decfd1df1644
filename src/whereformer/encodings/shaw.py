from collections.abc import Iterator

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import Offsets, check_offsets, clipped, mirrored
from whereformer.errors import InputError, check_bool
from whereformer.forms import BucketBias, BucketValues, Scores
from whereformer.grid import Grid


class Shaw(PositionEncoding):
    """Relative position representations a_ij = w_{clip(j − i, K)}, on keys and on values.

        e_ij = q_i·(k_j + a^K_ij)/√d            z_i = Σ_j softmax_j(e_ij) (v_j + a^V_ij)

    clip(x, K) = max(−K, min(K, x)).   Shaw, Uszkoreit, Vaswani 2018, section 3, eq. 3-4, for sequences. On
    images as in iRPE (Wu et al. 2021, Table 5): a_ij = w_{clip(dy, K), clip(dx, K)}, and all pairs with a prefix
    token share one more row, the last.

    The offset is key − query, as in the paper; iRPE's eq. 7-9 write query − key, a mirrored table.

    Args:
        on: "kv", or "k" or "v" alone (iRPE's Table 5 counts "k").
        offsets: "product" for (dy, dx), or "raster" for the paper's offset along a sequence, of the patches in
            row-by-row order.
        clip: K, in patches; 3 for "product" (49 offsets, as in iRPE) and 16 for "raster" (the paper) if None.
        shared: one table for all heads (section 3.3), or one each (the paper's base model).

    Shapes: tables.k, tables.v [1 or heads, (2 K + 1)² or 2 K + 1, + 1 if there are prefix tokens, d], from −K on.
    They start Xavier-uniform.
    """

    formula = "e_ij + q_i·w^K_{clip(p_j − p_i)}/√d; z_i + Σ_j a_ij w^V_{clip(p_j − p_i)}"
    paper = "Shaw, Uszkoreit, Vaswani 2018, Self-Attention with Relative Position Representations, eq. 3-4"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        on: str = "kv",
        offsets: Offsets = "product",
        clip: int | None = None,
        shared: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("Shaw: shared", shared)
        if on not in ("k", "v", "kv"):
            raise InputError(f"Shaw: on={on!r}, expected 'k', 'v' or 'kv'")
        check_offsets("Shaw", offsets, clip)
        self.on = on
        self.offsets: Offsets = offsets
        self.clip = clip or {"product": 3, "raster": 16}[offsets]
        self.shared = shared
        rows = clipped(offsets, self.clip, grid, grid).count
        heads = 1 if shared else num_heads
        self.tables = nn.ParameterDict({side: torch.empty(heads, rows, self.head_dim) for side in on})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.tables.values():
            for head in table:
                nn.init.xavier_uniform_(head)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[BucketBias]:
        if "k" in self.on:
            buckets = clipped(self.offsets, self.clip, queries, keys)
            table = mirrored(self.tables["k"], buckets.mapping.count)
            yield BucketBias(Scores(q, table.mT, self.head_dim**-0.5), buckets)

    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterator[BucketValues]:
        if "v" in self.on:
            buckets = clipped(self.offsets, self.clip, queries, keys)
            yield BucketValues(mirrored(self.tables["v"], buckets.mapping.count), buckets)

    def moments(self) -> tuple[str, ...]:
        return ("biases",) * ("k" in self.on) + ("values",) * ("v" in self.on)

    def macs(self, grid: Grid) -> int:
        return len(self.on) * grid.tokens * self.dim * self.tables[self.on[0]].shape[1]

    def extra_repr(self) -> str:
        return f"on={self.on!r}, offsets={self.offsets!r}, clip={self.clip}, shared={self.shared}"
