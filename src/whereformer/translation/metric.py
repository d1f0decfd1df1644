"""How far apart two things are that encodings say."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Norm(Protocol):
    """‖x‖² = x·M x, of one shape of x."""

    def __call__(self, x: Tensor) -> Tensor:
        """M x, of the shape of x."""
        ...

    def root(self, signs: Tensor) -> Tensor:
        """√w · signs, w the diagonal of M, but for what is not seen: to draw the diagonal of JᵀMJ from."""
        ...


@dataclass(frozen=True)
class Metric:
    """‖x‖² = Σ_r w_r x_r², less Σ_i (Σ_r c_ir x_r)² / n³ where something is not seen.

    The latter is the square of each query's mean over its n keys: the norm is that of what is left when every
    query's keys lose their mean. All of it is a mean over n² pairs.

    Args:
        weights: w, [rows], float64.
        unseen: c, [n, rows], sparse, float64: how many keys of query i are in row r; or None.
        like: with `unseen`: [n, n], int64: in which row each query and key are.
    """

    weights: Tensor
    unseen: Tensor | None = None
    like: Tensor | None = None

    @classmethod
    def even(cls, rows: int, scale: float = 1.0) -> "Metric":
        return cls(torch.full((rows,), scale / rows, dtype=torch.float64))

    def __call__(self, x: Tensor) -> Tensor:
        """M x, of [heads, rows, features], such that ‖x‖² = x·M x."""
        found = x * self.weights[:, None]
        if self.unseen is not None:
            n = self.unseen.shape[0]
            flat = x.transpose(0, 1).flatten(1)
            means = self.unseen.mT @ (self.unseen @ flat) / n**3
            found = found - means.unflatten(1, (x.shape[0], -1)).transpose(0, 1)
        return found

    def root(self, signs: Tensor) -> Tensor:
        return signs * self.weights.sqrt()[:, None]

    def by_head(self, x: Tensor) -> Tensor:
        """‖x‖² of each head: [heads]; query by query, as nothing that is unseen is left to cancel then."""
        if self.like is None:
            return (x * self(x)).sum((1, 2))
        rows = (x[:, row] for row in self.like)
        squares = [(row - row.mean(1, keepdim=True)).square().sum((1, 2)) for row in rows]
        return torch.stack(squares).sum(0) / self.like.numel()
