"""What an encoding says to attention, as data; each form states its dense meaning.

Axes: b batch, h heads, i queries, j keys, c feature pairs, d features of a head. An axis of size one in b, h or
i is broadcast. Offsets are query minus key, in patches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import InputError
from whereformer.grid import Grid, Points
from whereformer.index import Buckets

Layout = Literal["interleaved", "half"]
"""Which features make a pair that turns: (2 c, 2 c + 1), or (c, c + pairs)."""


Side = Literal["query", "key"]
"""Which of a pair's two tokens reads."""

LAYOUTS, SIDES = get_args(Layout), get_args(Side)


class Turn(Protocol):
    """A linear map of queries or keys before the dot product."""

    @property
    def patches(self) -> int:
        """How many tokens are turned: the last ones."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[b, h, tokens, d] -> the same."""
        ...


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
        angles: [h, patches, c] or [b, h, patches, c], in radians, c <= d / 2. Prefix tokens, which come first,
            and features beyond the first 2 c are left as they are.
        layout: which features make a pair: "interleaved" (2 c, 2 c + 1) or "half" (c, c + pairs).
        scale: a number by which the turned features are multiplied.
    """

    angles: Tensor
    layout: Layout = "interleaved"
    scale: Tensor | float = 1.0
    made: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)
    """`waves`, where they are made already."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InputError(f"Rotation: layout={self.layout!r}, expected 'interleaved' or 'half'")
        if self.angles.ndim not in (3, 4):
            raise InputError(f"Rotation: angles {tuple(self.angles.shape)}, expected [heads, patches, pairs]")

    @property
    def patches(self) -> int:
        return self.angles.shape[-2]

    @property
    def waves(self) -> tuple[Tensor, Tensor]:
        """scale · cos θ and scale · sin θ, of the shape of `angles`."""
        if self.made is not None:
            return self.made
        cos, sin = self.angles.cos(), self.angles.sin()
        if isinstance(self.scale, float) and self.scale == 1:
            return cos, sin
        return cos * self.scale, sin * self.scale

    def with_waves(self) -> "Rotation":
        """The same, with `waves` made now, once for every use."""
        found = Rotation(self.angles, self.layout, self.scale)
        object.__setattr__(found, "made", self.waves)
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """[b, h, tokens, d] -> the same."""
        return self.turn(x, self.waves)

    def turn(self, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
        """As a call, with `waves` made before, as for queries and keys together."""
        patches, pairs = self.angles.shape[-2:]
        if x.shape[-2] < patches or x.shape[-1] < 2 * pairs:
            raise InputError(f"Rotation: angles {tuple(self.angles.shape)} do not fit features {tuple(x.shape)}")
        prefix = x.shape[-2] - patches
        turned, rest = x[..., prefix:, : 2 * pairs], x[..., prefix:, 2 * pairs :]
        cos, sin = (wave.to(x.dtype) for wave in waves)
        if self.layout == "half":
            first, second = turned.chunk(2, -1)
            turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
        else:
            first, second = turned.unflatten(-1, (pairs, 2)).unbind(-1)
            turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
        return torch.cat([x[..., :prefix, :], torch.cat([turned, rest], -1)], -2)


@dataclass(frozen=True, eq=False)
class MatrixRotation:
    """x_n -> M[h, n] x_n: a rotation that does not keep to pairs of features.

    Args:
        matrices: [h, patches, d, d] or [b, h, patches, d, d]. Prefix tokens, which come first,
            are left as they are.
    """

    matrices: Tensor

    def __post_init__(self) -> None:
        if self.matrices.ndim not in (4, 5) or self.matrices.shape[-1] != self.matrices.shape[-2]:
            found = tuple(self.matrices.shape)
            raise InputError(f"MatrixRotation: matrices {found}, expected [heads, patches, d, d]")

    @property
    def patches(self) -> int:
        return self.matrices.shape[-3]

    def __call__(self, x: Tensor) -> Tensor:
        """[b, h, tokens, d] -> the same."""
        if x.shape[-2] < self.patches or x.shape[-1] != self.matrices.shape[-1]:
            found = tuple(self.matrices.shape)
            raise InputError(f"MatrixRotation: matrices {found} do not fit features {tuple(x.shape)}")
        prefix = x.shape[-2] - self.patches
        turned = (self.matrices.to(x.dtype) @ x[..., prefix:, :, None]).squeeze(-1)
        return torch.cat([x[..., :prefix, :], turned.to(x.dtype)], -2)


@dataclass(frozen=True, eq=False)
class OffsetBias:
    """bias[h, i, j] = table[h, dy + keys.height − 1, dx + keys.width − 1]; 0 for pairs with a prefix token.

    Args:
        table: [h, queries.height + keys.height − 1, queries.width + keys.width − 1]; in a video with frames before
            height. `Grid.span` has the offset of each entry.
    """

    table: Tensor
    queries: Grid
    keys: Grid

    def __post_init__(self) -> None:
        size = tuple(n + m - 1 for n, m in zip(self.queries.size, self.keys.size, strict=True))
        if tuple(self.table.shape[1:]) != size:
            found, wanted = tuple(self.table.shape), ", ".join(map(str, size))
            raise InputError(f"OffsetBias: table {found}, expected [heads, {wanted}]")
        for grid in (self.queries, self.keys):
            grid.check_whole()

    @classmethod
    def of(
        cls, function: Callable[[Tensor], Tensor], queries: Grid, keys: Grid, device: torch.device | None = None
    ) -> "OffsetBias | DenseBias":
        """The bias that is a function of the offset; pairs with a prefix token get 0.

        Args:
            function: of offsets [..., axes], query − key in patches (int64, or floating between patches), to
                [h, ...].
        """
        if any(isinstance(grid, Points) and not grid.whole for grid in (queries, keys)):
            bias = function(queries.pairs(keys, device))  # [h, b, i, j]
            return DenseBias(F.pad(bias.transpose(0, 1), (keys.prefix, 0, queries.prefix, 0)))
        return cls(function(queries.span(keys, device)), queries, keys)

    def dense(self) -> Tensor:
        index: Tensor | int = 0
        offsets = self.queries.offsets(self.keys, self.table.device)
        for offset, m, n in zip(offsets, self.keys.size, self.table.shape[1:], strict=True):
            index = index * n + (offset + (m - 1)).int()  # int64 would be twice as large as what it fills
        assert isinstance(index, Tensor)
        index = self.queries.flatten(self.keys, index)
        bias = F.embedding(index, self.table.flatten(1).mT).movedim(-1, -3)
        return F.pad(bias, (self.keys.prefix, 0, self.queries.prefix, 0))


@dataclass(frozen=True, eq=False)
class Scores:
    """scores[b, h, i, n] = scale reader[b, h, i] · table[h, :, n], made only by who needs them whole.

    Args:
        reader: [b, h, tokens, d]: what reads the table, the very q or k that an encoding got if it can be.
        table: [1 or h, d, buckets], of any floating dtype; it is read in the reader's.
        scale: a number: a backend may multiply by it on the way, which a tensor of its own would not.
        extra: buckets behind those of the table; their scores are 0.
    """

    reader: Tensor
    table: Tensor
    scale: float = 1.0
    extra: int = 0

    def __post_init__(self) -> None:
        if self.reader.ndim != 4 or self.table.ndim != 3 or self.reader.shape[-1] != self.table.shape[-2]:
            found = f"reader {tuple(self.reader.shape)} and table {tuple(self.table.shape)}"
            raise InputError(f"Scores: {found}, expected [b, h, tokens, d] and [1 or h, d, buckets]")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.reader.shape[:-1], self.table.shape[-1] + self.extra))

    @property
    def device(self) -> torch.device:
        return self.reader.device

    @property
    def scaled(self) -> Tensor:
        """The table times the scale, of all buckets."""
        table = self.table if self.scale == 1 else self.table * self.scale
        return F.pad(table, (0, self.extra)) if self.extra else table

    def dense(self) -> Tensor:
        """[b, h, tokens, buckets]."""
        table = self.scaled
        table = table[0] if table.shape[0] == 1 else table  # one product, not one for each head
        return self.reader @ table.to(self.reader.dtype)


@dataclass(frozen=True, eq=False)
class BucketBias:
    """bias[b, h, i, j] = scores[b, h, i, bucket(i, j)].

    With `side="key"` the key reads: bias[b, h, i, j] = scores[b, h, j, bucket(j, i)], `buckets` then being those
    of keys against queries.

    Args:
        scores: [b, h, i (or j on the key's side), buckets], or a table and what reads it.
    """

    scores: Tensor | Scores
    buckets: Buckets
    side: Side = "query"

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise InputError(f"BucketBias: side={self.side!r}, expected 'query' or 'key'")
        _check_count("BucketBias: scores", self.scores.shape[-1], self.buckets)

    def made(self) -> Tensor:
        """The scores, whole."""
        return self.scores.dense() if isinstance(self.scores, Scores) else self.scores

    def dense(self) -> Tensor:
        scores = self.made()
        bias = picked(scores, self.buckets.dense(scores.device))
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
        bias = self.keys.pick((self.rows[..., :, None] + self.columns[..., None, :])[..., None]).squeeze(-1)
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
        index = self.buckets.dense(weights.device).unsqueeze(-3).expand_as(weights)
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


def picked(scores: Tensor, index: Tensor) -> Tensor:
    """scores [b, h, i or 1, buckets] at buckets [(b or 1,) i, n]: [b, h, i, n]."""
    index = index.unsqueeze(-3)
    *axes, count = torch.broadcast_shapes(scores.shape, (*index.shape[:-1], 1))
    return scores.expand(*axes, count).gather(-1, index.expand(*axes, -1))


def _check_count(what: str, count: int, buckets: Buckets) -> None:
    if count >= buckets.count:
        return
    built = " (built for a grid without prefix tokens?)" if count == buckets.mapping.count else ""
    raise InputError(f"{what} for {count} buckets{built}, but {buckets.queries} has {buckets.count}")


class Forms(NamedTuple):
    """All that the encodings of one attention say."""

    rotations: tuple[Turn, ...] = ()
    biases: tuple[Bias, ...] = ()
    values: tuple[Values, ...] = ()
    key_rotations: tuple[Turn, ...] | None = None
    """Those of the keys, where they lie on another grid than the queries."""

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k after all rotations."""
        turns = tuple(map(_ready, self.rotations))
        for rotate in turns:
            q = rotate(q)
        for rotate in turns if self.key_rotations is None else self.key_rotations:
            k = rotate(k)
        return q, k


def _ready(rotate: Turn) -> Callable[[Tensor], Tensor]:
    """The turn, with waves that are made once for all that it turns."""
    return partial(rotate.turn, waves=rotate.waves) if type(rotate) is Rotation else rotate
