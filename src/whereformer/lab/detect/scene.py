"""One image of shapes, and what is on it.

It follows from its numbers alone, through operations that IEEE 754 rounds in one way only (no sines, no sums whose
order a processor chooses), so that all machines draw the same pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from whereformer.lab.detect.texture import (
    Array,
    Dice,
    between,
    bump,
    contrasting,
    direction,
    ground,
    pattern,
    photographed,
)

CATEGORIES = ("disc", "ring", "square", "triangle", "star", "cross")
SIDES = (0.05, 0.55)  # of objects, in parts of the image's shorter side
LEAST_SIDE = 6  # pixels: smaller ones cannot be told apart
VISIBLE = 0.35  # of an object: what others or the edge may hide is the rest
TRIES = 12  # places tried for each object
CROWD_SIDE = 0.055  # of each in a crowd, in parts of the image's side


class Scene(NamedTuple):
    """An image [height, width, 3], uint8, and what is on it: annotations without ids, in COCO's terms."""

    pixels: Array
    annotations: list[dict[str, Any]]


def draw(seed: Sequence[int], size: int, most: int, crowds: float, sides: tuple[float, float] = SIDES) -> Scene:
    """One image.

    Args:
        seed: the numbers that it follows from.
        size: pixels of the longer side.
        most: objects, at most.
        crowds: how often one of them is a crowd.
        sides: of objects, in parts of the image's shorter side, drawn evenly on a logarithmic scale.
    """
    dice = Dice(*seed)
    height, width = _size(size, dice)
    canvas = ground(height, width, dice)
    owner = np.zeros((height, width), dtype=np.int16)  # which object each pixel shows, from 1 on
    placed: list[_Thing] = []
    count, crowd = 1 + dice.below(most), dice.part() < crowds
    for index in range(count):
        for _ in range(TRIES):
            thing = _thing(height, width, sides, dice, crowd=crowd and index == 0)
            if _fits(thing, owner, placed):
                _paint(canvas, owner, thing, len(placed) + 1, dice)
                placed.append(thing)
                break
    pixels = photographed(canvas, dice)
    return Scene(pixels, [_annotation(thing, owner == number) for number, thing in enumerate(placed, 1)])


def _size(side: int, dice: Dice) -> tuple[int, int]:
    """Height and width: landscape, portrait or square."""
    shorter = side - dice.below(side // 4 + 1)
    return [(shorter, side), (side, shorter), (side, side)][dice.below(3)]


class _Thing(NamedTuple):
    """An object, or a crowd of them, in a window of the image."""

    category: int
    inside: Array  # how many pixels each pixel of the window is inside; negative: outside
    top: int
    left: int
    whole: int  # pixels that it would show if nothing hid it
    crowd: bool

    @property
    def window(self) -> tuple[slice, slice]:
        rows, columns = self.inside.shape
        return slice(self.top, self.top + rows), slice(self.left, self.left + columns)


def _thing(height: int, width: int, sides: tuple[float, float], dice: Dice, *, crowd: bool) -> _Thing:
    """A shape at a place, cut at the edges of the image."""
    category, side = dice.below(len(CATEGORIES)), min(height, width)
    y, x = dice.part() * height, dice.part() * width
    places = [(y, x, max(LEAST_SIDE, side * between(*sides, dice)))]
    if crowd:
        each = max(LEAST_SIDE, side * CROWD_SIDE)
        places = [
            (y + 2.6 * each * bump(dice), x + 2.6 * each * bump(dice), each * (0.8 + 0.4 * dice.part()))
            for _ in range(9 + dice.below(10))
        ]
    top, bottom = int(min(y - size for y, _, size in places)), int(max(y + size for y, _, size in places))
    left, right = int(min(x - size for _, x, size in places)), int(max(x + size for _, x, size in places))
    rows, columns = np.arange(top, bottom + 1)[:, None], np.arange(left, right + 1)
    inside = np.full((len(rows), columns.size), -np.inf)
    for y, x, size in places:
        inside = np.maximum(inside, _distance(category, rows - y, columns - x, size, dice))
    whole = int((inside > 0).sum())
    cut = inside[max(0, -top) : max(0, height - top), max(0, -left) : max(0, width - left)]
    return _Thing(category, cut, max(top, 0), max(left, 0), whole, crowd)


def _distance(category: int, dy: Array, dx: Array, size: float, dice: Dice) -> Array:
    """How far points are inside a shape of so many pixels, turned and stretched at random."""
    cosine, sine = direction(dice)
    stretch = 0.8 + 0.4 * dice.part()
    half = size / 2
    u = (dx * cosine + dy * sine) / (half * stretch)
    v = (dy * cosine - dx * sine) / half * stretch
    return half * _SHAPES[CATEGORIES[category]](u, v)


def _disc(u: Array, v: Array) -> Array:
    return 1 - np.sqrt(u * u + v * v)


def _ring(u: Array, v: Array) -> Array:
    radius = np.sqrt(u * u + v * v)
    return np.minimum(1 - radius, radius - 0.5)


def _square(u: Array, v: Array) -> Array:
    return 0.85 - np.maximum(np.abs(u), np.abs(v))


def _triangle(u: Array, v: Array) -> Array:
    """Corners at distance 1, the sides at 0.5."""
    return 0.55 - np.maximum(v, np.maximum(0.8660254 * u - 0.5 * v, -0.8660254 * u - 0.5 * v))


def _star(u: Array, v: Array) -> Array:
    """Five points at distance 1: where at most one of the five lines through neighbours' neighbours is crossed."""
    normals = (
        (0.0, 1.0),
        (0.9510565, 0.3090170),
        (0.5877853, -0.8090170),
        (-0.5877853, -0.8090170),
        (-0.9510565, 0.3090170),
    )
    return np.sort(np.stack([0.3090170 - (a * u + b * v) for a, b in normals]), axis=0)[1] * 1.1


def _cross(u: Array, v: Array) -> Array:
    u, v = np.abs(u), np.abs(v)
    return np.maximum(np.minimum(0.3 - u, 1 - v), np.minimum(0.3 - v, 1 - u))


_SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
}


def _fits(thing: _Thing, owner: Array, placed: list[_Thing]) -> bool:
    """Whether enough of it, and of all that it would hide, is seen."""
    mask = thing.inside > 0
    if mask.sum() < max(VISIBLE * thing.whole, LEAST_SIDE):
        return False
    hidden = np.bincount(owner[thing.window][mask], minlength=len(placed) + 1)
    return all(
        not hidden[number] or (owner == number).sum() - hidden[number] >= max(VISIBLE * other.whole, LEAST_SIDE)
        for number, other in enumerate(placed, 1)
    )


def _paint(canvas: Array, owner: Array, thing: _Thing, number: int, dice: Dice) -> None:
    """Draws it over what is there, with a shadow, a pattern and light from one side."""
    inside, under = thing.inside, canvas[thing.window]
    mask = inside > 0
    median = np.sort(under[mask], axis=0)[mask.sum() // 2]
    colour = contrasting(median.tolist(), dice)
    cosine, sine = direction(dice)
    steps = np.arange(inside.shape[0])[:, None] * sine + np.arange(inside.shape[1]) * cosine
    face = np.array(colour) + (pattern(steps, dice) + 10 * (steps / max(inside.shape) - 0.5))[..., None]
    alpha = np.clip(inside + 0.5, 0, 1)[..., None]
    shadow = 0.35 * np.clip(inside / 6 + 0.6, 0, 1)[..., None]
    canvas[thing.window] = under * (1 - shadow) * (1 - alpha) + face * alpha
    owner[thing.window][mask] = number


def _annotation(thing: _Thing, mask: Array) -> dict[str, Any]:
    """The box around the pixels that show it, and how many these are; of a crowd the runs of its mask too."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    top, left = int(rows[0]), int(columns[0])
    return {
        "category_id": thing.category + 1,
        "bbox": [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1],
        "area": int(mask.sum()),
        "iscrowd": int(thing.crowd),
        "segmentation": {"size": list(mask.shape), "counts": list(runs(mask))} if thing.crowd else [],
    }


def runs(mask: Array) -> Iterator[int]:
    """Run lengths down the columns, of what is not the object first.

    >>> list(runs(np.array([[0, 1], [1, 1]])))
    [1, 3]
    """
    flat = mask.T.reshape(-1).astype(bool)
    changes = np.flatnonzero(np.diff(flat, prepend=False))
    return map(int, np.diff(changes, prepend=0, append=len(flat)))
