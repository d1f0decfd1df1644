"""Least squares without a design matrix: what is said is a function that autograd knows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whereformer.translation.metric import Norm

Vector = list[Tensor]
"""What is said, part by part; or one tensor for each parameter."""

ROUNDING = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Problem:
    """Parameters θ such that Σ_parts ‖wanted − says(θ)‖² is least; they are changed in place.

    Args:
        says: the target, as its parameters are now.
        parameters: θ, float64 leaves.
        wanted: what it is to say.
        metrics: the norm of each part.
    """

    says: Callable[[], Vector]
    parameters: Sequence[Tensor]
    wanted: Vector
    metrics: Sequence[Norm]

    def loss(self, residual: Vector) -> float:
        return dot(residual, self.weighed(residual))

    def residual(self, said: Vector) -> Vector:
        return [wanted - s.detach() for wanted, s in zip(self.wanted, said, strict=True)]

    def weighed(self, said: Vector) -> Vector:
        return [metric(s) for metric, s in zip(self.metrics, said, strict=True)]

    @torch.no_grad()
    def place(self, values: Vector) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def move(self, step: Vector) -> None:
        for parameter, s in zip(self.parameters, step, strict=True):
            parameter.add_(s)


class Slope:
    """J, the derivative of what is said by the parameters, as they are now: products with it, and with Jᵀ."""

    def __init__(self, problem: Problem) -> None:
        self.parameters = list(problem.parameters)
        self.said = problem.says()
        self.open = [i for i, s in enumerate(self.said) if s.requires_grad]
        self.seeds = [torch.zeros_like(self.said[i], requires_grad=True) for i in self.open]
        self.back = torch.autograd.grad(
            [self.said[i] for i in self.open],
            self.parameters,
            self.seeds,
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )

    def transposed(self, u: Vector) -> Vector:
        """Jᵀ u."""
        found = torch.autograd.grad(
            [self.said[i] for i in self.open],
            self.parameters,
            [u[i] for i in self.open],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return list(found)

    def times(self, v: Vector) -> Vector:
        """J v: the derivative of Jᵀ u, which is linear in u, by u."""
        used = [(b, s) for b, s in zip(self.back, v, strict=True) if b.requires_grad]
        found = [torch.zeros_like(s) for s in self.said]
        if used:
            made = torch.autograd.grad(
                [b for b, _ in used],
                self.seeds,
                [s for _, s in used],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for i, m in zip(self.open, made, strict=True):
                found[i] = m
        return found


def nearest(problem: Problem, first: Problem, unwind: Sequence[Problem] = ()) -> None:
    """Solve it, from zeros where what is said is linear in the parameters, otherwise from where they are.

    Args:
        first: the same in a norm that sees more: of all solutions of `problem`, the one near its solution.
        unwind: problems that lead to it one after the other, for what goes round in circles; it starts from a
            tenth of where the parameters are.
    """
    if not problem.parameters:
        return
    start = [parameter.detach().clone() for parameter in problem.parameters]
    if is_linear(first):
        for stage in (first, problem):
            slope = Slope(stage)
            stage.move(solve(stage, slope, stage.residual(slope.said), 0.0, 3000, 1e-13))
        return
    best, least = start, math.inf
    for damping in (0.01,) if unwind else (0.01, 10.0):  # a bold first step, and a careful one
        problem.place([s * 0.1 if unwind else s for s in start])
        for stage in unwind:
            descend(stage, damping, 20, 1e-6)
        loss = descend(problem, damping)
        if loss < least:
            best, least = [parameter.detach().clone() for parameter in problem.parameters], loss
    problem.place(best)


def is_linear(problem: Problem) -> bool:
    """Whether what is said is linear in the parameters, plus a constant: found by trying. They end as zeros."""
    generator = torch.Generator().manual_seed(0)
    u, v = (
        [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in problem.parameters] for _ in range(2)
    )

    @torch.no_grad()
    def said(a: float, b: float) -> Vector:
        for parameter, x, y in zip(problem.parameters, u, v, strict=True):
            parameter.copy_(a * x + b * y)
        return [s.clone() for s in problem.says()]

    both, one, other, none = said(1, -2), said(1, 0), said(0, 1), said(0, 0)
    for b, x, y, zero in zip(both, one, other, none, strict=True):
        apart = (b - zero) - ((x - zero) - 2 * (y - zero))
        if not float(apart.abs().max()) <= 1e-9 * float(b.abs().max() + zero.abs().max() + 1e-300):
            return False
    return True


def solve(
    problem: Problem, slope: Slope, residual: Vector, damping: float, steps: int, tolerance: float
) -> Vector:
    """The step s for which ‖residual − J s‖² + damping · s·D s is least, D about the diagonal of JᵀMJ.

    Conjugate gradients on the normal equations, from s = 0, so that of several such steps it is a small one.
    """
    scale = _diagonal(problem, slope)
    if damping:  # what hardly matters here is not moved far
        most = max(float(s.max()) for s in scale)
        scale = [s.clamp(min=1e-4 * most) for s in scale]
    step = [torch.zeros_like(s) for s in scale]
    residual = [r.clone() for r in residual]
    slant = slope.transposed(problem.weighed(residual))
    ahead = [s / d for s, d in zip(slant, scale, strict=True)]
    size = first = dot(slant, ahead)
    if not damping:  # what is solved already is not solved again
        whole = slope.transposed(problem.weighed(problem.wanted))
        first = max(first, sum(float((w * w / d).sum()) for w, d in zip(whole, scale, strict=True)))
    least, since = size, 0
    for _ in range(steps):
        if size <= tolerance**2 * first or since > 100 or size == 0:
            break
        seen = slope.times(ahead)
        bend = dot(seen, problem.weighed(seen))
        if damping:
            bend += damping * sum(float((a * d * a).sum()) for a, d in zip(ahead, scale, strict=True))
        if bend <= 0:
            break
        far = size / bend
        for s, a in zip(step, ahead, strict=True):
            s.add_(a, alpha=far)
        for r, s in zip(residual, seen, strict=True):
            r.sub_(s, alpha=far)
        slant = slope.transposed(problem.weighed(residual))
        if damping:
            slant = [g - damping * d * s for g, d, s in zip(slant, scale, step, strict=True)]
        leaning = [s / d for s, d in zip(slant, scale, strict=True)]
        before, size = size, dot(slant, leaning)
        ahead = [n + (size / before) * a for n, a in zip(leaning, ahead, strict=True)]
        least, since = (size, 0) if size < 0.5 * least else (least, since + 1)
    return step


def _diagonal(problem: Problem, slope: Slope, draws: int = 8) -> Vector:
    """About the diagonal of JᵀMJ, from random signs; the largest for what nothing depends on."""
    generator = torch.Generator().manual_seed(0)
    total = [torch.zeros_like(p) for p in problem.parameters]
    for _ in range(draws):
        signs = []
        for s, metric in zip(slope.said, problem.metrics, strict=True):
            sign = torch.randint(0, 2, s.shape, generator=generator) * 2.0 - 1
            signs.append(metric.root(sign))
        for t, found in zip(total, slope.transposed(signs), strict=True):
            t.add_(found.square() / draws)
    most = max((float(t.max()) for t in total if t.numel()), default=0.0)
    return [torch.where(t > 1e-14 * most, t, torch.full_like(t, most or 1.0)) for t in total]


def descend(problem: Problem, damping: float, steps: int = 60, enough: float = 1e-24) -> float:
    """Levenberg and Marquardt's way down from the parameters as they are, for what is not linear in them.

    Args:
        damping: of the first step.
        enough: the distance, relative to what is wanted, at which to stop.

    Returns:
        how far from what is wanted they end.
    """
    slope = Slope(problem)
    residual = problem.residual(slope.said)
    loss, slow, failed = problem.loss(residual), 0, 0
    enough *= problem.loss(problem.wanted)
    for _ in range(steps):
        before = [parameter.detach().clone() for parameter in problem.parameters]
        step = solve(problem, slope, residual, damping, 40, 1e-3 if damping > 1e-8 else 1e-8)
        problem.move(step)
        with torch.no_grad():
            moved = problem.residual(problem.says())
        new = problem.loss(moved)
        if not new < loss:  # also if it is not a number
            problem.place(before)
            damping, failed = damping * 10, failed + 1
            if failed == 7:
                break
            slope = Slope(problem)
            continue
        failed = 0
        slow = slow + 1 if new > (1 - 1e-3) * loss else 0
        residual, loss, damping = moved, new, max(damping / 8, 1e-12)
        if slow > 2 or loss <= enough:
            break
        slope = Slope(problem)
    return loss


def dot(a: Vector, b: Vector) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))
