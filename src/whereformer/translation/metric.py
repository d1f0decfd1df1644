"""How far apart two things are that encodings say."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """‖x‖² = Σ_r w_r x_r², less Σ_i (Σ_r c_ir x_r)² / n³ where something is not seen.

    The latter is the square of each query's mean over its n keys: the norm is that of what is left when every
    query's keys lose their mean. All of it is a mean over n² pairs.

    Args:
        weights: w, [rows], float64.
        unseen: c, [n, rows], sparse, float64: how many keys of query i are in row r; or None.
    """

    weights: Tensor
    unseen: Tensor | None = None

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
        """√w times random signs: what to draw for the diagonal of JᵀMJ, but for what is not seen."""
        return signs * self.weights.sqrt()[:, None]

    def by_head(self, x: Tensor) -> Tensor:
        """‖x‖² of each head: [heads]. Rounding does not make it negative."""
        return (x * self(x)).sum((1, 2)).clamp(min=0)
