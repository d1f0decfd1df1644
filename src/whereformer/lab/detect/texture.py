"""Grounds, patterns, light and noise, and the dice they are thrown with."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CONTRAST = 60  # least difference of a colour to its ground, of 255, summed over channels


class Dice:
    """Random numbers from the plain output of PCG64, which NumPy promises to keep as it is."""

    def __init__(self, *seed: int) -> None:
        self.bits = np.random.PCG64(seed)

    def part(self) -> float:
        """From 0 on, below 1."""
        return (self.bits.random_raw() >> 11) * 2.0**-53

    def parts(self, *shape: int) -> Array:
        return (self._raw(math.prod(shape)) >> np.uint64(11)).reshape(shape) * 2.0**-53

    def below(self, count: int) -> int:
        """A whole number from 0 on."""
        return int(self.part() * count)

    def bytes(self, *shape: int) -> Array:
        """Whole numbers from 0 to 255, uint8."""
        count = math.prod(shape)
        return self._raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count].reshape(shape)

    def _raw(self, count: int) -> Array:
        return np.asarray(self.bits.random_raw(count))


def ground(height: int, width: int, dice: Dice) -> Array:
    """A texture between two colours: noise of three scales, or stripes with noise; float64 [height, width, 3]."""
    first, second = ([40 + 175 * dice.part() for _ in range(3)] for _ in range(2))
    texture = np.zeros((height, width))
    for cells, weight in ((3, 0.5), (8, 0.3), (24, 0.2)):
        texture += weight * _noise(height, width, cells, dice)
    if dice.part() < 0.4:
        cosine, sine = direction(dice)
        steps = np.arange(height)[:, None] * sine + np.arange(width) * cosine
        period = 4 + 16 * dice.part()
        texture = 0.6 * texture + 0.4 * np.abs((steps / period) % 2 - 1)
    mix = texture[..., None]
    return np.array(first) * mix + np.array(second) * (1 - mix)


def _noise(height: int, width: int, cells: int, dice: Dice) -> Array:
    """Random numbers from 0 to 1 at the points of a lattice, smooth between them."""
    lattice = dice.parts(cells + 1, cells + 1)
    y, x = (np.arange(length) * (cells / length) for length in (height, width))
    row, column = y.astype(int), x.astype(int)
    fy, fx = _smooth(y - row)[:, None], _smooth(x - column)
    above = lattice[row][:, column] * (1 - fx) + lattice[row][:, column + 1] * fx
    below = lattice[row + 1][:, column] * (1 - fx) + lattice[row + 1][:, column + 1] * fx
    return above * (1 - fy) + below * fy


def _smooth(part: Array) -> Array:
    return part * part * (3 - 2 * part)


def photographed(canvas: Array, dice: Dice) -> Array:
    """With light that falls from one side, and noise, as uint8."""
    height, width = canvas.shape[:2]
    cosine, sine = direction(dice)
    across = (np.arange(height)[:, None] - height / 2) * sine + (np.arange(width) - width / 2) * cosine
    light = 0.9 + 0.25 * dice.part() + (0.5 * dice.part() / max(height, width)) * across
    strength = (2 + 10 * dice.part()) / 255
    noise = dice.bytes(*canvas.shape).astype(np.float64) + dice.bytes(*canvas.shape)
    return np.clip(canvas * light[..., None] + (noise - 255) * strength + 0.5, 0, 255).astype(np.uint8)


def pattern(steps: Array, dice: Dice) -> Array:
    """Plain, or stripes, in brightness."""
    strength = 18 * dice.part()
    period = 3 + 8 * dice.part()
    if dice.part() < 0.5:
        return np.zeros(steps.shape)
    return strength * (np.abs((steps / period) % 2 - 1) * 2 - 1)


def contrasting(ground: list[float], dice: Dice) -> list[float]:
    """A colour that can be told from the ground's."""
    for _ in range(8):
        colour = [30 + 200 * dice.part() for _ in ground]
        if sum(abs(a - b) for a, b in zip(colour, ground, strict=True)) >= CONTRAST:
            return colour
    return [value - 90 if value > 127 else value + 90 for value in ground]


def bump(dice: Dice) -> float:
    """A number from −1 to 1, most likely near 0."""
    return dice.part() + dice.part() - 1


def between(low: float, high: float, dice: Dice) -> float:
    """A number whose logarithm is spread evenly, without logarithms: halves of halves, at the geometric middle."""
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if dice.part() < 0.5 else (low, middle)
    return low


def direction(dice: Dice) -> tuple[float, float]:
    """Cosine and sine of any angle, without either: a point of a square that lies in the circle."""
    while True:
        x, y = 2 * dice.part() - 1, 2 * dice.part() - 1
        if 0.01 < (square := x * x + y * y) <= 1:
            length = math.sqrt(square)
            return x / length, y / length
