"""Tables learned on one grid, read on another: the only interpolation in the library."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import InputError, check_at_least, check_bool, check_gathered, check_one_of

Stretch = Literal["bicubic", "bilinear", "geometric"]
"""How a table over offsets is read on another grid than its own."""


@dataclass(frozen=True)
class Recipe:
    """How a table is read on another grid: part of what a checkpoint means, as its numbers are.

    Args:
        mode: "bicubic" or "bilinear", the table taken for an image. Or, for a table over offsets, whose sizes are
            odd, "geometric": offsets 0 and ±1 keep their numbers, the others move outwards by steps that form a
            geometric progression, and what lies between them is interpolated linearly.
        antialias: widen the kernel when shrinking. It also makes the bicubic kernel another one (-0.5, not -0.75).
        align_corners: the first and last places lie on one another, not the borders around them.
        offset: added to the new size where the step between places is computed, n / (t + offset): an old
            work-around that released models were trained with. The size of the result does not change.
        square: stretched over the square of the longer side, of which the upper left part is taken.
    """

    mode: str = "bicubic"
    antialias: bool = False
    align_corners: bool = False
    offset: float = 0.0
    square: bool = False

    def __post_init__(self) -> None:
        check_one_of("recipe: mode", self.mode, get_args(Stretch))
        for name in ("antialias", "align_corners", "square"):
            check_bool(f"recipe: {name}", getattr(self, name))
        if self.offset != 0:
            check_at_least("recipe: offset", self.offset, 0.001)
        if self.offset >= 1:
            raise InputError(f"recipe: offset={self.offset}, expected less than 1, such as DINOv2's 0.1")
        if self.align_corners and self.offset:
            raise InputError(
                f"recipe: offset={self.offset} with align_corners=True, which has no step to add it to"
            )
        if self.mode == "geometric" and (self.antialias or self.align_corners or self.offset or self.square):
            raise InputError(f"recipe: {self}, but 'geometric' has no options")

    def read(self, table: Tensor, size: tuple[int, int]) -> Tensor:
        """A table [height, width, channels] on another grid, as `resample` reads it."""
        return resample(table, size, **asdict(self))


RECIPES = {
    "timm": Recipe("bicubic", antialias=True),
    "deit": Recipe("bicubic"),
    "mae": Recipe("bicubic"),
    "dinov2": Recipe("bicubic", offset=0.1),
    "dinov2-reg": Recipe("bicubic", antialias=True),
    "siglip2": Recipe("bilinear", antialias=True),
    "radio": Recipe("bilinear", square=True),
    "radio-v3": Recipe("bilinear", align_corners=True, square=True),
    "torchvision": Recipe("bicubic", align_corners=True),
    "bicubic": Recipe("bicubic"),
    "bilinear": Recipe("bilinear"),
    "geometric": Recipe("geometric"),
}
"""What the models of these names do, or their libraries, and plain interpolation.

dinov2: the released models without registers; those with registers, "dinov2-reg"; transformers' port of the former
does "bicubic". siglip2: transformers and big_vision (NaFlex). radio: C-RADIOv4, and L and g of C-RADIOv3, whose B
and H were released with "radio-v3".
"""


def recipe_of(asked: "str | Recipe") -> Recipe:
    """A recipe by its name, or as it is."""
    if isinstance(asked, Recipe):
        return asked
    if not isinstance(asked, str) or asked not in RECIPES:
        raise InputError(f"recipe={asked!r}, expected one of {list(RECIPES)}, or a whereformer.resample.Recipe")
    return RECIPES[asked]


def resample(
    table: Tensor,
    size: tuple[int, int],
    *,
    mode: str = "bicubic",
    antialias: bool = True,
    align_corners: bool = False,
    offset: float = 0.0,
    square: bool = False,
) -> Tensor:
    """Resize a table over a grid as if it were an image.

    Interpolation is linear and works one axis at a time, new = A table Bᵀ: two small matrices, made by torch's own
    interpolation of the identity, in float32, or float64 for such tables. So it runs in every dtype, on every
    device, deterministically.

    Args:
        table: [height, width, channels].
        size: the new height and width, in patches.
        mode, antialias, align_corners, offset, square: see `Recipe`; the defaults are timm's.

    Returns:
        [*size, channels], in the dtype of `table`; the very same values if the size stays.

    Raises:
        InputError: the table has no numbers (as under ZeRO-3), or the recipe makes no sense.
    """
    check_one_of("resample: mode", mode, get_args(Stretch))
    if mode == "geometric" and not all(n % 2 for n in (*table.shape[:2], *size)):
        raise InputError(f"resample: mode='geometric' from {tuple(table.shape[:2])} to {size}, expected odd sizes")
    check_gathered("resample: the table", table)
    exporting = torch.compiler.is_exporting()  # comparing sizes would bind the exported program to this one
    if not exporting and tuple(table.shape[:2]) == tuple(size):
        return table
    wide = exact(table)
    longest: Any = (torch.sym_max(*size),) * 2 if square else size
    rows, columns = (
        _weights(old, new, wide, mode, antialias, align_corners, offset)[:wanted]
        for old, new, wanted in zip(table.shape[:2], longest, size, strict=True)
    )
    with without_autocast(table.device):
        new = torch.einsum("yh,hwc->ywc", rows, wide)
        new = torch.einsum("xw,ywc->yxc", columns, new)
    return new.to(table.dtype)


def resample_line(table: Tensor, length: int, *, mode: str = "bilinear", antialias: bool = False) -> Tensor:
    """A table [n, channels] along one axis resized to `length` rows, as by `resample`."""
    if not torch.compiler.is_exporting() and table.shape[0] == length:
        return table
    return resample(table[:, None], (length, 1), mode=mode, antialias=antialias)[:, 0]


def resample_kernel(kernel: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize the kernel of a patch embedding so that resized patches give what the patches gave (FlexiViT).

    With B the matrix that resizes an image of one patch from the old size to the new one (bicubic, antialiased),
    the new kernel is pinv(Bᵀ) w: for larger patches, B x gives exactly what x gave; for smaller ones, the nearest
    in the least squares.   Beyer et al. 2023, FlexiViT, section 3.4. In float64, rounded once.

    Args:
        kernel: [height, width, channels].
        size: the new height and width, in pixels.
    """
    wide = kernel.double()
    rows, columns = (
        torch.linalg.pinv(_weights(old, new, wide, "bicubic", antialias=True).mT)
        for old, new in zip(kernel.shape[:2], size, strict=True)
    )
    return torch.einsum("yh,xw,hwc->yxc", rows, columns, wide).to(kernel.dtype)


def exact(x: Tensor) -> Tensor:
    """In float32, or in what is more exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(device: torch.device) -> AbstractContextManager:
    """What is multiplied inside keeps its precision."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _weights(
    old: int,
    new: int,
    like: Tensor,
    mode: str,
    antialias: bool = False,
    align_corners: bool = False,
    offset: float = 0.0,
) -> Tensor:
    """[new, old]: each new position as a mixture of old ones.

    The identity is given a second axis of two equal columns: at an output width of one, torch's antialiased
    interpolation is wrong on CPUs.
    """
    if mode == "geometric":
        return _progression(old, new, like)
    identity = torch.eye(old, device=like.device, dtype=like.dtype)[None, :, :, None].expand(1, old, old, 2)
    options: dict[str, Any] = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    if offset:  # a ratio with an offset gives the size that is wanted: the fraction that it leaves is the offset
        weights = F.interpolate(identity, scale_factor=((new + offset) / old, 1.0), **options)
    else:
        weights = F.interpolate(identity, (new, 2), **options)
    return weights[0, :, :, 0].mT


def resample_offsets(
    table: Tensor, queries: Sequence[int], keys: Sequence[int], *, stretch: Stretch = "bicubic"
) -> Tensor:
    """Read a table over the offsets within one grid as one over the offsets between two others.

    That grid is stretched over the larger of the two, along each axis; offset 0 stays offset 0.

    Args:
        table: [heads, 2 height − 1, 2 width − 1]; in a video with frames before height.
        queries, keys: the new sizes, in patches: (height, width), or (frames, height, width).
        stretch: the recipe.

    Returns:
        [heads, queries.height + keys.height − 1, ...], in the dtype of `table`; the very same values if the size
        stays.
    """
    exporting = torch.compiler.is_exporting()
    new = table
    for axis, (n, m) in enumerate(zip(queries, keys, strict=True), 1):
        most = n if n is m else max(n, m)
        old = table.shape[axis]
        if exporting or old != 2 * most - 1:
            new = new.to(torch.promote_types(table.dtype, torch.float32))
            weights = _weights(old, 2 * most - 1, new, stretch)
            with without_autocast(table.device):
                new = torch.einsum("ij,...j->...i", weights, new.movedim(axis, -1)).movedim(-1, axis)
        new = new.narrow(axis, most - m, n + m - 1)
    return new.to(table.dtype)


def check_stretch(what: str, stretch: str) -> None:
    """Raise unless `stretch`, asked for by `what`, is one of `Stretch`."""
    check_one_of(f"{what}: stretch", stretch, get_args(Stretch))


def _progression(old: int, new: int, like: Tensor) -> Tensor:
    """[new, old]: each new offset as a mixture of old ones, which lie at 0, ±1, ±(1 + r), ±(1 + r + r²), ...

    r is such that the last of them is the last new offset.
    """
    if old == 1:
        return like.new_ones(new, 1)
    reach = new // 2
    powers = torch.arange(old // 2, device=like.device, dtype=like.dtype)
    ratio = torch.full((), reach, device=like.device, dtype=like.dtype) ** (1 / max(1, old // 2 - 1))
    for _ in range(20):  # Newton, from above: the sum of powers is convex
        slope = (powers * ratio ** (powers - 1).clamp(min=0)).sum().clamp(min=1)
        ratio = (ratio - ((ratio**powers).sum() - reach) / slope).clamp(min=0)
    places = F.pad((ratio**powers).cumsum(0), (1, 0))
    wanted = torch.arange(-reach, reach + 1, device=like.device)
    high = torch.searchsorted(places, wanted.abs().to(like.dtype)).clamp(1, old // 2)
    gap = (places[high] - places[high - 1]).clamp(min=torch.finfo(like.dtype).tiny)
    share = ((wanted.abs() - places[high - 1]) / gap).clamp(0, 1)[:, None]
    near, far = (old // 2 + wanted.sign() * n for n in (high - 1, high))
    return F.one_hot(near, old) * (1 - share) + F.one_hot(far, old) * share
