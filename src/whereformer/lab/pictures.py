"""What an encoding does to a grid, as maps over its patches: to look at in a page or in a terminal."""

import colorsys
import html
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from whereformer.catalog import Factory
from whereformer.encoding import PositionEncoding
from whereformer.facts import DEPTH, DIM, HEADS
from whereformer.forms import BucketBias, BucketValues, Forms
from whereformer.grid import Grid
from whereformer.index import Buckets

GRID = Grid(9, 13)
MARKS = ((4, 6), (1, 2), (7, 10), (0, 12))
"""The patches that maps are seen from; the first is the centre."""
SEED, CONTENTS = 0, 1
"""Seeds of parameters, and of queries, keys and values: the same would make these equal to rows of tables."""
MANY = 6
"""Maps in a row of single features or heads."""
FLATTEST = 0.2
"""How steep the flattest feature that is shown is, beside the steepest."""
LEAST = -100.0
"""A logit below it keeps a key out: it is shown grey, and no scale stretches to it."""

Kind = Literal["signed", "similarity", "size", "buckets"]


@dataclass(frozen=True, eq=False)
class Map:
    """Values at the patches: [height, width], floating, or int64 numbers of buckets."""

    values: Tensor
    label: str
    mark: tuple[int, int] | None = None


@dataclass(frozen=True)
class Row:
    """Maps of one kind, on one scale.

    Args:
        moment: of the encoding.
        title: what is shown.
        kind: "signed" (0 is white), "similarity" (1 is dark), "size" (0 is white), or "buckets".
    """

    moment: str
    title: str
    kind: Kind
    maps: tuple[Map, ...]

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest number of the scale."""
        values = torch.cat([m.values.flatten() for m in self.maps])
        values = values[values >= LEAST]
        low, high = values.min().item(), values.max().item()
        match self.kind:
            case "signed":
                most = max(abs(low), abs(high)) or 1.0
                return -most, most
            case "size":
                return 0.0, high or 1.0
            case "similarity":
                return min(low, 0.99), 1.0
            case "buckets":
                return low, high


@dataclass(frozen=True)
class Picture:
    """Rows of maps, and what must be known to read them."""

    rows: tuple[Row, ...]
    caption: str


@torch.no_grad()
def picture(factory: Factory) -> Picture:
    """What an encoding does to a grid of 9 x 13 patches, in a model of 384 features and 6 heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        encoding = factory(DIM, HEADS, GRID).eval()
        encoding.at_block(0, DEPTH)
        rows = tuple(_rows(encoding))
        notes = [f"{GRID.height} × {GRID.width} patches, {DIM} features in {HEADS} heads"]
        if type(encoding).at_block is not PositionEncoding.at_block:
            notes.append(f"as in the first of {DEPTH} blocks")
        drawn = any(parameter.requires_grad for parameter in encoding.parameters())
        if drawn and any(_silent(row) for row in rows):
            for parameter in encoding.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
            rows = tuple(_rows(encoding))
            notes.append(f"parameters, which start such that nothing is said, drawn from N(0, 1), seed {SEED}")
        elif drawn or any(not parameter.requires_grad for parameter in encoding.parameters()):
            notes.append(f"parameters as they start, seed {SEED}")
        if any(row.moment == "biases" for row in rows) and _reads_content(encoding):
            notes.append(f"all tokens alike, q and k drawn from N(0, 1), seed {CONTENTS}")
    return Picture(rows, "; ".join(notes) + ".")


def _silent(row: Row) -> bool:
    return row.kind != "buckets" and all((m.values - m.values.flatten()[0]).abs().max() < 1e-6 for m in row.maps)


def _rows(encoding: PositionEncoding) -> Iterator[Row]:
    moments = encoding.moments()
    if not moments:
        blank = torch.zeros(GRID.size)
        yield Row("", "nothing is said: all patches are alike", "signed", tuple(_seen(lambda _: blank)))
    if "tokens" in moments:
        yield from _of_tokens(encoding)
    forms = _forms(encoding)
    if "rotations" in moments:
        yield from _of_rotations(encoding, forms)
    if "biases" in moments:
        yield from _of_biases(forms)
    if "values" in moments:
        yield from _of_values(encoding, forms)


def _seen(values: Callable[[int], Tensor]) -> Iterator[Map]:
    """One map from each of `MARKS`; `values` of a patch's number: [patches] or [height, width]."""
    for y, x in MARKS:
        yield Map(values(y * GRID.width + x).reshape(GRID.size), f"from row {y + 1}, column {x + 1}", (y, x))


def _from_centre(values: Iterable[tuple[str, Tensor]]) -> tuple[Map, ...]:
    return tuple(Map(value.reshape(GRID.size), label, MARKS[0]) for label, value in values)


CENTRE = MARKS[0][0] * GRID.width + MARKS[0][1]


def _of_tokens(encoding: PositionEncoding) -> Iterator[Row]:
    def respond(x: Tensor) -> Tensor:
        return encoding.tokens(x, GRID) - x

    zeros = torch.zeros(1, GRID.patches, DIM)
    added = respond(zeros)[0]
    if not torch.allclose(added, respond(torch.randn(1, GRID.patches, DIM))[0], atol=1e-4):
        yield from _of_convolution("tokens", respond)
        return
    rows = torch.nn.functional.normalize(added, dim=-1)
    yield Row(
        "tokens",
        "cosine similarity of what is added to the marked patch and to each patch",
        "similarity",
        tuple(_seen(lambda i: rows @ rows[i])),
    )
    chosen = _telling(added.mT)
    yield Row(
        "tokens",
        f"some of the {DIM} features that are added",
        "signed",
        tuple(Map(added[:, f].reshape(GRID.size), f"feature {f + 1}") for f in chosen),
    )


def _of_convolution(moment: str, respond: Callable[[Tensor], Tensor]) -> Iterator[Row]:
    """Of a linear map of tokens that depends on where they are."""
    nothing = respond(torch.zeros(1, GRID.patches, DIM))

    def impulse(i: int) -> Tensor:
        x = torch.zeros(1, GRID.patches, DIM)
        x[:, i] = 1
        return (respond(x) - nothing)[0].norm(dim=-1) / DIM**0.5

    title = "what the marked patch alone, all ones, adds to each patch: root mean square over features"
    yield Row(moment, title, "size", tuple(_seen(impulse)))
    ones = respond(torch.ones(1, GRID.patches, DIM))[0]
    chosen = _telling(ones.mT)
    yield Row(
        moment,
        "what is added if all patches are ones, in some of the features: the border shows",
        "signed",
        tuple(Map(ones[:, f].reshape(GRID.size), f"feature {f + 1}") for f in chosen),
    )


def _of_rotations(encoding: PositionEncoding, forms: Forms) -> Iterator[Row]:
    heads, dim = encoding.num_heads, encoding.head_dim

    def turned(x: Tensor) -> Tensor:
        """[..., d] to [..., h, patches, d], of length one."""
        x = x[..., None, None, :].expand(*x.shape[:-1], heads, GRID.patches, dim)
        for turn in forms.rotations:
            x = turn(x)
        return torch.nn.functional.normalize(x, dim=-1)

    ones = turned(torch.ones(1, dim))[0]
    products = ones @ ones.mT  # [h, i, j]
    yield Row(
        "rotations",
        "q·k of the marked patch with each patch after turning, q = k = (1, ..., 1)/√d, mean over heads",
        "signed",
        tuple(_seen(lambda i: products.mean(0)[i])),
    )
    if not _alike(products):
        title = "the same from the centre, for each head"
        yield Row("rotations", title, "signed", _from_centre(_by_head(products[:, CENTRE])))
    each = turned(torch.eye(dim))  # [feature, h, patches, d]
    each = (each * each[:, :, CENTRE, None]).sum(-1)  # [feature, h, patches]
    shown = 1 if _alike(each.transpose(0, 1)) else heads
    flat = each[:, :shown].flatten(0, 1)
    names = [f"{f + 1}" + f", head {h + 1}" * (shown > 1) for f in range(dim) for h in range(shown)]
    title = "the cosine of the angle by which single features turn between the centre and each patch"
    yield Row("rotations", title, "signed", _from_centre((f"feature {names[n]}", flat[n]) for n in _telling(flat)))


def _of_biases(forms: Forms) -> Iterator[Row]:
    bias = _bias(forms)
    title = "what is added to the logits of the marked patch with each patch, in the first head"
    yield _level(Row("biases", title, "signed", tuple(_seen(lambda i: bias[0, i]))))
    if not _alike(bias):
        title = "the same from the centre, in each head"
        yield _level(Row("biases", title, "signed", _from_centre(_by_head(bias[:, CENTRE]))))
    yield from _of_buckets("biases", (form.buckets for form in forms.biases if isinstance(form, BucketBias)))


def _level(row: Row) -> Row:
    """Without the mean of each map, which no softmax sees, if next to it the map itself would not be seen."""
    means = [m.values[m.values >= LEAST].mean() for m in row.maps]
    spreads = [m.values[m.values >= LEAST].std(correction=0) for m in row.maps]
    if all(mean.abs() <= 10 * spread for mean, spread in zip(means, spreads, strict=True)):
        return row
    maps = (replace(m, values=m.values - mean) for m, mean in zip(row.maps, means, strict=True))
    return replace(row, title=f"{row.title}; less its mean", maps=tuple(maps))


def _of_values(encoding: PositionEncoding, forms: Forms) -> Iterator[Row]:
    if any(isinstance(term, BucketValues) for term in forms.values):
        buckets = [term.buckets for term in forms.values if isinstance(term, BucketValues)]
        said = [form.buckets for form in forms.biases if isinstance(form, BucketBias)]
        yield from _of_buckets("values", (b for b in buckets if b not in said))
        return

    def respond(x: Tensor) -> Tensor:
        v = x.unflatten(-1, (encoding.num_heads, encoding.head_dim)).transpose(1, 2)
        weights = torch.zeros(1, encoding.num_heads, GRID.patches, GRID.patches)
        out = torch.zeros_like(v)
        for term in encoding.values(v, GRID, GRID):
            out = out + term.dense(weights)
        return out.transpose(1, 2).flatten(-2)

    yield from _of_convolution("values", respond)


def _of_buckets(moment: str, buckets: Iterable[Buckets]) -> Iterator[Row]:
    shown: list[Buckets] = []
    for one in buckets:
        if one in shown:
            continue
        shown.append(one)
        index = one.dense()
        title = "the bucket of the marked patch with each patch, a colour each"
        yield Row(moment, title, "buckets", tuple(_seen(lambda i, index=index: index[i])))


def _forms(encoding: PositionEncoding, seed: int = CONTENTS) -> Forms:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, encoding.num_heads, 1, encoding.head_dim)
    q, k, v = (torch.randn(shape, generator=generator).expand(-1, -1, GRID.patches, -1) for _ in range(3))
    return Forms(
        tuple(encoding.rotations(GRID)),
        tuple(encoding.biases(q, k, GRID, GRID)),
        tuple(encoding.values(v, GRID, GRID)),
    )


def _bias(forms: Forms) -> Tensor:
    """The sum of all biases: [h, i, j]."""
    whole = torch.zeros(1, HEADS, GRID.patches, GRID.patches)
    for form in forms.biases:
        whole = whole + form.dense()
    return whole[0]


def _reads_content(encoding: PositionEncoding) -> bool:
    return not torch.allclose(_bias(_forms(encoding)), _bias(_forms(encoding, CONTENTS + 1)), atol=1e-5)


def _by_head(values: Tensor) -> Iterator[tuple[str, Tensor]]:
    return ((f"head {h + 1}", value) for h, value in enumerate(values))


def _alike(values: Tensor) -> bool:
    """Whether all heads, the first axis, hold the same."""
    return torch.allclose(values, values[:1].expand_as(values), atol=1e-5)


def _telling(maps: Tensor) -> list[int]:
    """A few of [maps, patches] that differ from each other, from the steepest to the flattest worth a look.

    Those that are steeper along one axis and those that are steeper along the other take turns.
    """
    images = maps.reshape(-1, *GRID.size)
    down, along = (images.diff(dim=axis).abs().mean((1, 2)) for axis in (1, 2))
    steep = down + along
    _, same = torch.unique(maps.mul(1e4).round(), dim=0, return_inverse=True)
    left = list({kind: n for n, kind in reversed(list(enumerate(same.tolist())))}.values())  # one of each
    chosen: list[int] = []
    for turn, wanted in enumerate(torch.linspace(1, FLATTEST, min(MANY, len(left))) * steep.max()):
        side = [n for n in left if bool(down[n] > along[n]) == bool(turn % 2)] or left
        chosen.append(min(side, key=lambda n: (round(abs(steep[n] - wanted).item(), 5), n)))
        left.remove(chosen[-1])
    return sorted(chosen)


# ---------------------------------------------------------------------------------------------------------------
# Drawing.

WIDTH, EDGE, GAP, BAR = 860, 22, 16, 74
LEVELS = 32
INK, GREY, OUT = "#1d2530", "#55606e", "#c4c9d1"
MOMENTS = {"tokens": "#2a9d8f", "rotations": "#b57a1e", "biases": "#c8553d", "values": "#6a4c93", "": GREY}
"""The colours of docs/moments.svg."""
NONE = "#f3f4f2"
SIGNED = ("#1b4f8a", "#5b9bc8", "#c3dcec", NONE, "#f6cdb8", "#dd7a5c", "#9e1f2f")
SIZES = {"tokens": ("#a9d8cd", "#2a9d8f", "#06403c"), "values": ("#cbbfdf", "#6a4c93", "#2c1a4b")}


def svg(picture: Picture, title: str) -> str:
    """The picture as SVG, in a few bytes a patch: a line along each run of patches of one colour, in dashes."""
    body: list[str] = []
    top = EDGE
    for row in picture.rows:
        body.append(_text(EDGE, top + 13, _sentence(row), size=14, colour=MOMENTS[row.moment]))
        lines, height = _draw(row, top + 26)
        body += lines
        top += 26 + height + 22
    ramps = dict.fromkeys(_gradient(row) for row in picture.rows if row.kind != "buckets")
    return _page(title, [*ramps, *body], top)


def gallery(pictures: Mapping[str, Picture], title: str) -> str:
    """The first map of each picture, on a scale of its own, with its name."""
    cell = int((WIDTH - 2 * EDGE - GAP * (MANY - 1)) / MANY / GRID.width * 2) / 2
    wide, high = GRID.width * cell + GAP, GRID.height * cell + 34
    body: list[str] = []
    for n, (name, shown) in enumerate(pictures.items()):
        left, top = EDGE + n % MANY * wide, EDGE + n // MANY * high
        row = replace(shown.rows[0], maps=shown.rows[0].maps[:1])
        body += [_map(row.maps[0], row, left, top, cell), _label(left, top + GRID.height * cell, name)]
    return _page(title, body, round(EDGE + -(-len(pictures) // MANY) * high))


def _page(title: str, body: Iterable[str], height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="DejaVu Sans, Verdana, sans-serif">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fff"/>'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", ground, *body, "</svg>\n"])


def _sentence(row: Row) -> str:
    out = any(bool((m.values < LEAST).any()) for m in row.maps)
    return (f"{row.moment}: " if row.moment else "") + row.title + ("; grey: kept out" if out else "")


def _draw(row: Row, top: int) -> tuple[list[str], int]:
    """The lines of one row of maps, and its height in pixels."""
    slots = max(len(MARKS), len(row.maps))
    room = (WIDTH - 2 * EDGE - BAR - GAP * (slots - 1)) / slots
    cell = int(room / GRID.width * 2) / 2
    lines: list[str] = []
    for n, one in enumerate(row.maps):
        left = EDGE + n * (GRID.width * cell + GAP)
        lines += [_map(one, row, left, top, cell), _label(left, top + GRID.height * cell, one.label)]
    if row.kind != "buckets" and row.moment:
        left = EDGE + slots * (GRID.width * cell + GAP)
        lines += _bar(row, left, top, round(GRID.height * cell))
    return lines, round(GRID.height * cell) + 18


def _map(one: Map, row: Row, left: float, top: float, cell: float) -> str:
    place = f'<g transform="translate({left:g} {top:g}) scale({cell:g})">'
    return "\n".join([place, *_cells(one, row), "</g>"])


def _label(left: float, top: float, text: str) -> str:
    return _text(left, top + 15, text, size=11, colour=GREY)


def _cells(one: Map, row: Row) -> Iterator[str]:
    paths: dict[str, list[str]] = {}
    for y in range(GRID.height):
        colours = [_colour(one.values[y, x].item(), row) for x in range(GRID.width)]
        x = 0
        for colour, run in itertools.groupby(colours):
            length = len(list(run))
            paths.setdefault(colour, []).append(f"M{x} {y}h{length}")
            x += length
    yield '<g transform="translate(.04 .5)" stroke-width=".92" stroke-dasharray=".92 .08">'
    for colour, runs in sorted(paths.items()):
        yield f'<path stroke="{colour}" d="{"".join(runs)}"/>'
    yield "</g>"
    if one.mark:
        y, x = one.mark
        box = f'<rect x="{x + 0.06:g}" y="{y + 0.06:g}" width=".88" height=".88" fill="none"'
        yield f'{box} stroke="#fff" stroke-width=".42"/>{box} stroke="#111" stroke-width=".2"/>'


def _gradient(row: Row) -> str:
    stops = _stops(row)
    inside = "".join(f'<stop offset="{n / (len(stops) - 1):.3g}" stop-color="{c}"/>' for n, c in enumerate(stops))
    return f'<linearGradient id="{_ramp_name(row)}" x2="0" y1="1" y2="0">{inside}</linearGradient>'


def _ramp_name(row: Row) -> str:
    return "signed" if row.kind == "signed" else row.moment


def _stops(row: Row) -> tuple[str, ...]:
    return SIGNED if row.kind == "signed" else (NONE, *SIZES[row.moment])


def _bar(row: Row, left: float, top: float, height: int) -> Iterator[str]:
    yield f'<rect x="{left:g}" y="{top:g}" width="10" height="{height:g}" fill="url(#{_ramp_name(row)})"/>'
    low, high = row.ends
    ends = {0.0: high, height - 9.0: low} | ({height / 2 - 4: 0.0} if row.kind == "signed" else {})
    for down, value in ends.items():
        yield _text(left + 15, top + down + 9, _number(value), size=11, colour=GREY)


def _number(value: float) -> str:
    """
    >>> _number(-0.12345), _number(0.0), _number(1.0)
    ('−0.12', '0', '1')
    """
    return f"{value:.2g}".replace("-", "−")


def _colour(value: float, row: Row) -> str:
    if row.kind == "buckets":
        return _of_bucket(int(value))
    if value < LEAST:
        return OUT
    low, high = row.ends
    stops = _stops(row)
    place = round((value - low) / (high - low) * LEVELS) / LEVELS * (len(stops) - 1)
    n = min(int(place), len(stops) - 2)
    one, other = ([int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[n : n + 2])
    return _hex(a + (b - a) * (place - n) for a, b in zip(one, other, strict=True))


def _of_bucket(bucket: int) -> str:
    """Colours that differ for numbers that are near: hues a golden angle apart, light and dark in turn."""
    lightness = (0.8, 0.64, 0.5)[bucket % 3]
    return _hex(255 * c for c in colorsys.hls_to_rgb(bucket * 0.381966 % 1, lightness, 0.45))


def _hex(channels: Iterable[float]) -> str:
    return "#" + "".join(f"{round(channel):02x}" for channel in channels)


def _text(x: float, y: float, text: str, *, size: int, colour: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}">{html.escape(text)}</text>'


def shown(picture: Picture, columns: int) -> Any:
    """The first row of a picture for a terminal that shows colours: a `rich.text.Text`, two columns a patch."""
    from rich.text import Text

    row = picture.rows[0]
    wide = 2 * GRID.width + 3
    maps = row.maps[: max(1, (columns + 3) // wide)]
    text = Text(f"{_sentence(row)}\n", style="")
    for y in range(GRID.height):
        for one in maps:
            for x in range(GRID.width):
                ground = _colour(one.values[y, x].item(), row)
                ink = "black" if sum(bytes.fromhex(ground[1:])) > 3 * 128 else "white"
                text.append("[]" if one.mark == (y, x) else "  ", style=f"bold {ink} on {ground}")
            text.append("   ")
        text.append("\n")
    text.append("".join(one.label.ljust(wide) for one in maps) + "\n", style="dim")
    low, high = row.ends
    if row.kind != "buckets" and row.moment:
        steps = [low + (high - low) * n / 24 for n in range(25)]
        text.append(f"{_number(low)} ")
        for value in steps:
            text.append(" ", style=f"on {_colour(value, row)}")
        text.append(f" {_number(high)}\n")
    return text.append(picture.caption, style="dim")
