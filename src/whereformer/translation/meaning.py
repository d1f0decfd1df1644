"""What encodings say, from the dense meaning of their forms alone: numbers that can be compared and fitted."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.grid import Grid
from whereformer.translation.metric import Metric
from whereformer.translation.pairs import Pairs
from whereformer.translation.turns import Turns

PARTS = {
    "tokens": "added to tokens",
    "convolution": "made of tokens and added to them",
    "rotations": "turning queries and keys",
    "bias": "added to logits, whatever queries and keys hold",
    "queries": "what queries make of it",
    "keys": "what keys make of it",
    "products": "what each query and key make of it together",
    "values": "added to values",
    "own values": "made of values and added to the output",
}
"""The ways to speak; of each, what is measured."""

LOGITS = ("bias", "queries", "keys", "products")
DRAWS = 4
"""White inputs on which that is measured which is no sum of what each input makes of it."""

Said = dict[str, Tensor]
"""Of each part, what is said: [heads, rows, features], heads 1 where tokens are spoken to."""


class Meaning:
    """How encodings of one shape are listened to, on one grid.

    Queries, keys, values and tokens are taken for white noise of variance 1: what is linear in them is asked for
    each feature by itself, and squares of it add up to the square that is expected.

    Args:
        grid: where tokens are.
        like: an encoding of that shape.
        by_offset: whether it is enough to look at one pair of patches for each offset.
    """

    def __init__(self, grid: Grid, like: PositionEncoding, by_offset: bool) -> None:
        self.grid, self.dim, self.heads, self.features = grid, like.dim, like.num_heads, like.head_dim
        self.pairs = Pairs.by_offset(grid) if by_offset else Pairs.whole(grid)
        generator = torch.Generator().manual_seed(0)

        def white(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        tokens = (self.pairs.queries.tokens, self.pairs.keys.tokens, grid.tokens)
        self.q, self.k, self.v = (white(DRAWS, self.heads, n, self.features) for n in tokens)
        self.x = white(DRAWS, grid.tokens, self.dim)
        self.turns = Turns(grid, like)

    def parts(self, encodings: Sequence[PositionEncoding]) -> list[str]:
        """In which ways they speak."""
        moments = {moment for encoding in encodings for moment in encoding.moments()}
        tried = (
            *(("tokens", "convolution") if "tokens" in moments else ()),
            *(("rotations",) if "rotations" in moments else ()),
            *(LOGITS if "biases" in moments else ()),
            *(("values", "own values") if "values" in moments else ()),
        )
        with torch.no_grad():
            said = {part: self._ways[part](self, encodings) for part in tried}
        loudest = max((float(found.abs().max()) for found in said.values()), default=0.0)
        return [part for part, found in said.items() if float(found.abs().max()) > 1e-9 * loudest]

    def said(self, encodings: Sequence[PositionEncoding], parts: Iterable[str]) -> Said:
        """What they say in those ways."""
        return {part: self._ways[part](self, encodings) for part in parts}

    def metric(self, part: str, centred: bool = True) -> Metric:
        """How far apart two are that say something: the mean square of what is said of a pair, or of a token.

        Args:
            centred: leave out what is the same for all keys of a query; softmax does not see it.
        """
        if part in ("tokens", "convolution", "own values"):
            features = self.dim if part != "own values" else self.features
            draws = DRAWS if part != "tokens" else 1
            return Metric.even(self.grid.tokens, 1 / (features * draws))
        if part == "rotations":
            return self.turns.metric()
        scale = {"products": 1 / DRAWS, "values": 1 / self.features}.get(part, 1.0)
        if centred and part in ("bias", "queries"):
            return Metric(self.pairs.weights(), self.pairs.rows(), self.pairs.like)
        return Metric(self.pairs.weights() * scale)

    def _tokens(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        return _encoded(torch.zeros_like(self.x[:1]), self.grid, encodings)

    def _convolution(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        made = _encoded(self.x, self.grid, encodings) - self.x - self._tokens(encodings)
        return made.movedim(0, -1).flatten(1)[None]

    def _biases(self, q: Tensor, k: Tensor, encodings: Sequence[PositionEncoding]) -> Tensor:
        """[batch, heads, pairs]."""
        total = q.new_zeros(q.shape[0], self.heads, self.pairs.queries.tokens, self.pairs.keys.tokens)
        for encoding in encodings:
            for bias in encoding.biases(q, k, self.pairs.queries, self.pairs.keys):
                total = total + bias.dense().to(total.dtype)
        return total.flatten(2)

    def _silent(self, batch: int = 1) -> tuple[Tensor, Tensor]:
        return tuple(x.new_zeros(1, *x.shape[1:]).expand(batch, *x.shape[1:]) for x in (self.q, self.k))  # pyright: ignore[reportReturnType]

    def _units(self, tokens: int) -> Tensor:
        """Every token holds one feature alone, each in turn: [features, heads, tokens, features]."""
        unit = torch.eye(self.features, dtype=torch.float64)[:, None, None]
        return unit.expand(-1, self.heads, tokens, -1)

    def _bias(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        return self._biases(*self._silent(), encodings).movedim(0, -1)

    def _queries(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        _, k = self._silent(self.features)
        made = self._biases(self._units(self.pairs.queries.tokens), k, encodings)
        return made.movedim(0, -1) - self._bias(encodings)

    def _keys(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        q, _ = self._silent(self.features)
        made = self._biases(q, self._units(self.pairs.keys.tokens), encodings)
        return made.movedim(0, -1) - self._bias(encodings)

    def _products(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        q, k = self._silent(DRAWS)
        apart = self._biases(self.q, k, encodings) + self._biases(q, self.k, encodings)
        together = self._biases(self.q, self.k, encodings) - apart
        return together.movedim(0, -1) + self._bias(encodings)

    def _values(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        """The output of a query that attends to one key alone, and of each in turn: [heads, pairs, features]."""
        queries, keys = self.pairs.queries, self.pairs.keys
        one = torch.eye(keys.tokens, dtype=torch.float64)[:, None, None]
        weights = one.expand(-1, self.heads, queries.tokens, -1)
        v = self.v.new_zeros(1, self.heads, keys.tokens, self.features)
        total = v.new_zeros(keys.tokens, self.heads, queries.tokens, self.features)
        for encoding in encodings:
            for term in encoding.values(v, queries, keys):
                total = total + term.dense(weights) - term.dense(torch.zeros_like(weights[:1]))
        return total.movedim(0, 2).flatten(1, 2)

    def _own_values(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        weights = self.v.new_zeros(1, self.heads, self.grid.tokens, self.grid.tokens)
        total = torch.zeros_like(self.v)
        for encoding in encodings:
            for term in encoding.values(self.v, self.grid, self.grid):
                total = total + term.dense(weights)
        return total.movedim(0, -1).flatten(2)

    def _rotations(self, encodings: Sequence[PositionEncoding]) -> Tensor:
        return self.turns.said(encodings)

    _ways: dict[str, Callable[["Meaning", Sequence[PositionEncoding]], Tensor]] = {  # noqa: RUF012
        "tokens": _tokens,
        "convolution": _convolution,
        "rotations": _rotations,
        "bias": _bias,
        "queries": _queries,
        "keys": _keys,
        "products": _products,
        "values": _values,
        "own values": _own_values,
    }


def _encoded(x: Tensor, grid: Grid, encodings: Sequence[PositionEncoding]) -> Tensor:
    for encoding in encodings:
        x = encoding.tokens(x, grid)
    return x
