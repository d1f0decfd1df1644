"""What rotary encodings share: waves, the turn by them, and their stretch on grids larger than the home grid."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError, check_one_of, check_positive
from whereformer.forms import Layout, MatrixRotation, Rotation
from whereformer.grid import Grid
from whereformer.kept import kept
from whereformer.resample import exact, without_autocast

Scaling = Literal["none", "pi", "ntk", "yarn", "yarn_paper"]
Order = Literal["x", "y"]

FAST, SLOW = 32, 1
"""β and α of YaRN: turns over the home grid from which on a wave is kept, and up to which it is stretched."""


@dataclass(frozen=True)
class Spectrum:
    """Frequencies f_m = first · ratio^(−m), m = 0 ... count − 1, in radians per patch.

    >>> [round(f, 2) for f in Spectrum.of(3, theta=1000.0).frequencies().tolist()]
    [1.0, 0.1, 0.01]
    """

    count: int
    ratio: float
    first: float = 1.0

    @classmethod
    def of(cls, count: int, theta: float) -> "Spectrum":
        """f_m = θ^(−m / count), that is θ^(−2m/d) for the d = 2 count features that turn by them."""
        return cls(count, theta ** (1 / max(count, 1)))

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """[count], float32."""
        m = torch.arange(self.count, device=device, dtype=torch.float32)
        return self.first * (self.ratio**self.count) ** (-m / max(self.count, 1))

    def on(
        self, size: Sequence[int], home: Sequence[int], scaling: Scaling, device: torch.device | None = None
    ) -> Tensor:
        """The frequencies along each axis of a grid of `size` for weights trained on `home`: [count, axes].

        With s = size / home along the axis:
            "none"        f_m
            "pi"          f_m / s: places are squeezed into the home grid (position interpolation)
            "ntk"         f_m s^(−m/(M − 1)), s >= 1: the first is kept, the last interpolated. The same as
                          θ' = θ s^(d/(d−2)) for d = 2M features
            "yarn"        f_m (1 − r_m) + f_m / s r_m, s >= 1, r_m rising from 0 to 1 in steps of m, between the
                          waves that turn 32 times and once over the home grid, as in the released code of YaRN
            "yarn_paper"  as YaRN defines it (section 3.2, definition 2): r_m falls with the turns themselves
        """
        f, m = self.frequencies(device), torch.arange(self.count, device=device, dtype=torch.float32)
        stretched = []
        for now, then in zip(size, home, strict=True):
            larger = greater(now / then, 1.0)
            match scaling:
                case "none":
                    stretched.append(f)
                case "pi":
                    stretched.append(f * (then / now))
                case "ntk":
                    stretched.append(f * larger ** (-m / max(self.count - 1, 1)))
                case "yarn":
                    low = max(math.floor(self._turning(FAST, then)), 0)
                    high = min(math.ceil(self._turning(SLOW, then)), 2 * self.count - 1)
                    ramp = ((m - low) / (high - low if high > low else 0.001)).clamp(0, 1)
                    stretched.append(f * (1 - ramp) + f / larger * ramp)
                case "yarn_paper":
                    turns = f * then / (2 * math.pi)
                    ramp = 1 - ((turns - SLOW) / (FAST - SLOW)).clamp(0, 1)
                    stretched.append(f * (1 - ramp) + f / larger * ramp)
        return torch.stack(stretched, -1)

    def _turning(self, turns: float, home: int) -> float:
        """The m, not whole, of the wave that turns so often over the home grid."""
        return math.log(self.first * home / (2 * math.pi * turns)) / math.log(self.ratio)


class Rotary(PositionEncoding):
    """Turns pair c of a head's features by the angle w_c · p: w_c a wave vector, p the place of the patch.

    Abstract: a subclass says `waves`, and `places` if p is not (y, x), or (t, y, x), in patches.

    Prefix tokens, and features of a head that are left over, do not turn.

    Args:
        layout: which features make a pair, see `Rotation`.
        scaling: how waves are stretched on grids larger than the home grid, see `Spectrum.on`; axis by axis, as in
            FiT (VisionNTK, VisionYaRN). With YaRN what turns is also multiplied by 0.1 ln s + 1, s the largest of
            the axes'. With NTK and YaRN the waves follow the size of the grid: queries and keys must share one.
            The home grid is then that of the training: the one it was built for, also after `resize`.
    """

    axes = (2, 3)
    fixed: ClassVar[tuple[str, ...]] = ()
    """The options that angles follow from, with the two grids, if none of it is learned; then angles are kept."""

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, layout: Layout = "interleaved", scaling: Scaling = "none"
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_one_of(f"{type(self).__name__}: layout", layout, get_args(Layout))
        check_one_of(f"{type(self).__name__}: scaling", scaling, get_args(Scaling))
        self.trained = grid
        self.layout: Layout = layout
        self.scaling: Scaling = scaling

    @property
    def crosses(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scaling in ("none", "pi")

    def waves(self, grid: Grid, device: torch.device | None) -> Tensor:
        """Wave vectors of the pairs of each head, in radians per patch: [h or 1, pairs, axes], float32 or more."""
        raise NotImplementedError

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        """Where each patch is: [(b or 1,) patches, axes], float32 or more."""
        return exact(grid.coords(device))

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation | MatrixRotation]:
        on_cpu = device is None or device.type == "cpu"  # elsewhere memory is dear, and may be a captured graph's
        if not (self.fixed and grid.regular and on_cpu) or torch.compiler.is_compiling():
            yield self._rotation(grid, device)
            return
        options = tuple(getattr(self, name) for name in self.fixed)
        key = (type(self), *options, self.layout, self.scaling, self.trained, grid, device)
        yield kept(key, lambda: self._rotation(grid, device).with_waves(), lambda made: 3 * made.angles.numel())

    def _rotation(self, grid: Grid, device: torch.device | None) -> Rotation:
        return Rotation(self.angles(grid, device), self.layout, self.temperature(grid))

    def angles(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """[(b or 1,) h or 1, patches, pairs], in radians, float32 or more."""
        waves, places = self.waves(grid, device), self.places(grid, device)
        first, *others = (places[..., None, :, a, None] * waves[:, None, :, a] for a in range(waves.shape[-1]))
        return sum(others, start=first)

    def size(self, grid: Grid) -> tuple[int, ...]:
        """How long the axes are on which places are counted."""
        return grid.size

    def home(self) -> tuple[int, ...]:
        """`size` of the grid on which the weights were trained."""
        return self.size(self.trained)

    def stretched(self, spectrum: Spectrum, grid: Grid, device: torch.device | None) -> Tensor:
        """The frequencies along each axis of a grid: [count, axes]."""
        return spectrum.on(self.size(grid), self.home(), self.scaling, device)

    def temperature(self, grid: Grid) -> Tensor | float:
        """What turned features are multiplied by."""
        if not self.scaling.startswith("yarn"):
            return 1.0
        s = [now / then for now, then in zip(self.size(grid), self.home(), strict=True)]
        return 0.1 * torch.tensor(s, dtype=torch.float32).amax().clamp(min=1).log() + 1

    def macs(self, grid: Grid) -> int:
        """Two for each feature that turns, of queries and of keys."""
        pairs = self.waves(self.grid, None).shape[-2]
        return grid.patches * self.num_heads * 2 * pairs * 4

    def share(self, parts: int, *, rest: bool = False) -> int:
        """How many pairs are in one of so many equal parts of a head's features; `rest`: some may be left over."""
        pairs = self.head_dim // (2 * parts)
        if pairs < 1 or (self.head_dim != 2 * parts * pairs and not rest):
            wanted = f"at least {2 * parts}" if rest else f"a multiple of {2 * parts}"
            raise InputError(f"{type(self).__name__}: {self.head_dim} features a head, expected {wanted}")
        return pairs


class RotaryOfFrames(Rotary):
    """Three axes always: an image is frame 0 of a video of one."""

    def size(self, grid: Grid) -> tuple[int, ...]:
        return (1, *grid.size)[-3:]

    def places(self, grid: Grid, device: torch.device | None) -> Tensor:
        places = super().places(grid, device)
        return places if grid.axes == 3 else F.pad(places, (1, 0))


def greater(a: float, b: float) -> float:
    """The larger of two numbers, which may be sizes that an exported program leaves open."""
    return torch.sym_max(a, b)  # pyright: ignore[reportReturnType]


def exponential(generators: Tensor, places: Tensor, features: int) -> MatrixRotation:
    """x at place p becomes exp(Σ_a p_a A_a) x, block by block; features behind the last block stay as they are.

    Args:
        generators: the A_a: [axes, h or 1, blocks, size, size], skew-symmetric, float32 or more.
        places: [(b or 1,) patches, axes].
    """
    places = places[..., None, :, :, None, None, None]
    first, *others = (places[..., a, :, :, :] * one[:, None] for a, one in enumerate(generators))
    exponent = sum(others, start=first)  # [(b or 1,) h or 1, patches, blocks, size, size]
    with without_autocast(exponent.device):
        turns = torch.linalg.matrix_exp(exponent)
    diagonal = torch.eye(turns.shape[-3], dtype=turns.dtype, device=turns.device)[:, None, :, None]
    matrices = (diagonal * turns[..., :, :, None, :]).flatten(-4, -3).flatten(-2)
    return MatrixRotation(beside_identity(matrices, features))


def beside_identity(matrices: Tensor, features: int) -> Tensor:
    """[..., d, d] to [..., features, features]: further features are left as they are."""
    d = matrices.shape[-1]
    rest = torch.eye(features - d, dtype=matrices.dtype, device=matrices.device)
    return F.pad(matrices, (0, features - d, 0, features - d)) + F.pad(rest, (d, 0, d, 0))


def check_theta(what: str, theta: object) -> None:
    """Raise unless `theta`, called `what`, is a number above 1: the base of falling frequencies."""
    check_positive(what, theta)
    if isinstance(theta, int | float) and theta <= 1:
        raise InputError(f"{what}={theta!r}, expected a number above 1")


def axial(frequencies: Tensor, order: Order) -> Tensor:
    """One frequency on one axis for each pair, axis by axis: [1, pairs, axes] from frequencies [count, axes].

    Order: "y" begins with the rows, as coordinates do, (t, y, x); "x" with the columns, (x, y, t).
    """
    blocks = torch.diag_embed(frequencies).transpose(0, 1)
    return (blocks.flip(0) if order == "x" else blocks).flatten(0, 1)[None]


def interleaved_to_half(weight: Tensor, num_heads: int, pairs: int | None = None) -> Tensor:
    """The rows of a projection to queries or keys, reordered for rotations of the layout "half".

    Scores stay what they were with the layout "interleaved": features 2c and 2c + 1 of a head become c and
    c + pairs. Also for its bias.

    Args:
        weight: [heads * head_dim, ...].
        pairs: how many pairs of each head turn; None: all.

    >>> interleaved_to_half(torch.tensor([0, 1, 2, 3]), num_heads=1).tolist()
    [0, 2, 1, 3]
    """
    return _reorder(weight, num_heads, pairs, "interleaved")


def half_to_interleaved(weight: Tensor, num_heads: int, pairs: int | None = None) -> Tensor:
    """`interleaved_to_half` reversed.

    >>> half_to_interleaved(torch.tensor([0, 2, 1, 3]), num_heads=1).tolist()
    [0, 1, 2, 3]
    """
    return _reorder(weight, num_heads, pairs, "half")


def _reorder(weight: Tensor, num_heads: int, pairs: int | None, old: Layout) -> Tensor:
    head_dim = weight.shape[0] // num_heads
    pairs = head_dim // 2 if pairs is None else pairs
    if weight.shape[0] != num_heads * head_dim or not 0 < 2 * pairs <= head_dim:
        raise InputError(
            f"weight {tuple(weight.shape)} for {num_heads} heads of which {pairs} pairs of features turn, expected"
            " [num_heads * head_dim, ...] and pairs <= head_dim / 2"
        )
    heads = weight.unflatten(0, (num_heads, head_dim))
    turned, rest = heads[:, : 2 * pairs], heads[:, 2 * pairs :]
    turned = turned.unflatten(1, (pairs, 2) if old == "interleaved" else (2, pairs)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, rest], 1).flatten(0, 1)
