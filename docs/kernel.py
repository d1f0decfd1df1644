"""Draw docs/kernel.svg, how the CPU kernel looks up; with --check, only say whether it is up to date."""

import argparse
import html
import math
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch

from whereformer.index import Piecewise, Separable
from whereformer.lab.pictures import GREY, INK, MOMENTS, SIZES

PICTURE = Path(__file__).parent / "kernel.svg"
TITLE = (
    "One query's way through the kernel: scores by bucket, a row of logits along lines, weights, sums by bucket"
)

SIZE, TILE = 14, 6  # patches along an axis, queries worked on at a time
Y, X = 8, 4  # of the query that is followed, the first of its tile
G = Piecewise(1.9, 3.8, 15.2)
MAPPING = Separable(G, G)
SIDE = 2 * G.reach + 1  # 7: lines, and buckets in a line

AXIS = range(SIZE)
LINE = [int(n) // SIDE for n in MAPPING.rows(Y - torch.arange(SIZE))]
"""Of each row of keys."""
PLACES = MAPPING.columns(torch.arange(SIZE - 1, -SIZE, -1)).tolist()
"""The buckets along a line, less its first: x − x' = 13 ... −13."""
START = SIZE - 1 - X
SEEN = PLACES[START : START + SIZE]
"""What the query sees of a line."""


def weight(y: int, x: int) -> float:
    """Of a key, as a softmax might make it: large near the query, and near a second place."""
    near = math.exp(-((y - Y) ** 2 + (x - X) ** 2) / 9)
    return near + 0.8 * math.exp(-((y - 3) ** 2 + (x - 10) ** 2) / 5) + 0.05


WEIGHTS = [[weight(y, x) for x in AXIS] for y in AXIS]
ROWS = {
    line: [sum(column) for column in zip(*(WEIGHTS[y] for y in AXIS if LINE[y] == line), strict=True)]
    for line in LINE
}
"""The weights of each stretch of rows on one line, added up."""
SUMS = {
    line: [sum(w for w, b in zip(row, SEEN, strict=True) if b == c) for c in range(SIDE)]
    for line, row in ROWS.items()
}

STRETCHES = [(line, len(list(rows))) for line, rows in groupby(LINE)]

# ---------------------------------------------------------------------------------------------------------------
# Drawing.

WIDTH, HEIGHT, LEFT = 860, 390, 364
PART, ROW = 65, 33  # pixels of a line's buckets, and of a row of keys
CHOSEN = 5  # the line that is followed
NO_TOKEN = "#e3e6ea"
HUES = (345, 28, 52, 130, 190, 225, 280)


def bucket(line: int, column: int) -> str:
    """A hue for each line, light to dark along it."""
    hue, share = HUES[line], column / (SIDE - 1)
    chroma, value = 0.22 + 0.48 * share, 0.97 - 0.27 * share
    channels = ((n + hue / 60) % 6 for n in (5, 3, 1))
    return colour(255 * value * (1 - chroma * max(0, min(n, 4 - n, 1))) for n in channels)


def shade(value: float, most: float) -> str:
    ends = ("#f3f4f2", SIZES["values"][1])
    low, high = ([int(end[n : n + 2], 16) for n in (1, 3, 5)] for end in ends)
    share = round(16 * (value / most) ** 0.5) / 16
    return colour(a + (b - a) * share for a, b in zip(low, high, strict=True))


def colour(channels: Iterable[float]) -> str:
    return "#" + "".join(f"{round(c):02x}" for c in channels)


ALL = [[bucket(line, column) for column in range(SIDE)] for line in range(SIDE)]


def text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{fill}">{html.escape(words)}</text>'


def cells(x: float, y: float, colours: Iterable[str], *, wide: float, high: float) -> str:
    """A strip of cells from the left."""
    drawn: dict[str, str] = {}
    at = x
    for fill, run in groupby(colours):
        long = len(list(run)) * wide
        drawn[fill] = drawn.get(fill, "") + f"M{at:g} {y + high / 2:g}h{long:g}"
        at += long
    paths = "".join(f'<path stroke="{fill}" d="{path}"/>' for fill, path in drawn.items())
    paths = f'<g stroke-width="{high:g}">{paths}</g>'
    if wide < 4:
        return paths
    gaps = "".join(f"M{x + n * wide:g} {y:g}v{high:g}" for n in range(1, round((at - x) / wide)))
    return paths + f'<path stroke="#fff" stroke-width=".7" d="{gaps}"/>'


def box(x: float, y: float, wide: float, high: float, *, line: float = 1.5, ink: str = "#111") -> str:
    place = f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="none"'
    return f'{place} stroke="{ink}" stroke-width="{line:g}"/>'


def arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.4" marker-end="url(#tip)"/>'


def step(number: int, y: float, words: str, moment: str) -> list[str]:
    fill = MOMENTS[moment]
    return [
        f'<circle cx="{LEFT + 9}" cy="{y - 4:g}" r="9" fill="{fill}"/>',
        text(LEFT + 9, y + 0.5, str(number), fill="#fff", anchor="middle"),
        text(LEFT + 25, y, words, size=13),
    ]


def keys(left: float, top: float, cell: float) -> list[str]:
    """A block of keys, as the query sees it."""
    drawn = [text(left, top - 26, "a block of keys, as one query of a tile sees it", size=13)]
    drawn.append(cells(left, top - 14, [NO_TOKEN], wide=cell, high=cell - 4))
    drawn.append(text(left + cell + 6, top - 5, "a prefix token: bucket 49", size=11, fill=GREY))
    for y in AXIS:
        colours = [bucket(LINE[y], column) for column in SEEN]
        drawn.append(cells(left, top + y * cell, colours, wide=cell, high=cell - 0.7))
    drawn += [box(left + X * cell, top + Y * cell, TILE * cell, cell, line=1.2, ink="#fff")]
    drawn += [box(left + (X + n) * cell, top + Y * cell, cell, cell, line=0.8) for n in range(1, TILE)]
    drawn += [box(left + X * cell, top + Y * cell, cell, cell, line=2.6)]
    right, at = left + SIZE * cell + 5, top
    for line, rows in STRETCHES:
        end = at + rows * cell
        drawn.append(f'<path d="M{right:g} {at + 2:g}h4V{end - 2:g}h-4" fill="none" stroke="{GREY}"/>')
        drawn.append(text(right + 9, (at + end) / 2 + 4, f"line {line}", size=11, fill=GREY))
        at = end
    below = top + SIZE * cell
    drawn.append(
        text(left, below + 18, "six queries are a tile; the first is followed on the right", size=11, fill=GREY)
    )
    words = "rows of keys that see one line: a stretch"
    drawn.append(text(left, below + 33, words, size=11, fill=GREY))
    return drawn


def by_bucket(top: float, colours: Iterable[Iterable[str]], last: str, *, high: float = 14) -> list[str]:
    """Fifty cells: seven for each line, and the prefix's."""
    drawn = [cells(LEFT + n * PART, top, line, wide=9, high=high) for n, line in enumerate(colours)]
    return [*drawn, cells(LEFT + SIDE * PART, top, [last], wide=9, high=high)]


def row_of_keys(top: float, colours: Iterable[Iterable[str]], prefix: str) -> list[str]:
    """A row of 197: the prefix token, then 14 rows of keys."""
    rows = [cells(LEFT + 9 + y * ROW, top, row, wide=2.25, high=14) for y, row in enumerate(colours)]
    return [cells(LEFT, top, [prefix], wide=6, high=14), *rows]


def logits() -> list[str]:
    """How a query's scores become its row of logits."""
    body = step(1, 32, "its scores, one for each of 50 buckets: q_i · table", "biases")
    body += by_bucket(42, ALL, NO_TOKEN)
    chosen = LEFT + CHOSEN * PART
    body += [box(chosen - 1, 41, PART, 16), arrow(f"M{chosen + 41} 59V98")]
    body += step(2, 88, f"line {CHOSEN}: 27 places; its column sees a slice of 14", "biases")
    body.append(cells(LEFT, 101, [bucket(CHOSEN, c) for c in PLACES], wide=17, high=14))
    body.append(box(LEFT + START * 17, 100, SIZE * 17, 16))
    middles = (LEFT + n * 17 + 8.5 for n in range(len(PLACES)))
    numbers = "".join(f'<text x="{x:g}" y="128">{c}</text>' for x, c in zip(middles, PLACES, strict=True))
    body.append(f'<g font-size="9" fill="{GREY}" text-anchor="middle">{numbers}</g>')
    body += step(3, 158, "its row of 197 logits: one permutation for each row of keys", "biases")
    return body + row_of_keys(168, [[bucket(LINE[y], c) for c in SEEN] for y in AXIS], NO_TOKEN)


def weights() -> list[str]:
    """How its row of weights becomes sums by bucket."""
    body = step(4, 214, "+ q_i · k_j, then softmax: its weights, which multiply the v_j", "values")
    most = max(map(max, WEIGHTS))
    body += row_of_keys(224, [[shade(w, most) for w in row] for row in WEIGHTS], shade(0.3, most))
    body += step(5, 270, "the rows of each stretch added up", "values")
    most, row = max(map(max, ROWS.values())), 0
    for n, (line, rows) in enumerate(STRETCHES):
        body.append(box(LEFT + 8.5 + ROW * row, 223.5, ROW * rows - 1, 15, line=0.8, ink=GREY))
        left, wide = LEFT + n * PART, 4.5
        body.append(cells(left, 280, [shade(w, most) for w in ROWS[line]], wide=wide, high=14))
        body.append(cells(left, 295, [bucket(line, c) for c in SEEN], wide=wide, high=4))
        row += rows
    body += step(6, 330, "neighbours in one bucket added up: 50 sums, which multiply the table", "values")
    most = max(map(max, SUMS.values()))
    body += by_bucket(340, [[shade(w, most) for w in SUMS[line]] for line in range(SIDE)], shade(0.3, most))
    return body + by_bucket(355, ALL, NO_TOKEN, high=4)


def picture() -> str:
    tip = f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/>'
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="DejaVu Sans, Verdana, sans-serif">',
            f"<title>{html.escape(TITLE)}</title>",
            f'<defs><marker id="tip" {size} orient="auto">{tip}</marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#fff"/>',
            *keys(22, 62, 20),
            *logits(),
            *weights(),
            "</svg>\n",
        ]
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    drawn = picture()
    if not options.parse_args().check:
        PICTURE.write_text(drawn)
    elif PICTURE.read_text() != drawn:
        sys.exit("docs/kernel.svg: out of date; run python docs/kernel.py")


if __name__ == "__main__":
    main()
