"""What rotations make of queries and keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.grid import Grid
from whereformer.translation.metric import Metric

DRAWS = 8
"""White queries and keys on which rotations are measured."""


class Turns:
    """(R_i q_i)·(R_j k_j) − q_i·k_j in logits, of white queries at a few places i and white keys at all places j.

    Args:
        grid: where tokens are; some of its patches, if it is a `Points`.
        like: an encoding of that shape.
    """

    def __init__(self, grid: Grid, like: PositionEncoding) -> None:
        self.grid, self.features = grid, like.head_dim
        generator = torch.Generator().manual_seed(1)
        shape = (2, DRAWS, like.num_heads, grid.tokens, like.head_dim)
        self.q, self.k = torch.randn(shape, generator=generator, dtype=torch.float64)
        at = grid.coords().flatten(0, -2)
        middle = (at - at.double().mean(0)).abs().sum(-1).argmin()
        ends = [(at * torch.tensor(signs)).sum(-1).argmin() for signs in _signs(grid.axes)]
        self.at = sorted({0, *(grid.prefix + int(n) for n in (middle, *ends))})
        """Which queries: the first token, the patches in the corners, and the one in the middle."""

    def said(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        """[heads, queries · tokens, draws]."""
        q, k = (turned(x, self.grid, encodings) for x in (self.q, self.k))
        made = (q[..., self.at, :] @ k.mT - self.q[..., self.at, :] @ self.k.mT) * self.features**-0.5
        return made.movedim(0, -1).flatten(1, 2)

    def metric(self) -> Metric:
        return Metric.even(len(self.at) * self.grid.tokens, 1 / DRAWS)

    def windows(self) -> list[Grid]:
        """More and more of the patches, from those in one corner: near ones turn least apart."""
        numbers, found, side = torch.arange(self.grid.patches).reshape(self.grid.size), [], 2
        while side < max(self.grid.size):
            window = numbers
            for axis, n in enumerate(self.grid.size):
                window = window.narrow(axis, 0, min(n, side))
            bare = Grid(self.grid.height, self.grid.width, 0, self.grid.frames)
            found.append(bare.keep(window.flatten()[None]))
            side *= 2
        return found


def turned(x: Tensor, grid: Grid, encodings: Sequence[PositionEncoding]) -> Tensor:
    """What rotations make of queries or keys: [..., heads, tokens, head_dim]."""
    for encoding in encodings:
        for turn in encoding.rotations(grid, x.device):
            x = turn(x)
    return x


def distances(
    grid: Grid, source: Sequence[PositionEncoding], target: Sequence[PositionEncoding]
) -> tuple[Tensor, Tensor]:
    """Mean squares, over all pairs of tokens, of what source and target make of white queries and keys.

    With R and S the two's rotations, Σ_ij ‖R_iᵀR_j − S_iᵀS_j‖² = ‖Σ R_iR_iᵀ‖² + ‖Σ S_iS_iᵀ‖² − 2 ‖Σ R_iS_iᵀ‖².

    Returns:
        what the source says, that is its distance from no rotation, and its distance from the target: [heads].
    """
    like = source[0] if source else target[0]
    one = torch.eye(like.head_dim, dtype=torch.float64)[:, None, None]
    one = one.expand(-1, like.num_heads, grid.tokens, -1)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("uhna,uhnb->hab", a, b).square().sum((-2, -1))

    r, s, plain = (turned(one, grid, encodings) for encodings in (source, target, ()))  # R_n of the unit vectors
    squares = [product(x, x) for x in (r, s, plain)]
    count = like.head_dim * grid.tokens**2
    said = squares[0] + squares[2] - 2 * product(r, plain)
    missed = squares[0] + squares[1] - 2 * product(r, s)
    return said.clamp(min=0) / count, missed.clamp(min=0) / count


def _signs(axes: int) -> list[tuple[int, ...]]:
    """Which way to go for each corner."""
    return [tuple(1 - 2 * (n >> a & 1) for a in range(axes)) for n in range(2**axes)]
