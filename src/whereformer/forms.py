"""What an encoding says to attention, as data; each form states its dense meaning.

Axes: b batch, h heads, i queries, j keys, c feature pairs, d features of a head. An axis of size one in b, h or
i is broadcast. Offsets are query minus key, in patches.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.index import Buckets


class Bias(Protocol):
    """A term of the logits."""

    def dense(self) -> Tensor:
        """The term, broadcastable to [b, h, i, j]."""
        ...


class Values(Protocol):
    """A term of the output."""

    def dense(self, weights: Tensor) -> Tensor:
        """The term [b, h, i, d], given the attention weights [b, h, i, j]."""
        ...


@dataclass(frozen=True, eq=False)
class Rotation:
    """Turn feature pairs: (x₁, x₂) -> (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ), θ = angles[h, n, c].

    Args:
        angles: [h, patches, c], in radians, c <= d / 2. Prefix tokens, which come first, and features beyond
            the first 2 c are left as they are.
        layout: which features make a pair: "interleaved" (2 c, 2 c + 1) or "half" (c, c + pairs).
    """

    angles: Tensor
    layout: Literal["interleaved", "half"] = "interleaved"

    def __post_init__(self) -> None:
        if self.layout not in ("interleaved", "half"):
            raise InputError(f"Rotation: layout={self.layout!r}, expected 'interleaved' or 'half'")
        if self.angles.ndim != 3:
            raise InputError(f"Rotation: angles {tuple(self.angles.shape)}, expected [heads, patches, pairs]")

    def __call__(self, x: Tensor) -> Tensor:
        """[b, h, tokens, d] -> the same."""
        patches, pairs = self.angles.shape[-2:]
        if x.shape[-2] < patches or x.shape[-1] < 2 * pairs:
            raise InputError(f"Rotation: angles {tuple(self.angles.shape)} do not fit features {tuple(x.shape)}")
        prefix = x.shape[-2] - patches
        turned, rest = x[..., prefix:, : 2 * pairs], x[..., prefix:, 2 * pairs :]
        cos, sin = self.angles.cos().to(x.dtype), self.angles.sin().to(x.dtype)
        if self.layout == "half":
            first, second = turned.chunk(2, -1)
            turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
        else:
            first, second = turned.unflatten(-1, (pairs, 2)).unbind(-1)
            turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
        return torch.cat([x[..., :prefix, :], torch.cat([turned, rest], -1)], -2)


@dataclass(frozen=True, eq=False)
class OffsetBias:
    """bias[h, i, j] = table[h, dy + keys.height − 1, dx + keys.width − 1]; 0 for pairs with a prefix token.

    Args:
        table: [h, queries.height + keys.height − 1, queries.width + keys.width − 1].
    """

    table: Tensor
    queries: Grid
    keys: Grid

    def __post_init__(self) -> None:
        size = (self.queries.height + self.keys.height - 1, self.queries.width + self.keys.width - 1)
        if self.table.ndim != 3 or tuple(self.table.shape[1:]) != size:
            found = tuple(self.table.shape)
            raise InputError(f"OffsetBias: table {found}, expected [heads, {size[0]}, {size[1]}]")

    def dense(self) -> Tensor:
        dy, dx = self.queries.offsets(self.keys, self.table.device)
        index = (dy + self.keys.height - 1) * self.table.shape[-1] + dx + self.keys.width - 1
        index = index.reshape(self.queries.patches, self.keys.patches)
        bias = F.embedding(index, self.table.flatten(1).mT).permute(2, 0, 1)
        return F.pad(bias, (self.keys.prefix, 0, self.queries.prefix, 0))


@dataclass(frozen=True, eq=False)
class BucketBias:
    """bias[b, h, i, j] = scores[b, h, i, bucket(i, j)].

    With `side="key"` the key reads: bias[b, h, i, j] = scores[b, h, j, bucket(j, i)], `buckets` then being those
    of keys against queries.

    Args:
        scores: [b, h, i (or j on the key's side), buckets].
    """

    scores: Tensor
    buckets: Buckets
    side: Literal["query", "key"] = "query"

    def __post_init__(self) -> None:
        if self.side not in ("query", "key"):
            raise InputError(f"BucketBias: side={self.side!r}, expected 'query' or 'key'")
        _check_count("BucketBias: scores", self.scores.shape[-1], self.buckets)

    def dense(self) -> Tensor:
        index = self.buckets.dense(self.scores.device)
        batch, heads, _, count = self.scores.shape
        scores = self.scores.expand(batch, heads, index.shape[0], count)
        bias = scores.gather(-1, index.expand(batch, heads, -1, -1))
        return bias if self.side == "query" else bias.mT


@dataclass(frozen=True, eq=False)
class AxisBias:
    """bias[b, h, i, j] = rows[b, h, i, y_j] + columns[b, h, i, x_j]; 0 for prefix keys.

    Args:
        rows: [b, h, i, keys.height].
        columns: [b, h, i, keys.width].
    """

    rows: Tensor
    columns: Tensor
    keys: Grid

    def __post_init__(self) -> None:
        found = (self.rows.shape[-1], self.columns.shape[-1])
        if found != (self.keys.height, self.keys.width):
            raise InputError(f"AxisBias: {found[0]} rows and {found[1]} columns, but the keys lie on {self.keys}")

    def dense(self) -> Tensor:
        bias = (self.rows[..., :, None] + self.columns[..., None, :]).flatten(-2)
        return F.pad(bias, (self.keys.prefix, 0))


@dataclass(frozen=True, eq=False)
class LowRankBias:
    """bias[b, h, i, j] = left_i · right_j.

    Args:
        left: [b, h, i, rank].
        right: [b, h, j, rank].
    """

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        return self.left @ self.right.mT


@dataclass(frozen=True, eq=False)
class DenseBias:
    """bias = tensor, broadcastable to [b, h, i, j]: for what no other form can say."""

    tensor: Tensor

    def dense(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True, eq=False)
class BucketValues:
    """out[b, h, i] += Σ_j a[b, h, i, j] table[h, bucket(i, j)], weights summed per bucket first: O(n k d).

    Args:
        table: [h, buckets, d].
    """

    table: Tensor
    buckets: Buckets

    def __post_init__(self) -> None:
        _check_count("BucketValues: table", self.table.shape[-2], self.buckets)

    def dense(self, weights: Tensor) -> Tensor:
        index = self.buckets.dense(weights.device).expand_as(weights)
        exact = torch.promote_types(weights.dtype, torch.float32)
        sums = weights.new_zeros(*weights.shape[:-1], self.table.shape[-2], dtype=exact)
        sums = sums.scatter_add(-1, index, weights.to(exact)).to(weights.dtype)
        return sums @ self.table.to(weights.dtype)


@dataclass(frozen=True, eq=False)
class AddedValues:
    """out[b, h, i] += term[b, h, i].

    Args:
        term: [b, h, i, d].
    """

    term: Tensor

    def dense(self, weights: Tensor) -> Tensor:
        return self.term


def _check_count(what: str, count: int, buckets: Buckets) -> None:
    if count >= buckets.count:
        return
    built = " (built for a grid without prefix tokens?)" if count == buckets.mapping.count else ""
    raise InputError(f"{what} for {count} buckets{built}, but {buckets.queries} has {buckets.count}")


class Forms(NamedTuple):
    """All that the encodings of one attention say."""

    rotations: tuple[Rotation, ...] = ()
    biases: tuple[Bias, ...] = ()
    values: tuple[Values, ...] = ()
