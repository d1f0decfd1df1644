"""Start the encodings of one attention from what another was seen to do."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.grid import Grid
from whereformer.resample import without_autocast
from whereformer.translation.copies import exact, learned, loud, write
from whereformer.translation.report import Part
from whereformer.translation.squares import Problem, nearest
from whereformer.translation.turns import turned


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
        total = self.q.new_zeros(1)
        if any("rotations" in encoding.moments() for encoding in self.encodings):
            q, k = (turned(x, self.grid, self.encodings) for x in (self.q, self.k))
            total = replace(self, q=q, k=k).plain() - self.plain()
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

    @torch.no_grad()
    def made(self) -> tuple[Tensor, Tensor]:
        """Logits, and outputs: [batch, heads, tokens, head_dim]."""
        logits = self.plain() + self.added()
        weights = logits.softmax(-1)
        return logits, weights @ self.v + self.valued(weights)


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
        theirs = target.exact()
        logits, outputs = source.exact().made()
        if learned(theirs.encodings):
            _fit_logits(theirs, logits - theirs.plain())
            _fit_outputs(theirs, outputs)
            write(theirs.encodings, target.encodings)
        now, bare = target.exact().made(), replace(theirs, encodings=()).made()
        return (
            Part("logits", _by_head(logits - bare[0], True), _by_head(logits - now[0], True)),
            Part("outputs", _by_head(outputs - bare[1], False), _by_head(outputs - now[1], False)),
        )


def _fit_logits(target: Seen, wanted: Tensor) -> None:
    if _blind(target):  # to content: what images have in common is all that can be said
        wanted = wanted.mean(0, keepdim=True)
        target = replace(target, q=target.q[:1], k=target.k[:1], v=target.v[:1])
    _fit(target, wanted, target.added, centred=True)


def _fit_outputs(target: Seen, outputs: Tensor) -> None:
    with torch.no_grad():
        weights = (target.plain() + target.added()).softmax(-1)
        wanted = outputs - weights @ target.v
    _fit(target, wanted, partial(target.valued, weights), centred=False)


def _fit(target: Seen, wanted: Tensor, says: Callable[[], Tensor], centred: bool) -> None:
    said = says()
    if not said.requires_grad:
        return
    parameters = [p for p in learned(target.encodings) if _reaches(said, p)]

    def problem(centred: bool) -> Problem:
        return Problem(
            lambda: [says().expand(wanted.shape)], parameters, [wanted], [Even(wanted.numel(), centred)]
        )

    nearest(problem(centred), first=problem(False))


@torch.no_grad()
def _blind(target: Seen) -> bool:
    """Whether what is added to the logits is the same for all images."""
    tried = replace(target, q=target.q[:1], k=target.k[:1], encodings=tuple(loud(target.encodings)))
    other = replace(tried, q=tried.q.flip(-1) + 1, k=tried.k.flip(-1) + 1)
    return bool((tried.added() - other.added()).abs().max() == 0)


def _reaches(said: Tensor, parameter: Tensor) -> bool:
    return torch.autograd.grad(said.sum(), parameter, retain_graph=True, allow_unused=True)[0] is not None


def _by_head(x: Tensor, centred: bool) -> tuple[float, ...]:
    if centred:
        x = x - x.mean(-1, keepdim=True)
    return tuple(x.square().mean((0, 2, 3)).sqrt().tolist())
