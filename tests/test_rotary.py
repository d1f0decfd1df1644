"""Rotary encodings, written again from their papers, angle by angle in float64; and what they promise users."""

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from loops import attend, close, leaf, same_gradients, turn
from whereformer import Grid, InputError, MatrixRotation, Points, PositionEncoding, Rotation, attention, parse
from whereformer.encodings import (
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
from whereformer.encodings._rotary import Spectrum
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
    over = {"separate": size, "max": (max(size),) * 2, "min": (min(size),) * 2}[e.normalise]

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
        wave = e.directions[h, s if e.turned == "scale" else 0, k].tolist()[::-1]
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
    parts = {"RoPE1D": 1, "GoldenGate": 1, "VJEPA2": 3, "NDRoPE": axes + 1}.get(type(e).__name__, axes)
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
    ("dinov3(normalise='max', periods=(0.5, 40.0))", dinov3),
    ("dinov3(normalise='min', base=50.0)", dinov3),
    ("vjepa2", vjepa2),
    ("vjepa2(scaling='pi')", vjepa2),
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


@pytest.mark.parametrize(("text", "paper"), PAPERS, ids=[text for text, _ in PAPERS])
@pytest.mark.parametrize(("home", "queries", "keys"), [g[1:] for g in GRIDS], ids=[g[0] for g in GRIDS])
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
