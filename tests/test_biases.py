"""Biases that are functions of the offset, written again pair by pair in float64 with plain loops."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loops import attend, close, dense, leaf, same_gradients
from spellings import BIASES
from whereformer import Grid, InputError, PositionEncoding, attention, equip, parse
from whereformer.encodings import (
    DPB,
    FIRE,
    KERPLE,
    RMT,
    T5,
    ALiBi,
    ALiBi2D,
    BEiT,
    LeViT,
    LogCPB,
    LookHere,
    MaxViT,
    Swin,
)
from whereformer.forms import LowRankBias, OffsetBias
from whereformer.grid import Points

HEADS, DIM = 3, 12
Place = tuple[int, ...]
Truth = Callable[[Place, Place], Tensor]
"""[heads] of a query's and a key's place."""

HOME = Grid(3, 4, prefix=1)
PAIRS = {
    "home": (HOME, HOME),
    "larger": (Grid(4, 5, prefix=1), Grid(4, 5, prefix=1)),
    "other shape": (Grid(2, 7, prefix=2), Grid(2, 7, prefix=2)),
    "one row": (Grid(1, 5), Grid(1, 5)),
    "crossed": (Grid(3, 4, prefix=1), Grid(5, 2, prefix=2)),
    "subsampled": (Grid(2, 2), Grid(3, 4)),
}
FILMS = {
    "home": (Grid(2, 2, frames=3), Grid(2, 2, frames=3)),
    "crossed": (Grid(2, 2, prefix=1, frames=1), Grid(1, 3, prefix=1, frames=2)),
}


def taps(offset: int, home: int, reach: int, stretch: str) -> list[tuple[int, float]]:
    """Entries of an axis of 2 home − 1 offsets, and their weights, that make one of 2 reach − 1."""
    old, new = 2 * home - 1, 2 * reach - 1
    if old == new:
        return [(offset + home - 1, 1.0)]
    if stretch == "geometric":
        return geometric(offset, home, reach)
    at = (offset + reach - 1 + 0.5) * old / new - 0.5
    if stretch == "bilinear":
        at = max(0.0, at)
    first = math.floor(at)
    t = at - first
    if stretch == "bilinear":
        weights = {0: 1 - t, 1: t}
    else:  # Keys' cubic convolution, a = −3/4
        near, far = (lambda x: 1.25 * x**3 - 2.25 * x**2 + 1), (lambda x: -0.75 * (x**3 - 5 * x**2 + 8 * x - 4))
        weights = {-1: far(t + 1), 0: near(t), 1: near(1 - t), 2: far(2 - t)}
    return [(min(max(first + i, 0), old - 1), w) for i, w in weights.items()]


def geometric(offset: int, home: int, reach: int) -> list[tuple[int, float]]:
    if home == 1:
        return [(0, 1.0)]
    low, high = 0.0, 1000.0  # bisection of the ratio
    for _ in range(200):
        ratio = (low + high) / 2
        low, high = (ratio, high) if sum(ratio**k for k in range(home - 1)) < reach - 1 else (low, ratio)
    places = [sum(low**k for k in range(n)) for n in range(home)]
    sign = (offset > 0) - (offset < 0)
    for n in range(home - 1):
        if abs(offset) <= places[n + 1] + 1e-9:
            t = (abs(offset) - places[n]) / (places[n + 1] - places[n])
            return [(home - 1 + sign * n, 1 - t), (home - 1 + sign * (n + 1), t)]
    return [(home - 1 + sign * (home - 1), 1.0)]


def stretched(table: Tensor, offset: Place, queries: Grid, keys: Grid, stretch: str) -> Tensor:
    """Σ over taps along all axes of table [heads, 2 home − 1, ...]."""
    axes = [
        taps(o, (old + 1) // 2, max(n, m), stretch)
        for o, old, n, m in zip(offset, table.shape[1:], queries.size, keys.size, strict=True)
    ]
    return torch.stack(
        [
            table[(slice(None), *(i for i, _ in chosen))] * math.prod(w for _, w in chosen)
            for chosen in itertools.product(*axes)
        ]
    ).sum(0)


def minus(a: Place, b: Place) -> Place:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def number(place: Place, grid: Grid) -> int:
    """Row by row."""
    n = 0
    for axis, at in enumerate(place):
        n = n * grid.size[axis] + at
    return n


def length(e: Any, i: Place, j: Place, queries: Grid, keys: Grid) -> float:
    match getattr(e, "distance", "euclidean"):
        case "raster":
            return abs(number(i, queries) - number(j, keys))
        case "manhattan":
            return sum(abs(x) for x in minus(i, j))
    return math.sqrt(sum(x * x for x in minus(i, j)))


def heads_of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slopes(heads: int) -> list[float]:
    """The recipe of ALiBi's authors: start and ratio 2^(−2^(3 − log₂ n)); then every second of twice as many."""
    if heads & (heads - 1) == 0:
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    below = 2 ** int(math.log2(heads))
    return slopes(below) + slopes(2 * below)[0::2][: heads - below]


def t5_bucket(x: int, buckets: int, farthest: float) -> int:
    half = buckets // 2
    base, size, exact = half * (x > 0), abs(x), half // 2
    if size < exact:
        return base + size
    logs = math.log(size / exact) / math.log(farthest / exact) * (half - exact)
    return base + min(half - 1, exact + int(logs + 1e-6))


def truth(e: PositionEncoding, queries: Grid, keys: Grid) -> Truth:
    """The paper's b, of places of patches."""
    match e:
        case Swin() | BEiT():
            return lambda i, j: stretched(e.table, minus(i, j), queries, keys, e.stretch)
        case MaxViT():
            mirrored = e.table.flip(*range(1, e.table.ndim))
            return lambda i, j: stretched(mirrored, minus(i, j), queries, keys, e.stretch)
        case LeViT():
            return lambda i, j: levit(e, i, j, queries, keys)
        case LogCPB():
            return lambda i, j: log_cpb(e, minus(i, j))
        case DPB():
            return lambda i, j: dpb(e, minus(i, j))
        case T5():
            return lambda i, j: t5(e, i, j, queries, keys)
        case ALiBi() | ALiBi2D():
            return lambda i, j: -heads_of(slopes(HEADS)) * length(e, i, j, queries, keys)
        case RMT():
            gammas = [1 - 2 ** (-e.start - e.span * h / HEADS) for h in range(HEADS)]
            return lambda i, j: heads_of([math.log(g) * sum(map(abs, minus(i, j))) for g in gammas])
        case KERPLE():
            return lambda i, j: kerple(e, length(e, i, j, queries, keys))
        case FIRE():
            return lambda i, j: fire(e, length(e, i, j, queries, keys), queries, keys)
        case LookHere():
            return lambda i, j: look_here(e, *minus(i, j))
    raise AssertionError(e)


def levit(e: LeViT, i: Place, j: Place, queries: Grid, keys: Grid) -> Tensor:
    """Stretched between tables mirrored at offset 0; shrinking, queries lie on the keys' grid."""
    if e.stride > 1 and queries is not keys:
        i = (*i[:-2], *(e.stride * at for at in i[-2:]))
        queries = Grid(*(e.stride * (n - 1) + 1 for n in queries.size[-2:]), frames=queries.frames)
    chosen = [
        [(abs(at - old + 1), w) for at, w in taps(o, old, max(n, m), e.stretch)]
        for o, old, n, m in zip(minus(i, j), e.table.shape[1:], queries.size, keys.size, strict=True)
    ]
    terms = [
        e.table[(slice(None), *(at for at, _ in tap))] * math.prod(w for _, w in tap)
        for tap in itertools.product(*chosen)
    ]
    return torch.stack(terms).sum(0)


def log_cpb(e: LogCPB, offset: Place) -> Tensor:
    logs = [
        math.copysign(1, x) * math.log2(1 + 8 * abs(x) / max(1, m - 1)) / math.log2(8)
        for x, m in zip(offset, e.pretrained, strict=True)
    ]
    units = []
    for unit in range(e.b1.shape[0]):
        unit_in = sum((e.w1[unit, a] * x for a, x in enumerate(logs)), e.b1[unit])
        units.append(unit_in.clamp(min=0))
    out = [sum(e.w2[h, unit] * value for unit, value in enumerate(units)) for h in range(HEADS)]
    return torch.stack([16 / (1 + (-x).exp()) for x in out])  # type: ignore[union-attr]


def dpb(e: DPB, offset: Place) -> Tensor:
    def linear(x: list[Tensor], n: int) -> list[Tensor]:
        weight, bias = e.linear[n].weight, e.linear[n].bias
        return [sum((w * x for w, x in zip(row, x, strict=True)), b) for row, b in zip(weight, bias, strict=True)]  # type: ignore[call-overload]

    x = linear([torch.tensor(float(o), dtype=torch.float64) for o in offset], 0)
    for n in range(3):
        mean = sum(x) / len(x)
        variance = sum((one - mean) ** 2 for one in x) / len(x)
        normal = [(one - mean) / (variance + 1e-5).sqrt() for one in x]  # type: ignore[union-attr]
        scale, shift = e.norm[n].weight, e.norm[n].bias
        x = [(s * one + t).clamp(min=0) for s, one, t in zip(scale, normal, shift, strict=True)]  # type: ignore[arg-type]
        x = linear(x, n + 1)
    return torch.stack(x)


def t5(e: T5, i: Place, j: Place, queries: Grid, keys: Grid) -> Tensor:
    if e.method == "raster":
        return e.table[:, t5_bucket(number(j, keys) - number(i, queries), e.buckets, e.farthest)]
    at = [t5_bucket(x, e.buckets, e.farthest) for x in minus(j, i)]
    if e.method == "product":
        return e.table[(slice(None), *at)]
    return torch.stack([e.table[axis, :, t] for axis, t in enumerate(at)]).sum(0)


def kerple(e: KERPLE, x: float) -> Tensor:
    """The released code moves parameters to their bounds; here one reads what it would read."""

    def bounded(r: Tensor, most: float = math.inf) -> Tensor:
        return torch.stack([r[h] - r[h].item() + min(max(r[h].item(), 0.01), most) for h in range(HEADS)])

    r1 = bounded(e.r1)
    if e.kernel == "log":
        return -r1 * (1 + bounded(e.r2) * x).log()
    return -r1 * (x ** bounded(e.r2, 2) if x else 0 * e.r2)


def fire(e: FIRE, x: float, queries: Grid, keys: Grid) -> Tensor:
    reach = [max(n, m) - 1 for n, m in zip(queries.size, keys.size, strict=True)]
    extent = {
        "euclidean": math.sqrt(sum(r * r for r in reach)),
        "manhattan": sum(reach),
        "raster": max(math.prod(queries.size), math.prod(keys.size)) - 1,
    }[e.distance]
    threshold = e.multiplier.abs() * e.threshold
    longest = threshold if threshold > extent else torch.tensor(float(extent), dtype=torch.float64)
    relative = (1 + e.c.abs() * x).log() / ((1 + e.c.abs() * longest).log() + 1e-6)
    units = [(w * relative + b).clamp(min=0) for w, b in zip(e.w1, e.b1, strict=True)]
    return torch.stack([sum((w * u for w, u in zip(e.w2[h], units, strict=True)), e.b2[h]) for h in range(HEADS)])


def look_here(e: LookHere, dy: int, dx: int) -> Tensor:
    """dy and dx are query − key: a key above has dy > 0, one to the left dx > 0."""
    above, left = dy, dx
    sights = {
        "corners-triangles-none": [above >= 0 <= left, above >= 0 >= left, above <= 0 <= left],
        "halves": [above >= 0, above <= 0, left >= 0],
        "eighths1-diagonals": [
            above >= abs(dx) and left >= 0,
            -above >= abs(dx) and left >= 0,
            left >= abs(dy) and above >= 0,
        ],
    }[e.views]
    assert e.layer is not None
    assert e.depth is not None
    layer_slope = 1.5 - e.layer / max(1, e.depth - 1)
    far = 2 * layer_slope * 0.5 * math.hypot(dy, dx)
    return heads_of([-far if seen else -1024.0 for seen in sights])


def paper(e: PositionEncoding, queries: Grid, keys: Grid) -> Callable[[int, int], Tensor | float]:
    """b of tokens; pairs with a prefix token have none, but in BEiT."""
    b = truth(e, queries, keys)
    ours, theirs = ([None] * g.prefix + list(itertools.product(*map(range, g.size))) for g in (queries, keys))

    def bias(i: int, j: int) -> Tensor | float:
        query, key = ours[i], theirs[j]
        if query is not None and key is not None:
            return b(query, key)
        if not isinstance(e, BEiT):
            return 0.0
        assert e.prefix is not None
        return e.prefix[:, 0 if key is not None else 1 if query is not None else 2]

    return bias


def build(text: str, home: Grid, heads: int = HEADS, dim: int = DIM) -> Any:
    (factory,) = parse(text)
    encoding = factory(dim, heads, home).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding


def said(encoding: PositionEncoding, queries: Grid, keys: Grid | None = None, batch: int = 1) -> Tensor:
    """All its biases, of anything: [1 or batch, heads, queries, keys]."""
    keys = queries if keys is None else keys
    dtype = next((p.dtype for p in encoding.parameters()), torch.float64)
    q, k = (
        torch.zeros(batch, encoding.num_heads, g.tokens, encoding.head_dim, dtype=dtype) for g in (queries, keys)
    )
    terms = [bias.dense() for bias in encoding.biases(q, k, queries, keys)]
    total = sum(terms[1:], start=terms[0])
    return total if total.ndim == 4 else total[None]


def wanted(encoding: PositionEncoding, queries: Grid, keys: Grid) -> Tensor:
    """The same from the paper: [heads, queries, keys]."""
    bias = paper(encoding, queries, keys)
    return dense(queries.tokens, keys.tokens, lambda i, j: torch.ones(HEADS, dtype=torch.float64) * bias(i, j))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("text", BIASES)
def test_is_its_equation(text: str, pair: str) -> None:
    queries, keys = PAIRS[pair]
    encoding = build(text, HOME)
    close(said(encoding, queries, keys)[0], wanted(encoding, queries, keys))


@pytest.mark.parametrize("text", BIASES)
def test_attends_as_its_equation_with_all_gradients(text: str) -> None:
    for queries, keys in (PAIRS["home"], PAIRS["crossed"]):
        encoding = build(text, HOME)
        q, k, v = (leaf(1, HEADS, g.tokens, DIM // HEADS) for g in (queries, keys, keys))
        found = attention(q, k, v, queries, [encoding], keys=keys)
        expected = attend(q, k, v, paper(encoding, queries, keys))
        same_gradients(found, expected, {"q": q, "k": k, "v": v, **dict(encoding.named_parameters())})


@pytest.mark.parametrize("pair", FILMS)
@pytest.mark.parametrize("text", [text for text in BIASES if not text.startswith("lookhere")])
def test_is_its_equation_in_a_video(text: str, pair: str) -> None:
    home = FILMS["home"][0]
    text = text.replace("(8, 6)", "(2, 8, 6)")
    encoding = build(text, Grid(home.height, home.width, prefix=1, frames=home.frames))
    queries, keys = FILMS[pair]
    close(said(encoding, queries, keys)[0], wanted(encoding, queries, keys))


@pytest.mark.parametrize("text", BIASES)
def test_of_kept_patches_is_what_it_says_of_them_in_the_whole(text: str) -> None:
    """On both sides, another choice for each image; on the home grid and on another."""
    encoding = build(text, HOME)
    for grid in (HOME, Grid(4, 5, prefix=1)):
        index = torch.stack([torch.randperm(grid.patches)[:6] for _ in range(2)])
        kept = grid.keep(index)
        whole = said(encoding, grid)[0]
        tokens = torch.nn.functional.pad(index + grid.prefix, (grid.prefix, 0))
        among = torch.stack([whole[:, t][:, :, t] for t in tokens])
        close(said(encoding, kept, batch=2).expand_as(among), among)
        if not (isinstance(encoding, LeViT) and encoding.stride > 1):
            of_all = torch.stack([whole[:, t] for t in tokens])
            close(said(encoding, kept, grid, batch=2).expand_as(of_all), of_all)


TABLES = ("swin", "maxvit", "beit", "levit")


@pytest.mark.parametrize("text", BIASES)
def test_between_patches_functions_serve_and_tables_refuse(text: str) -> None:
    encoding = build(text, HOME)
    whole = HOME.coords()[None]
    if text.startswith(TABLES) or text == "alibi" or "raster" in text:
        with pytest.raises(InputError, match="between patches"):
            said(encoding, Points(3, 4, 1, at=whole + 0.5))
        return
    close(said(encoding, Points(3, 4, 1, at=whole.double())), said(encoding, HOME))
    moved = Points(3, 4, 1, at=whole.double() + torch.tensor([0.25, -3.5], dtype=torch.float64))
    close(said(encoding, moved), said(encoding, HOME))


# What each starts from


@pytest.mark.parametrize(
    ("text", "name", "std"),
    [("swin(std=.04)", "table", 0.04), ("maxvit", "table", 0.02), ("t5", "table", 64**-0.5)],
)
def test_starts_with_its_deviation(text: str, name: str, std: float) -> None:
    """Over 4,000 samples: the deviation's own is below 1.2 %."""
    encoding = parse(text)[0](64, 64, Grid(12, 12))
    table = encoding.get_parameter(name)
    assert table.numel() > 4000
    assert abs(table.std().item() / std - 1) < 5 * 0.012


def test_starts_at_zero() -> None:
    for text in ("beit", "levit"):
        assert not any(p.any() for p in parse(text)[0](8, 2, HOME).parameters())


def test_starts_within_bounds() -> None:
    for kernel, most in (("log", (2, 1)), ("power", (1, 2))):
        encoding = KERPLE(4096, 4096, HOME, kernel=kernel)  # type: ignore[arg-type]
        for r, top in zip((encoding.r1, encoding.r2), most, strict=True):
            assert 0 <= r.min().item() < 0.01 * top
            assert 0.99 * top < r.max().item() <= top


def test_is_counted() -> None:
    """Multiply-adds of the MLPs, over (2 · 3 − 1)(2 · 4 − 1) = 35 offsets."""
    assert LogCPB(12, 3, HOME, hidden=8).macs(HOME) == 35 * (2 * 8 + 8 * 3)
    assert DPB(12, 3, HOME, width=5).macs(HOME) == 35 * (2 * 5 + 5 * 5 + 5 * 5 + 5 * 3)
    assert FIRE(12, 3, HOME).macs(HOME) == 35 * (32 + 32 * 3)
    assert FIRE(12, 3, HOME, distance="raster").macs(HOME) == 23 * (32 + 32 * 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swin(stretch='nearest')", "Swin: stretch='nearest', expected one of"),
        ("swin(std=0.0)", "Swin: std=0.0"),
        ("maxvit(stretch=None)", "MaxViT: stretch=None"),
        ("beit(stretch='cubic')", "BEiT: stretch='cubic'"),
        ("levit(stride=0)", "LeViT: stride=0, expected a positive integer"),
        ("log_cpb(pretrained=7)", "LogCPB: pretrained=7, expected 2 positive integers"),
        ("log_cpb(pretrained=(7,))", r"LogCPB: pretrained=\(7,\), expected 2"),
        ("log_cpb(hidden=0)", "LogCPB: hidden=0"),
        ("dpb(width=1)", "DPB: width=1, expected an integer of at least 2"),
        ("t5(method='cross')", "T5: method='cross'"),
        ("t5(buckets=30)", "T5: buckets=30, expected a positive multiple of 4"),
        ("t5(farthest=8)", "T5: farthest=8, expected a number above"),
        ("alibi(distance='l2')", "ALiBi: distance='l2', expected one of"),
        ("rmt(start=0)", "RMT: start=0"),
        ("kerple(kernel='linear')", "KERPLE: kernel='linear'"),
        ("fire(threshold=0)", "FIRE: threshold=0"),
        ("fire(hidden=2.5)", "FIRE: hidden=2.5"),
        ("lookhere(views='corners-east')", "LookHere: views='corners-east', expected some of"),
        ("lookhere(layer=12, depth=12)", "LookHere: layer=12 of depth=12"),
        ("lookhere(layer=1)", "LookHere: layer=1 of depth=None"),
        ("lookhere(layer_slopes=1.5)", "LookHere: layer_slopes=1.5, expected two numbers"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    (factory,) = parse(text)
    with pytest.raises(InputError, match=message):
        factory(12, 3, HOME)


def test_lookhere_and_beit_say_what_they_miss() -> None:
    with pytest.raises(InputError, match=r"LookHere: grid=.*, but it is defined on images"):
        LookHere(12, 3, Grid(2, 2, frames=2))
    with pytest.raises(InputError, match="LookHere: which layer is it"):
        said(LookHere(12, 3, HOME), HOME)
    with pytest.raises(InputError, match=r"BEiT: built for .*prefix=0.*, without numbers for the prefix tokens"):
        said(BEiT(12, 3, Grid(3, 4)), HOME)


# What users of other libraries have met


def test_every_offset_has_a_number_of_its_own() -> None:
    """With the wrong stride, 2 x 3 patches have 11 numbers for 15 offsets."""
    for height, width in itertools.product(range(1, 7), repeat=2):
        encoding = Swin(2, 1, Grid(height, width))
        count = (2 * height - 1) * (2 * width - 1)
        encoding.table.data = torch.arange(float(count)).reshape(1, 2 * height - 1, 2 * width - 1)
        bias = said(encoding, Grid(height, width))[0]
        assert bias.unique().numel() == count
        assert torch.equal(bias + bias.mT, torch.full_like(bias, count - 1))


def test_t5_buckets_are_known_numbers() -> None:
    encoding = T5(2, 1, Grid(1, 1), method="raster")
    encoding.table.data = torch.arange(32.0)[None]
    row = said(encoding, Grid(1, 401))[0, 0, 200]  # keys 200 before to 200 behind
    known = {0: 0, -1: 1, 1: 17, -8: 8, 8: 24, -128: 15, 128: 31, -200: 15, 200: 31}
    assert {x: int(row[200 + x]) for x in known} == known
    assert (row[:201].diff() <= 0).all()
    assert (row[201:].diff() >= 0).all()
    in_half = encoding.bfloat16()
    assert torch.equal(said(in_half, Grid(1, 401))[0, 0, 200].float(), row)


def test_beit_on_its_own_grid_stays_what_it_was_after_others() -> None:
    encoding = build("beit", Grid(14, 14, prefix=1)).float()
    before = said(encoding, Grid(14, 14, prefix=1))
    for size in ((8, 8), (10, 12), (20, 24)):
        assert said(encoding, Grid(*size, prefix=1)).shape[-1] == size[0] * size[1] + 1
    assert torch.equal(said(encoding, Grid(14, 14, prefix=1)), before)
    mirrored = encoding.table.data + encoding.table.data.flip(1, 2)
    encoding.table.data = mirrored
    bias = said(encoding, Grid(20, 24, prefix=1))[0, :, 1:, 1:]
    close(bias, bias.mT, roundings=64)


def test_in_cross_attention_both_sides_must_be_told() -> None:
    q, kv = torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 5, 4)
    with pytest.raises(InputError, match="5"):
        attention(q, kv, kv, Grid(1, 1), [Swin(12, 3, Grid(1, 5))])
    attention(q, kv, kv, Grid(1, 1), [Swin(12, 3, Grid(1, 5))], keys=Grid(1, 5))


@pytest.mark.parametrize("text", ["swin", "beit", "levit", "log_cpb(hidden=8)", "t5", "kerple"])
def test_the_fused_kernel_gets_the_bias_and_its_gradient(text: str) -> None:
    encoding = build(text, HOME).float()
    q, k, v = (leaf(2, HEADS, HOME.tokens, 4, dtype=torch.float32) for _ in range(3))
    fused, plain = (attention(q, k, v, HOME, [encoding], backend=b) for b in ("sdpa", "reference"))
    same_gradients(fused, plain, {"q": q, **dict(encoding.named_parameters())})
    bare = attention(q, k, v, HOME)
    assert not torch.allclose(fused, bare, atol=1e-2)


def test_the_gradient_of_a_table_is_deterministic() -> None:
    encoding = build("swin", HOME).float()
    q = leaf(1, HEADS, HOME.tokens, 4, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(attention(q, q, q, HOME, [encoding]).square().sum(), encoding.table)[0]
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)


def test_biases_are_tables_of_offsets_and_never_tokens_squared() -> None:
    grid = Grid(60, 60, prefix=1)
    q = torch.zeros(1, 3, grid.tokens, 4)
    for text in BIASES:
        encoding = parse(text)[0](12, 3, HOME)
        for form in encoding.biases(q, q, grid, grid):
            assert isinstance(form, OffsetBias | LowRankBias)
            biggest = form.table.numel() if isinstance(form, OffsetBias) else form.right.numel()
            assert biggest <= 3 * (2 * 60 - 1) ** 2


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def test_irpe_on_values_makes_nothing_of_tokens_squared_times_features() -> None:
    """As the released code does: 4 GB on 64 x 64 patches of 64 features."""
    grid, features = Grid(30, 30), 32
    (factory,) = parse("irpe(on='qkv')")
    q = torch.randn(1, 1, grid.tokens, features)
    with Largest() as largest:
        attention(q, q, q, grid, [factory(features, 1, grid)], backend="reference")
    assert grid.tokens**2 <= largest.numel < 2 * grid.tokens**2


def test_equip_tells_lookhere_its_layer() -> None:
    """A port built every layer as if it were the only one, of slope 1.5."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=24, num_heads=12, img_size=48)
    equip(model, "lookhere")
    found = [block.attn.encodings[0] for block in model.blocks]
    assert [(e.layer, e.depth) for e in found] == [(0, 3), (1, 3), (2, 3)]
    grid = Grid(3, 3, prefix=1)
    one_away = [said(e, grid)[0, 8, 1, 2].item() for e in found]  # a head that sees all
    assert one_away == [-2 * slope * 0.25 for slope in (1.5, 1.0, 0.5)]
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 1000)
    given = LookHere(24, 12, grid, layer=1, depth=2)
    given.at_block(5, 12)
    assert (given.layer, given.depth) == (1, 2)


EXPORTED = [
    "swin",
    "beit",
    "levit",
    "log_cpb(hidden=8)",
    "t5(method='raster')",
    "lookhere(layer=3, depth=12)",
    "fire",
]
"""One of each kind of code."""


class Attends(torch.nn.Module):
    """An image to attention under several biases at once."""

    def __init__(self) -> None:
        super().__init__()
        self.encodings = torch.nn.ModuleList(build(text, HOME) for text in EXPORTED)

    def forward(self, image: Tensor) -> Tensor:
        grid = Grid(image.shape[-2], image.shape[-1])
        q = image.flatten(2).mT.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return attention(q, q, q, grid, list(self.encodings))  # type: ignore[arg-type]


def test_exported_with_any_height_and_width() -> None:
    """In one program, on sizes it was not exported with."""
    model = Attends().eval()
    sizes = {axis: torch.export.Dim(name, min=2, max=40) for axis, name in ((2, "height"), (3, "width"))}
    image = torch.randn(1, DIM, 5, 7, dtype=torch.float64)
    exported = torch.export.export(model, (image,), dynamic_shapes=(sizes,)).module()
    for height, width in ((3, 4), (8, 3), (2, 9)):
        image = torch.randn(1, DIM, height, width, dtype=torch.float64)
        close(exported(image), model(image), roundings=2048)
