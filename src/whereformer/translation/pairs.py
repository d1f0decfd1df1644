"""The pairs of tokens of a grid, each kind of pair once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from whereformer.grid import Grid


@dataclass(frozen=True)
class Pairs:
    """Some queries against all keys of a grid, such that each pair of its tokens is like one of theirs.

    Args:
        queries: where these queries are.
        keys: the grid.
        like: [keys.tokens, keys.tokens], int64: which of theirs, query by query, each pair of tokens is like.
    """

    queries: Grid
    keys: Grid
    like: Tensor

    @classmethod
    def by_offset(cls, grid: Grid) -> "Pairs":
        """Patches that are as far apart are alike: those in the corners see every offset there is.

        >>> Pairs.by_offset(Grid(1, 3)).like.tolist()
        [[0, 1, 2], [4, 0, 1], [3, 4, 0]]
        """
        size, at = grid.size, grid.coords()
        corners = torch.arange(grid.patches).reshape(size)
        for axis, n in enumerate(size):
            corners = corners.index_select(axis, torch.tensor([0, n - 1]))
        corners, kind = corners.flatten().unique(return_inverse=True)  # fewer where an axis has one patch
        offset = at[:, None] - at
        beyond = (offset > 0).long()  # which corner, axis by axis: the last patch where the key comes before
        strides = torch.tensor([2 ** (len(size) - 1 - a) for a in range(len(size))])
        corner = kind[(beyond * strides).sum(-1)]
        key = beyond * (torch.tensor(size) - 1) - offset
        raster = torch.zeros_like(corner)
        for a, n in enumerate(size):
            raster = raster * n + key[..., a]
        prefix, tokens = grid.prefix, grid.tokens
        like = torch.arange(tokens).repeat(tokens, 1)  # a patch with a prefix token is like the first corner
        like[:prefix] += torch.arange(prefix)[:, None] * tokens
        like[prefix:] += prefix * tokens
        like[prefix:, prefix:] = (prefix + corner) * tokens + prefix + raster
        return cls(grid.keep(corners[None]), grid, like)

    @classmethod
    def whole(cls, grid: Grid) -> "Pairs":
        """No two pairs are alike."""
        return cls(grid, grid, torch.arange(grid.tokens**2).reshape(grid.tokens, -1))

    @property
    def count(self) -> int:
        return self.queries.tokens * self.keys.tokens

    def weights(self) -> Tensor:
        """Which share of all pairs of the grid is like each: [count], float64."""
        return torch.bincount(self.like.flatten(), minlength=self.count).double() / self.like.numel()

    def rows(self) -> Tensor:
        """How many keys of each query of the grid are in each pair: [tokens, count], float64, sparse."""
        tokens = self.like.shape[0]
        query = torch.arange(tokens).repeat_interleave(tokens)
        ones = torch.ones(tokens * tokens, dtype=torch.float64)
        return torch.sparse_coo_tensor(
            torch.stack([query, self.like.flatten()]), ones, (tokens, self.count), check_invariants=False
        ).coalesce()
