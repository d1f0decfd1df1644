"""Start the encodings of one attention from what another was seen to do."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.grid import Grid
from whereformer.resample import without_autocast
from whereformer.translation.copies import exact, learned, loud, write
from whereformer.translation.report import Part
from whereformer.translation.squares import Problem, nearest


@dataclass(frozen=True)
class Seen:
    """What one attention got on some images: q, k, v [batch, heads, tokens, head_dim], and its encodings."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    encodings: tuple[PositionEncoding, ...] = ()

    def exact(self) -> "Seen":
        """In float64, on the CPU."""
        q, k, v = (x.detach().to("cpu", torch.float64) for x in (self.q, self.k, self.v))
        return Seen(q, k, v, self.grid, tuple(exact(self.encodings)))

    def plain(self) -> Tensor:
        """Logits without encodings: [batch, heads, queries, keys]."""
        return self.q @ self.k.mT * self.q.shape[-1] ** -0.5

    def added(self) -> Tensor:
        """What encodings make of the logits."""
        q, k = self.q, self.k
        for encoding in self.encodings:
            for turn in encoding.rotations(self.grid, q.device):
                q, k = turn(q), turn(k)
        total = q.new_zeros(1) if q is self.q else Seen(q, k, self.v, self.grid).plain() - self.plain()
        for encoding in self.encodings:
            for bias in encoding.biases(self.q, self.k, self.grid, self.grid):
                total = total + bias.dense()
        return total

    def valued(self, weights: Tensor) -> Tensor:
        """What they add to the output."""
        total = self.v.new_zeros(1)
        for encoding in self.encodings:
            for term in encoding.values(self.v, self.grid, self.grid):
                total = total + term.dense(weights)
        return total


@dataclass(frozen=True)
class Even:
    """The mean square; with `centred`, of what is left when every query's keys lose their mean."""

    count: int
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[batch, heads, queries, keys or features] -> the same."""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) / self.count

    def root(self, signs: Tensor) -> Tensor:
        return signs * self.count**-0.5


def start_from_seen(source: Seen, target: Seen) -> tuple[Part, ...]:
    """Let the target's logits, and then its outputs, come as near as they can to those of the source.

    Least squares over images and pairs of tokens, after every query's logits have lost their mean. The target's
    parameters are changed in place.

    Returns:
        "logits" and "outputs": how far the two are apart, as the target's encodings stand now ("missed") and
        without them ("said"), head by head.
    """
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(torch.device("cpu")):
        ours, theirs = source.exact(), target.exact()
        with torch.no_grad():
            logits = ours.plain() + ours.added()
            weights = logits.softmax(-1)
            outputs = weights @ ours.v + ours.valued(weights)
        wanted = logits - theirs.plain()
        if learned(theirs.encodings):
            _fit_logits(theirs, wanted)
            _fit_outputs(theirs, outputs)
            write(theirs.encodings, target.encodings)
        theirs = target.exact()
        with torch.no_grad():
            bare = theirs.plain()
            now = bare + theirs.added()
            weights = now.softmax(-1)
            found = weights @ theirs.v + theirs.valued(weights)
            bare_outputs = bare.softmax(-1) @ theirs.v
        return (
            Part("logits", _by_head(logits - bare, True), _by_head(logits - now, True)),
            Part("outputs", _by_head(outputs - bare_outputs, False), _by_head(outputs - found, False)),
        )


def _fit_logits(target: Seen, wanted: Tensor) -> None:
    if _blind(target):  # to content: what images have in common is all that can be said
        wanted = wanted.mean(0, keepdim=True)
        target = Seen(target.q[:1], target.k[:1], target.v[:1], target.grid, target.encodings)
    _fit(target, wanted, target.added, (False, True))


def _fit_outputs(target: Seen, outputs: Tensor) -> None:
    with torch.no_grad():
        weights = (target.plain() + target.added()).softmax(-1)
        wanted = outputs - weights @ target.v
    _fit(target, wanted, partial(target.valued, weights), (False, False))


def _fit(target: Seen, wanted: Tensor, says: Callable[[], Tensor], centred: tuple[bool, bool]) -> None:
    said = says()
    if not said.requires_grad:
        return
    parameters = [p for p in learned(target.encodings) if _reaches(said, p)]
    first, last = (
        Problem(lambda: [says().expand(wanted.shape)], parameters, [wanted], [Even(wanted.numel(), c)])
        for c in centred
    )
    nearest(last, first)


@torch.no_grad()
def _blind(target: Seen) -> bool:
    """Whether what is added to the logits is the same for all images."""
    tried = Seen(target.q[:1], target.k[:1], target.v[:1], target.grid, tuple(loud(target.encodings)))
    other = Seen(tried.q.flip(-1) + 1, tried.k.flip(-1) + 1, tried.v, tried.grid, tried.encodings)
    return bool((tried.added() - other.added()).abs().max() == 0)


def _reaches(said: Tensor, parameter: Tensor) -> bool:
    return torch.autograd.grad(said.sum(), parameter, retain_graph=True, allow_unused=True)[0] is not None


def _by_head(x: Tensor, centred: bool) -> tuple[float, ...]:
    if centred:
        x = x - x.mean(-1, keepdim=True)
    return tuple(x.square().mean((0, 2, 3)).sqrt().tolist())
