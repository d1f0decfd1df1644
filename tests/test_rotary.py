"""Rotary encodings, written again from their papers, angle by angle in float64; and what they promise users."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from loops import attend, close, leaf, same_gradients, turn
from whereformer import Grid, InputError, MatrixRotation, Points, PositionEncoding, Rotation, attention, parse
from whereformer.encodings import (
    ComRoPE,
    DINOv3,
    GoldenGate,
    LieRE,
    NDRoPE,
    RoPE1D,
    RoPEAxial,
    RoPEMixed,
    SpiralRoPE,
    half_to_interleaved,
    interleaved_to_half,
)
from whereformer.encodings.common.rotary import Spectrum
from whereformer.encodings.nd_rope import simplex

HEADS, D = 2, 16
DIM = HEADS * D
HOME = Grid(3, 4)
VIDEO = Grid(2, 1, frames=3)
SINGLE = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
"""Roundings of float64 in one of float32, in which angles of frequencies that are not learned are reckoned."""

Place = tuple[float, ...]
Angle = Callable[[int, int, Place], Tensor | float]
"""The angle of a head, a pair and a place (y, x) or (t, y, x)."""


def build(text: str, home: Grid = HOME, dim: int = DIM) -> Any:
    (factory,) = parse(text)
    encoding: Any = factory(dim, HEADS, home).double().eval()
    for parameter in encoding.parameters():
        if parameter.requires_grad:
            torch.nn.init.uniform_(parameter, -1, 1)
    return encoding


# ---------------------------------------------------------------------------------------------------------------
# The papers.


def frequency(scaling: str, m: int, count: int, theta: float, size: int, home: int, first: float = 1.0) -> float:
    """Frequency m of `count` along an axis: θ^(−2m/d), d = 2 count, as PI, NTK and YaRN stretch it."""
    d, s = 2 * count, size / home
    plain = first * theta ** (-2 * m / d)
    if scaling == "pi":
        return plain / s
    s = max(s, 1)
    if scaling == "ntk" and d > 2:
        return first * (theta * s ** (d / (d - 2))) ** (-2 * m / d)
    if scaling == "yarn":

        def index(turns: int) -> float:
            return d * math.log(first * home / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), d - 1)
        ramp = min(max((m - low) / max(high - low, 0.001), 0), 1)
        return plain * (1 - ramp) + plain / s * ramp
    if scaling == "yarn_paper":
        turns = home * plain / (2 * math.pi)
        kept = min(max((turns - 1) / (32 - 1), 0), 1)
        return plain * kept + plain / s * (1 - kept)
    return plain


def temperature(scaling: str, size: Place, home: Place) -> float:
    largest = max(now / then for now, then in zip(size, home, strict=True))
    return 0.1 * math.log(max(largest, 1)) + 1 if scaling.startswith("yarn") else 1.0


def rope1d(e: Any, grid: Grid) -> Angle:
    size, home = math.prod(grid.size), math.prod(e.grid.size)

    def angle(h: int, c: int, place: Place) -> float:
        number = 0
        for n, p in zip(grid.size, place, strict=True):
            number = number * n + p
        return number * frequency(e.scaling, c, D // 2, e.theta, size, home)

    return angle


def blocks(e: Any, grid: Grid, order: list[int], home: Place, theta: float, offset: float = 0.0) -> Angle:
    """Axis order[0] has the first pairs, order[1] the next ..."""
    count = D // 2 // len(order)

    def angle(h: int, c: int, place: Place) -> float:
        a = order[c // count]
        return (place[a] + offset) * frequency(e.scaling, c % count, count, theta, grid.size[a], int(home[a]))

    return angle


def rope_axial(e: Any, grid: Grid) -> Angle:
    return blocks(e, grid, [1, 0] if grid.axes == 2 else [2, 1, 0], e.grid.size, e.theta)


def qwen2_vl(e: Any, grid: Grid) -> Angle:
    return blocks(e, grid, [0, 1], e.grid.size, e.theta)


def eva02(e: Any, grid: Grid) -> Angle:
    order = list(range(grid.axes))
    reference = e.grid.size if e.reference is None else (*e.grid.size[:-2], *e.reference)
    return blocks(e, grid, order if e.order == "y" else order[::-1], reference, e.theta, e.grid_offset)


def rope_pixel(e: Any, grid: Grid) -> Angle:
    count = D // 2 // grid.axes

    def angle(h: int, c: int, place: Place) -> float:
        a, m = divmod(c, count)
        most = e.max_freq / 2
        f = 1 + m * (most - 1) / (count - 1) if e.bands == "linear" else most ** (m / (count - 1))
        n = grid.size[a]
        return math.pi * f * (-1 + (2 * place[a] / (n - 1) if n > 1 else 0))

    return angle


def rope_mixed(e: Any, grid: Grid) -> Angle:
    sy, sx = (e.grid.size[a] / grid.size[a] if e.scaling == "pi" else 1 for a in (0, 1))

    def angle(h: int, c: int, place: Place) -> Tensor:
        return e.frequencies[0, h, c] * place[1] * sx + e.frequencies[1, h, c] * place[0] * sy

    return angle


def pixtral(e: Any, grid: Grid) -> Angle:
    def angle(h: int, c: int, place: Place) -> float:
        m = c if e.order == "alternating" else 2 * (c % (D // 4)) + c // (D // 4)
        a = m % 2
        return place[a] * frequency(e.scaling, m, D // 2, e.theta, grid.size[a], e.grid.size[a])

    return angle


def visionllama(e: Any, grid: Grid) -> Angle:
    def angle(h: int, c: int, place: Place) -> float:
        a = 1 - c % 2
        return place[a] * frequency(e.scaling, c // 2, D // 4, e.theta, grid.size[a], e.grid.size[a])

    return angle


def dinov3(e: Any, grid: Grid) -> Angle:
    size = grid.size
    over = {"separate": size, "max": (max(size),) * 2, "min": (min(size),) * 2}[e.normalize]

    def angle(h: int, c: int, place: Place) -> float:
        a, k = divmod(c, D // 4)
        period = e.base ** (4 * k / D)
        if e.periods:
            least, most = e.periods
            period = least * (most / least) ** (k / (D // 4 - 1))
        return 2 * math.pi * (2 * (place[a] + 0.5) / over[a] - 1) / period

    return angle


def vjepa2(e: Any, grid: Grid) -> Angle:
    count = D // 3 // 2

    def angle(h: int, c: int, place: Place) -> float:
        a, m = divmod(c, count)
        size, home = (1, *grid.size)[-3:][a], (1, *e.grid.size)[-3:][a]
        return (0, *place)[-3:][a] * frequency(e.scaling, m, count, e.theta, size, home)

    return angle


def mrope(e: Any, grid: Grid) -> Angle:
    _, rows, columns = e.sections

    def angle(h: int, c: int, place: Place) -> float:
        a = 1 if c % 3 == 1 and c < 3 * rows else 2 if c % 3 == 2 and c < 3 * columns else 0
        size, home = (1, *grid.size)[-3:][a], (1, *e.grid.size)[-3:][a]
        return (0, *place)[-3:][a] * frequency(e.scaling, c, D // 2, e.theta, size, home)

    return angle


def golden_gate(e: Any, grid: Grid) -> Angle:
    axes, count = grid.axes, D // 2
    zeros = round(e.zero_freqs * count)
    g = {2: 1.3247179572447460, 3: 1.2207440846057596}[axes]  # the plastic number and its successor

    def angle(h: int, c: int, place: Place) -> float:
        if c < zeros:
            return 0.0
        u = [NormalDist().inv_cdf((h * count + c + 1) / g ** (a + 1) % 1) for a in range(axes)]
        moving = count - zeros
        ratio = (e.max_freq / e.min_freq) ** (1 / (moving - 1))
        m = count - 1 - c
        waves = []
        for now, then in zip(grid.size, e.grid.size, strict=True):
            if e.scaling == "yarn":
                waves.append(frequency("yarn", m, moving, ratio**moving, now, then, e.max_freq))
            else:
                s = max(now / then, 1) if e.scaling == "ntk" else 1
                waves.append(e.max_freq * ratio**-m * s ** (-m / (moving - 1)))
        return sum(w * x * p for w, x, p in zip(waves, u, place, strict=True)) / math.hypot(*u)

    return angle


def spiral(e: Any, grid: Grid) -> Angle:
    half, k = D // 4, e.directions

    def angle(h: int, c: int, place: Place) -> float:
        part, m = divmod(c, half)
        phi = math.pi / 2 * (1 - part) - (m // 2 % (k // 2)) * math.pi / k
        if e.shared:
            m = m // k * 2 + m % 2
        exponent = -2 * k * m / D if e.shared else -4 * m / D
        fy, fx = (
            e.max_freq * e.theta**exponent * (e.grid.size[a] / grid.size[a] if e.scaling == "pi" else 1)
            for a in (0, 1)
        )
        if not e.clamped:
            return fx * place[1] * math.cos(phi) + fy * place[0] * math.sin(phi)
        (height, width), (y, x) = grid.size, place
        y, x = y - (height - 1) / 2, x - (width - 1) / 2
        along = x * math.cos(phi) + y * math.sin(phi)
        n, f = (height, fy) if part == 0 else (width, fx)
        return f * min(max(along + (n - 1) / 2, 0), n - 1)

    return angle


def nd_rope(e: Any, grid: Grid) -> Angle:
    n = grid.axes
    scales = D // 2 // (n + 1)

    def angle(h: int, c: int, place: Place) -> float:
        k, s = divmod(c, scales)
        wave = e.corners()[0 if e.turned == "none" else h, s if e.turned == "scale" else 0, k].tolist()[::-1]
        sizes = zip(grid.size, e.grid.size, strict=True)
        f = [frequency(e.scaling, s, scales, e.theta, now, then) for now, then in sizes]
        return sum(w * g * p for w, g, p in zip(wave, f, place, strict=True))

    return angle


def places(grid: Grid) -> list[list[Place]]:
    """(y, x) or (t, y, x) of each patch, for each image of a batch if these differ."""
    if isinstance(grid, Points):
        return [[tuple(p) for p in image] for image in grid.at.tolist()]
    return [list(itertools.product(*(range(n) for n in grid.size)))]


def pairs_of(e: Any) -> int:
    """How many of the D / 2 pairs turn: as many in each part of a head."""
    axes = e.grid.axes
    parts = {"RoPE1D": 1, "MRoPE": 1, "GoldenGate": 1, "VJEPA2": 3, "NDRoPE": axes + 1}.get(type(e).__name__, axes)
    return D // 2 // parts * parts


def paper_turn(e: Any, x: Tensor, grid: Grid, angle: Angle) -> Tensor:
    """x turned pair by pair, one image after the other, and multiplied by YaRN's temperature."""
    pairs, images = pairs_of(e), []
    for image, at in zip(x.split(1), itertools.cycle(places(grid)), strict=False):
        angles = [torch.as_tensor(angle(h, c, p)) for h in range(HEADS) for p in at for c in range(pairs)]
        angles = torch.stack([a.to(x.dtype) for a in angles]).reshape(HEADS, len(at), pairs)
        warm = torch.ones_like(image)
        warm[:, :, grid.prefix :, : 2 * pairs] = temperature(e.scaling, e.size(grid), e.home())
        images.append(turn(image, angles, e.layout, grid.prefix) * warm)
    return torch.cat(images)


PAPERS: list[tuple[str, Callable[[Any, Grid], Angle]]] = [
    *((f"rope1d({o})", rope1d) for o in ("", "layout='half', scaling='pi'", "scaling='ntk'", "scaling='yarn'")),
    ("rope_axial", rope_axial),
    *((f"rope_axial(layout='half', scaling={s!r})", rope_axial) for s in ("pi", "ntk", "yarn", "yarn_paper")),
    ("rope_axial(theta=1000.0, scaling='yarn')", rope_axial),
    ("rope_pixel", rope_pixel),
    ("rope_pixel(bands='log', max_freq=20.0)", rope_pixel),
    ("rope_mixed", rope_mixed),
    ("rope_mixed(scaling='pi')", rope_mixed),
    ("eva02", eva02),
    ("eva02(reference=(5, 3), grid_offset=1.0, order='x', layout='half')", eva02),
    ("eva02(reference=None, scaling='ntk')", eva02),
    ("pixtral", pixtral),
    ("pixtral(order='blocks', layout='half', scaling='ntk')", pixtral),
    ("pixtral(scaling='yarn')", pixtral),
    ("qwen2_vl", qwen2_vl),
    ("qwen2_vl(scaling='yarn_paper')", qwen2_vl),
    ("visionllama", visionllama),
    ("visionllama(scaling='ntk')", visionllama),
    ("dinov3", dinov3),
    ("dinov3(normalize='max', periods=(0.5, 40.0))", dinov3),
    ("dinov3(normalize='min', base=50.0)", dinov3),
    ("vjepa2", vjepa2),
    ("vjepa2(scaling='pi')", vjepa2),
    ("mrope", mrope),
    ("mrope(sections=(4, 2, 1), scaling='ntk')", mrope),
    ("golden_gate(max_freq=5.0)", golden_gate),
    ("golden_gate(min_freq=0.2, max_freq=9.0, zero_freqs=0.3, scaling='ntk')", golden_gate),
    ("golden_gate(max_freq=2.0, min_freq=0.01, scaling='yarn')", golden_gate),
    ("spiral", spiral),
    ("spiral(directions=2, scaling='none')", spiral),
    ("spiral(shared=True, max_freq=1.0)", spiral),
    ("spiral(clamped=True)", spiral),
    ("nd_rope", nd_rope),
    ("nd_rope(turned='scale', layout='half', scaling='ntk')", nd_rope),
    ("nd_rope(turned='none', scaling='pi')", nd_rope),
]


def kept(grid: Grid, seed: int) -> Points:
    """Four patches of each of two images, in no order."""
    shuffled = [torch.randperm(grid.patches, generator=torch.Generator().manual_seed(seed + b)) for b in range(2)]
    return grid.keep(torch.stack(shuffled)[:, :4])


GRIDS = [
    ("home", HOME, HOME, None),
    ("larger", HOME, Grid(4, 6, prefix=1), None),
    ("smaller, two prefix tokens", HOME, Grid(2, 3, prefix=2), None),
    ("one row", HOME, Grid(1, 7), None),
    ("kept patches", HOME, kept(Grid(5, 7, prefix=1), 0), None),
    ("two grids", HOME, Grid(2, 3, prefix=1), Grid(4, 3, prefix=2)),
    ("points to a grid", HOME, Points(3, 4, at=torch.tensor([[[0.5, 2.25], [-1.0, 3.0]]])), Grid(3, 4, prefix=1)),
    ("video", VIDEO, Grid(2, 2, prefix=1, frames=4), None),
]


def cases() -> Iterator[Any]:
    """The first spelling of each paper meets every grid, the others a larger one and two more."""
    seen = set()
    for number, (text, paper) in enumerate(PAPERS):
        chosen = GRIDS if paper not in seen else [GRIDS[1], *(GRIDS[2 + (number + n) % 6] for n in (0, 3))]
        seen.add(paper)
        for name, *grids in chosen:
            yield pytest.param(text, paper, *grids, id=f"{text}, {name}")


@pytest.mark.parametrize(("text", "paper", "home", "queries", "keys"), list(cases()))
def test_angles_of_the_paper(
    text: str, paper: Callable[[Any, Grid], Angle], home: Grid, queries: Grid, keys: Grid | None
) -> None:
    """Values and gradients of attention; angles of up to some hundred radians are reckoned in float32."""
    if home.axes == 3 and parse(text)[0].func.axes == (2,):  # type: ignore[union-attr]
        with pytest.raises(InputError, match="defined on images"):
            build(text, home)
        return
    e = build(text, home)
    q, k, v = (leaf(2, HEADS, grid.tokens, D) for grid in (queries, keys or queries, keys or queries))
    if keys is not None and not e.crosses:
        with pytest.raises(InputError, match="two grids"):
            attention(q, k, v, queries, [e], keys=keys)
        return
    if isinstance(queries, Points) and not queries.whole and "1d" in text:
        with pytest.raises(InputError, match="between patches"):
            attention(q, k, v, queries, [e], keys=keys)
        return
    learned = {n: p for n, p in e.named_parameters() if p.requires_grad}
    expected = attend(
        paper_turn(e, q, queries, paper(e, queries)),
        paper_turn(e, k, keys or queries, paper(e, keys or queries)),
        v,
    )
    got = attention(q, k, v, queries, [e], keys=keys)
    roundings = 1024 if learned else 1024 * SINGLE
    same_gradients(got, expected, {"q": q, "k": k, "v": v, **learned}, roundings)
    plain = attend(q, k, v)
    if queries.patches > 1:
        assert (got - plain).abs().max() > 100 * roundings * torch.finfo(torch.float64).eps, "nothing turned"


@pytest.mark.parametrize("scaling", ["none", "pi", "ntk", "yarn", "yarn_paper"])
def test_stretched_frequencies(scaling: Any) -> None:
    """Each axis by its own factor, for short and long homes, θ and numbers of frequencies."""
    for theta, count, then in itertools.product((10000.0, 100.0), (1, 2, 7, 32), (3, 14, 37, 500)):
        sizes = [then // 2 + 1, then, 2 * then, 7 * then + 1]
        found = Spectrum.of(count, theta).on(sizes, [then] * 4, scaling)
        wanted = [[frequency(scaling, m, count, theta, n, then) for n in sizes] for m in range(count)]
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=2e-6, atol=0)
        assert scaling in ("none", "pi") or torch.equal(found[:, 0], found[:, 1]), "a smaller grid was stretched"


def test_ntk_keeps_the_first_frequency_and_interpolates_the_last() -> None:
    f, plain = Spectrum.of(8, 10000.0).on([28], [14], "ntk")[:, 0], Spectrum.of(8, 10000.0).frequencies()
    torch.testing.assert_close(f[0], plain[0])
    torch.testing.assert_close(f[-1], plain[-1] / 2)


@pytest.mark.parametrize("grid", [Grid(4, 3, prefix=1), Grid(2, 1, prefix=2, frames=4)])
@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("scaling", ["none", "pi"])
def test_liere_is_the_exponential_of_its_generators(grid: Grid, block: Any, shared: bool, scaling: Any) -> None:
    """R(p) = Σ_k (Σ_a p_a A_a)^k / k!, each A_a written out entry by entry; norms of up to 8, so 60 terms."""
    d = 8
    home = Grid(2, 4, frames=2 if grid.axes == 3 else None)
    e = LieRE(2 * d, 2, home, block=block, shared=shared, scaling=scaling).double()
    torch.nn.init.uniform_(e.generators, -1, 1)
    size = block or d

    def rotation(h: int, place: Place) -> Tensor:
        whole = torch.eye(d, dtype=torch.float64)
        for number in range(d // size):
            power: Any = torch.zeros(size, size, dtype=torch.float64)
            for a, p in enumerate(place):
                reach = 1 if scaling == "pi" else grid.size[a] / home.size[a]
                p = p * reach / max(grid.size[a] - 1, 1)
                entries = iter(e.generators[a, 0 if shared else h, number])
                for i, j in itertools.combinations(range(size), 2):
                    one = torch.zeros(size, size, dtype=torch.float64)
                    one[i, j], one[j, i] = 1, -1
                    power = power + p * next(entries) * one
            term = total = torch.eye(size, dtype=torch.float64)
            for k in range(1, 60):
                term = term @ power / k
                total = total + term
            at = slice(number * size, number * size + size)
            full = torch.nn.functional.pad(total, (at.start, d - at.stop) * 2)
            keep = torch.ones(d, dtype=torch.float64)
            keep[at] = 0
            whole = full + torch.diag(keep) @ whole
        return whole

    q, k, v = (leaf(1, 2, grid.tokens, d) for _ in range(3))

    def turned(x: Tensor) -> Tensor:
        rows = [x[:, :, n] for n in range(grid.prefix)]
        for n, place in enumerate(places(grid)[0]):
            rows.append(
                torch.stack([(x[:, h, grid.prefix + n, None] * rotation(h, place)).sum(-1) for h in (0, 1)], 1)
            )
        return torch.stack(rows, -2)

    sources = {"q": q, "k": k, "v": v, "generators": e.generators}
    same_gradients(attention(q, k, v, grid, [e]), attend(turned(q), turned(k), v), sources)


@pytest.mark.parametrize("grid", [Grid(3, 2, prefix=1), Grid(2, 2, prefix=2, frames=2)])
@pytest.mark.parametrize(("kind", "block"), [("ld", 6), ("ld", 3), ("ap", 2)])
def test_comrope_is_the_exponential_of_blocks_that_commute(grid: Grid, kind: Any, block: int) -> None:
    """R(p) = Σ_k (Σ_a p_a A_a)^k / k!, A_a as whole matrices; norms of up to 12, so 60 terms."""
    d = 6 if block == 6 else 12
    e = ComRoPE(2 * d, 2, Grid(2, 4, frames=2 if grid.axes == 3 else None), kind=kind, block=block).double()
    for parameter in e.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)

    def rotation(h: int, place: Place) -> Tensor:
        power: Any = torch.zeros(d, d, dtype=torch.float64)
        for a, (p, n) in enumerate(zip(place, grid.size, strict=True)):
            for j in range(d // block):
                one = e.generators[h, j] - e.generators[h, j].mT
                has = e.scales[a, j] if e.scales is not None else float(j % grid.axes == a)
                whole = torch.nn.functional.pad(has * one, (block * j, d - block * (j + 1)) * 2)
                power = power + ((p + 0.5) / n - 0.5) * whole
        term = total = torch.eye(d, dtype=torch.float64)
        for k in range(1, 60):
            term = term @ power / k
            total = total + term
        return total

    q, k, v = (leaf(1, 2, grid.tokens, d) for _ in range(3))

    def turned(x: Tensor) -> Tensor:
        rows = [x[:, :, n] for n in range(grid.prefix)]
        for n, place in enumerate(places(grid)[0], grid.prefix):
            rows.append(torch.stack([(x[:, h, n, None] * rotation(h, place)).sum(-1) for h in (0, 1)], 1))
        return torch.stack(rows, -2)

    sources = {"q": q, "k": k, "v": v, **dict(e.named_parameters())}
    same_gradients(attention(q, k, v, grid, [e]), attend(turned(q), turned(k), v), sources)


def test_comrope_in_training_moves_patches_by_at_most_half() -> None:
    for grid in (HOME, VIDEO):
        e = ComRoPE(DIM, HEADS, grid, perturb=3.0)
        still = e.eval().places(grid, None)
        moved = (e.train().places(grid, None) - still) * torch.tensor(grid.size)
        assert 0.2 < moved[:, -2:].abs().mean() <= moved.abs().max() <= 0.5 + 1e-6
        assert grid.axes == 2 or not moved[:, 0].any()
        assert e.eval().crosses
        assert not e.train().crosses
        assert ComRoPE(DIM, HEADS, grid).train().crosses


@pytest.mark.parametrize("scaling", ["none", "yarn"])
def test_vjepa2_repeated_turns_each_feature_by_the_angle_of_its_number_modulo_half(scaling: Any) -> None:
    home, grid, d, part = Grid(2, 2, frames=2), Grid(2, 3, prefix=1, frames=3), 14, 4
    e = build(f"vjepa2(pairing='repeated', scaling={scaling!r})", home, 2 * d)
    q, k, v = (leaf(1, 2, grid.tokens, d) for _ in range(3))
    warm = temperature(scaling, grid.size, home.size)

    def turned(x: Tensor) -> Tensor:
        columns = {c: x[..., c].clone() for c in range(d)}
        for (n, place), a, c in itertools.product(enumerate(places(grid)[0], grid.prefix), range(3), range(part)):
            f = frequency(scaling, c % (part // 2), part // 2, 10000.0, grid.size[a], home.size[a])
            at, partner, sign = part * a + c, part * a + (c ^ 1), 1 if c % 2 else -1
            columns[at][..., n] = warm * (
                x[..., n, at] * math.cos(place[a] * f) + sign * x[..., n, partner] * math.sin(place[a] * f)
            )
        return torch.stack(list(columns.values()), -1)

    same_gradients(
        attention(q, k, v, grid, [e]),
        attend(turned(q), turned(k), v),
        {"q": q, "k": k, "v": v},
        roundings=1024 * SINGLE,
    )


# ---------------------------------------------------------------------------------------------------------------
# What they promise users.

KINDS = [
    "rope1d",
    "rope_axial",
    "rope_axial(layout='half')",
    "rope_pixel",
    "rope_mixed",
    "eva02",
    "dinov3",
    "pixtral",
    "qwen2_vl",
    "visionllama",
    "vjepa2",
    "mrope",
    "golden_gate(max_freq=5.0)",
    "spiral",
    "nd_rope",
]


def forms(e: PositionEncoding, grid: Grid) -> Any:
    (form,) = e.rotations(grid)
    return form


@pytest.mark.parametrize("kind", [*KINDS, "liere", "comrope", "vjepa2(pairing='repeated')"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_waves_of_half_precision_modules_are_those_of_single_precision(
    kind: str, dtype: torch.dtype, autocast: bool
) -> None:
    """Of the same parameters, on 64 x 64 patches; matrices of LieRE on fewer, being dense."""
    grid = Grid(8, 8) if kind in ("liere", "comrope") else Grid(64, 64)
    e = build(kind, Grid(16, 16)).to(dtype)
    expected = forms(copy.deepcopy(e).float(), grid)
    with torch.autocast("cpu", dtype, enabled=autocast):
        found = forms(e, grid)
    for a, b in zip(*(_waves(form) for form in (found, expected)), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 0.002


def _waves(form: Any) -> tuple[Tensor, ...]:
    return (form.matrices,) if isinstance(form, MatrixRotation) else (form.angles.cos(), form.angles.sin())


def test_far_places_are_distinct_in_half_precision() -> None:
    e = build("rope1d", Grid(1, 300)).to(torch.bfloat16)
    angles = forms(e, Grid(1, 301)).angles[0, 255:, 0]
    assert angles.unique().numel() == 46


@pytest.mark.parametrize("kind", [*KINDS, "comrope", "comrope(kind='ap')"])
def test_norms_are_kept_and_scores_depend_on_offsets_alone(kind: str) -> None:
    e, (q, k) = build(kind), torch.randn(2, 1, HEADS, 12, D, dtype=torch.float64)
    at = HOME.coords()[None].double()
    here, there = Points(3, 4, at=at), Points(3, 4, at=at + torch.tensor([3.0, 5.0]))
    if kind == "rope1d":
        here, there = (Grid(3, 12).keep(n[None]) for n in (torch.arange(12), torch.arange(12) + 17))
    close(forms(e, here)(q).norm(dim=-1), q.norm(dim=-1), roundings=16 * SINGLE)
    before, after = (forms(e, grid)(q) @ forms(e, grid)(k).mT for grid in (here, there))
    assert (before - after).abs().max() < 1e-5 * before.abs().max() * 8
    assert (before - q @ k.mT).abs().max() > 1e-2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("rope_pixel", "dinov3")])
def test_the_first_patch_is_not_turned(kind: str) -> None:
    angles = forms(build(kind), Grid(3, 4, prefix=2)).angles
    assert angles.shape[-2] == 12
    assert not angles[..., 0, :].any()
    assert angles[..., 1:, :].any(-1).all()


@pytest.mark.parametrize("kind", [*KINDS, "liere", "comrope", "rope_axial(scaling='yarn')"])
@pytest.mark.parametrize("prefix", [1, 5])
def test_prefix_tokens_are_not_touched(kind: str, prefix: int) -> None:
    grid = Grid(5, 6, prefix)
    x = torch.randn(2, HEADS, grid.tokens, D)
    turned = forms(build(kind), grid)(x)
    assert torch.equal(turned[:, :, :prefix], x[:, :, :prefix])
    assert not torch.equal(turned[:, :, prefix:], x[:, :, prefix:])


@pytest.mark.parametrize("kind", [*KINDS, "liere", "comrope", "rope_axial(scaling='yarn')"])
def test_dropping_patches_before_is_dropping_them_after(kind: str) -> None:
    grid, e = Grid(4, 5, prefix=1), build(kind)
    x = torch.randn(2, HEADS, grid.tokens, D)
    index = torch.stack([torch.randperm(20)[:7] for _ in range(2)])
    at = torch.cat([torch.zeros(2, 1, dtype=torch.long), index + 1], 1)[:, None, :, None].expand(-1, HEADS, -1, D)
    close(forms(e, grid.keep(index))(x.gather(2, at)), forms(e, grid)(x).gather(2, at), roundings=16)


@pytest.mark.parametrize("kind", KINDS)
def test_turning_is_multiplying_complex_numbers_and_none_is_kept(kind: str) -> None:
    e, x = build(kind), torch.randn(2, HEADS, 12, D)
    form = forms(e, HOME)
    assert not any(t.is_complex() for t in (form.angles, *e.state_dict().values()))
    pairs = form.angles.shape[-1]
    turned, rest = x.split([2 * pairs, D - 2 * pairs], -1)
    turned = turned.unflatten(-1, (2, pairs)).mT if e.layout == "half" else turned.unflatten(-1, (pairs, 2))
    product = torch.view_as_complex(turned.contiguous()) * torch.polar(torch.ones(()), form.angles.float())
    product = torch.view_as_real(product)
    product = product.mT.flatten(-2) if e.layout == "half" else product.flatten(-2)
    close(form(x), torch.cat([product, rest], -1), roundings=16)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_whole_images_share_one_encoding(kind: str) -> None:
    e = build(kind)
    for size in ((7, 7), (14, 21), (7, 7), (9, 4), (32, 16)):
        assert torch.equal(forms(e, Grid(*size)).angles, forms(_fresh(kind, e), Grid(*size)).angles)


def _fresh(kind: str, e: PositionEncoding) -> Any:
    twin = build(kind)
    twin.load_state_dict(e.state_dict())
    return twin


@pytest.mark.parametrize("kind", KINDS)
def test_one_query_and_five_keys_need_places(kind: str) -> None:
    e = build(kind)
    q, k = torch.randn(1, HEADS, 1, D), torch.randn(1, HEADS, 5, D)
    with pytest.raises(InputError, match="k "):
        attention(q, k, k, Grid(1, 1), [e])
    keys = Grid(1, 5)
    query = keys.keep(torch.tensor([[3]]))
    alone = attention(q, k, k, query, [e], keys=keys)
    among = attention(q.expand(-1, -1, 5, -1), k, k, keys, [e])
    close(alone, among[:, :, 3:4], roundings=64)


@pytest.mark.parametrize("scaling", ["ntk", "yarn", "yarn_paper"])
def test_waves_that_follow_the_size_do_not_cross_grids(scaling: Any) -> None:
    e, x = build(f"rope_axial(scaling={scaling!r})"), torch.randn(1, HEADS, 12, D)
    with pytest.raises(InputError, match=r"RoPEAxial says nothing of queries .* two grids"):
        attention(x, x[:, :, :6], x[:, :, :6], HOME, [e], keys=Grid(2, 3))


def test_dinov3_crosses_grids_but_while_it_draws() -> None:
    x = torch.randn(1, HEADS, 12, D)

    def cross(e: DINOv3) -> Tensor:
        return attention(x, x[:, :, :6], x[:, :, :6], HOME, [e], keys=Grid(2, 3))

    drawing, plain = DINOv3(DIM, HEADS, HOME), DINOv3(DIM, HEADS, HOME, rescale=None)
    assert torch.equal(cross(drawing.eval()), cross(plain.train()))
    with pytest.raises(InputError, match="two grids"):
        cross(drawing.train())
    one, other = (attention(x, x, x, HOME, [drawing]) for _ in range(2))
    assert not torch.equal(one, other)


def test_nothing_derived_is_saved() -> None:
    learned = {"rope_mixed": ["frequencies"], "nd_rope": ["directions"], "liere": ["generators"]}
    learned["comrope"] = ["generators", "scales"]
    for kind in [*KINDS, "liere", "comrope"]:
        e = build(kind)
        assert list(e.state_dict()) == learned.get(kind, [])
        assert not list(e.buffers())
    assert not any(p.requires_grad for p in build("nd_rope").parameters())


@pytest.mark.parametrize("pairs", [None, 3])
def test_layouts_differ_by_the_order_of_rows_of_projections(pairs: int | None) -> None:
    """Weights and biases of q and k, trained with one layout, for the other; scores stay, and back is back."""
    count = pairs or D // 2
    x, (wq, wk) = torch.randn(12, DIM), torch.randn(2, DIM, DIM)
    b = torch.randn(DIM)
    angles = torch.randn(1, 12, count)

    def scores(wq: Tensor, wk: Tensor, b: Tensor, layout: Any) -> Tensor:
        q, k = ((x @ w.mT + b).unflatten(-1, (HEADS, D)).transpose(0, 1)[None] for w in (wq, wk))
        return Rotation(angles, layout)(q) @ Rotation(angles, layout)(k).mT

    half = [interleaved_to_half(w, HEADS, pairs) for w in (wq, wk, b)]
    close(scores(*half, "half"), scores(wq, wk, b, "interleaved"), roundings=256)
    for new, old in zip(half, (wq, wk, b), strict=True):
        assert torch.equal(half_to_interleaved(new, HEADS, pairs), old)
        assert not torch.equal(new, old)
        left = [one.unflatten(0, (HEADS, D))[:, 2 * count :] for one in (new, old)]
        assert torch.equal(*left), "what does not turn is not reordered"


def test_mixed_frequencies_start_at_right_angles() -> None:
    e = RoPEMixed(4 * 16, 4, HOME, theta=10.0)
    lengths = torch.tensor([10.0 ** (-4 * t / 16) for t in range(4)])
    torch.testing.assert_close(e.frequencies.norm(dim=0), lengths.repeat(4, 2))
    first, second = e.frequencies.unflatten(-1, (2, 4)).unbind(-2)
    assert (first * second).sum(0).abs().max() < 1e-6
    assert (first[:, :, 0] - first[:, :1, 0]).abs().sum(0).min() == 0
    assert first[0, :, 0].unique().numel() == 4


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_simplex_is_regular_and_isotropic(n: int) -> None:
    """The paper's conditions: equal lengths, equal angles, isotropic."""
    corners = simplex(n).double()
    eye, ones = torch.eye(n + 1, dtype=torch.float64), torch.ones(n + 1, n + 1, dtype=torch.float64)
    close(corners @ corners.mT, eye * (1 + 1 / n) - ones / n, roundings=16 * SINGLE)
    close(corners.mT @ corners, torch.eye(n, dtype=torch.float64) * (n + 1) / n, roundings=16 * SINGLE)


@pytest.mark.parametrize("grid", [HOME, VIDEO])
def test_each_head_of_nd_rope_turns_its_simplex(grid: Grid) -> None:
    n = grid.axes
    for turned, own, different in (("head", 1, 3), ("scale", 2, 6), ("none", 1, 1)):
        e = NDRoPE(3 * 16, 3, grid, turned=turned)  # type: ignore[arg-type]
        assert e.corners().shape == (1 if turned == "none" else 3, own, n + 1, n)
        gram = e.corners() @ e.corners().mT
        torch.testing.assert_close(gram, (simplex(n) @ simplex(n).mT).expand_as(gram), rtol=0, atol=1e-6)
        volumes = torch.linalg.det(e.corners()[..., :n, :])
        torch.testing.assert_close(volumes, torch.linalg.det(simplex(n)[:n]).expand_as(volumes))
        assert e.corners()[..., 0, 0].flatten().unique().numel() == different


def test_spiral_has_as_many_directions_as_it_says() -> None:
    for directions in (2, 4, 8):
        waves = SpiralRoPE(2 * 64, 2, HOME, directions=directions, scaling="none").waves(HOME, None)[0]
        angles = torch.atan2(waves[:, 0], waves[:, 1]).remainder(math.pi).div(math.pi / directions)
        numbers = angles.round().remainder(directions)
        assert (angles - angles.round()).abs().max() < 1e-4
        assert numbers.unique().tolist() == list(range(directions))


def test_golden_gate_spreads_its_directions_over_all_heads() -> None:
    """The largest gap between neighbours of 2 * 32 directions is below four times the even one."""
    waves = GoldenGate(2 * 64, 2, HOME).directions(None).flatten(0, 1)
    angles = torch.atan2(waves[:, 0], waves[:, 1]).remainder(math.pi).sort().values
    gaps = torch.cat([angles.diff(), (angles[:1] + math.pi - angles[-1:])])
    assert gaps.max() < 4 * math.pi / 64


def test_raster_order_takes_the_next_row_for_a_neighbour() -> None:
    """As in any 1-D RoPE over an image (RMT's code among them): (0, 3) and (1, 0) are one step apart."""
    angles = forms(RoPE1D(DIM, HEADS, HOME), HOME).angles[0, :, 0].unflatten(0, (3, 4))
    assert angles[1, 0] - angles[0, 3] == 1


@pytest.mark.parametrize("kind", [*KINDS, "rope_axial(scaling='yarn')", "spiral(clamped=True)"])
def test_waves_are_made_on_the_device_of_the_features(kind: str) -> None:
    """Without parameters nothing else tells the device; "meta" stands for any other than the CPU."""
    e = build(kind).to("meta")
    (form,) = e.rotations(Grid(4, 5, prefix=1), torch.device("meta"))
    assert form.angles.device.type == "meta"
    assert form(torch.zeros(1, HEADS, 21, D, device="meta")).device.type == "meta"


class Turns(torch.nn.Module):
    def __init__(self, e: PositionEncoding) -> None:
        super().__init__()
        self.e = e

    def forward(self, x: Tensor) -> Tensor:
        """[b, h, height, width, d]."""
        return forms(self.e, Grid(x.shape[2], x.shape[3]))(x.flatten(2, 3)).reshape(x.shape)


@pytest.mark.parametrize(
    "kind",
    [
        "rope1d(scaling='pi')",
        "rope_axial(scaling='ntk')",
        "rope_axial(scaling='yarn')",
        "rope_pixel",
        "dinov3(normalize='max')",
        "spiral(clamped=True)",
        "liere",
    ],
)
def test_one_exported_program_serves_all_sizes(kind: str) -> None:
    module = Turns(build(kind).float())
    height, width = torch.export.Dim("height", min=2, max=64), torch.export.Dim("width", min=2, max=64)
    example = torch.randn(1, HEADS, 5, 6, D)
    program = torch.export.export(module, (example,), dynamic_shapes={"x": {2: height, 3: width}}).module()
    for size in ((5, 6), (2, 3), (9, 4)):
        x = torch.randn(1, HEADS, *size, D)
        close(program(x), module(x), roundings=64)


@pytest.mark.parametrize(
    ("text", "dim", "message"),
    [
        ("rope_axial", 12, "RoPEAxial: 6 features a head, expected a multiple of 4"),
        ("rope1d", 6, "RoPE1D: 3 features a head, expected a multiple of 2"),
        ("vjepa2", 8, "VJEPA2: 4 features a head, expected at least 6"),
        ("nd_rope", 8, "NDRoPE: 4 features a head, expected at least 6"),
        ("rope_axial(theta=1)", 32, "RoPEAxial: theta=1, expected a number above 1"),
        ("rope_axial(theta=-3.0)", 32, "RoPEAxial: theta=-3.0, expected a positive number"),
        ("rope_axial(layout='pairs')", 32, "RoPEAxial: layout='pairs', expected one of .*'half'"),
        ("rope_axial(scaling='linear')", 32, "RoPEAxial: scaling='linear', expected one of .*'ntk'"),
        ("rope_mixed(scaling='yarn')", 32, r"RoPEMixed: scaling='yarn', expected one of \['none', 'pi'\]"),
        ("liere(scaling='ntk')", 32, r"LieRE: scaling='ntk', expected one of \['none', 'pi'\]"),
        ("liere(block=17)", 32, "LieRE: block=17, expected 2 to 16 features"),
        ("eva02(reference=(16,))", 32, r"EVA02: reference=\(16,\), expected 2 positive integers"),
        ("dinov3(rescale=0.5)", 32, "DINOv3: rescale=0.5, expected a number of at least 1"),
        ("dinov3(shift=0)", 32, "DINOv3: shift=0, expected a positive number"),
        ("dinov3(periods=(2.0, 1.0))", 32, r"DINOv3: periods=\(2.0, 1.0\), expected \(least, most\)"),
        (
            "golden_gate(min_freq=3.0, max_freq=2.0)",
            32,
            "GoldenGate: min_freq=3.0, expected less than max_freq=2.0",
        ),
        ("golden_gate(zero_freqs=1.0)", 32, "GoldenGate: zero_freqs=1.0, expected a share"),
        ("spiral(directions=3)", 32, "SpiralRoPE: directions=3, expected an even number"),
        ("nd_rope(turned='all')", 32, "NDRoPE: turned='all', expected one of"),
        ("rope_pixel(max_freq=1)", 32, "RoPEPixel: max_freq=1, expected at least 2"),
        ("vjepa2(pairing='half')", 32, "VJEPA2: pairing='half', expected one of"),
        ("comrope(block=5)", 32, "ComRoPE: block=5, expected at least 2, and to divide the 16 features a head"),
        ("comrope(kind='ap', block=16)", 32, "ComRoPE: block=16, .* 16 features a head, in 2 parts"),
        ("comrope(perturb=-1.0)", 32, "ComRoPE: perturb=-1.0, expected a number of at least 0"),
        ("mrope(sections=(4, 4))", 32, r"MRoPE: sections=\(4, 4\), expected three numbers"),
        ("pixtral(order='rows')", 32, "Pixtral: order='rows', expected one of"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_built(text: str, dim: int, message: str) -> None:
    (factory,) = parse(text)
    with pytest.raises(InputError, match=message):
        factory(dim, HEADS, HOME)


def test_weights_that_cannot_be_reordered_are_refused() -> None:
    with pytest.raises(InputError, match="weight"):
        interleaved_to_half(torch.zeros(6, 3), num_heads=4)


def test_rope_axial_on_videos_leaves_what_is_left_over() -> None:
    angles = forms(RoPEAxial(DIM, HEADS, VIDEO), VIDEO).angles
    assert angles.shape[-1] == 6
