"""Tables learned on one grid, read on another: the only interpolation in the library."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from whereformer.errors import check_one_of

Stretch = Literal["bicubic", "bilinear", "geometric"]
"""How a table over offsets is read on another grid than its own."""


def resample(table: Tensor, size: tuple[int, int], *, mode: str = "bicubic", antialias: bool = True) -> Tensor:
    """Resize a table over a grid as if it were an image.

    Interpolation is linear and works one axis at a time, new = A table Bᵀ: two small matrices, made by torch's own
    interpolation of the identity, in float32, or float64 for such tables. So it runs in every dtype, on every
    device, deterministically.

    Args:
        table: [height, width, channels].
        size: the new height and width, in patches.
        mode: "bicubic" or "bilinear" (align_corners=False).
        antialias: widen the kernel when shrinking (timm's and DeiT's recipe).

    Returns:
        [*size, channels], in the dtype of `table`; the very same values if the size stays.
    """
    check_one_of("resample: mode", mode, ("bicubic", "bilinear"))
    exporting = torch.compiler.is_exporting()  # comparing sizes would bind the exported program to this one
    if not exporting and tuple(table.shape[:2]) == tuple(size):
        return table
    wide = exact(table)
    rows, columns = (
        _weights(old, new, mode, antialias, wide) for old, new in zip(table.shape[:2], size, strict=True)
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


def exact(x: Tensor) -> Tensor:
    """In float32, or in what is more exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(device: torch.device) -> AbstractContextManager:
    """What is multiplied inside keeps its precision."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _weights(old: int, new: int, mode: str, antialias: bool, like: Tensor) -> Tensor:
    """[new, old]: each new position as a mixture of old ones.

    The identity is given a second axis of two equal columns: at an output width of one, torch's antialiased
    interpolation is wrong on CPUs.
    """
    identity = torch.eye(old, device=like.device, dtype=like.dtype)[None, :, :, None].expand(1, old, old, 2)
    weights = F.interpolate(identity, (new, 2), mode=mode, align_corners=False, antialias=antialias)
    return weights[0, :, :, 0].mT


def resample_offsets(
    table: Tensor, queries: Sequence[int], keys: Sequence[int], *, stretch: Stretch = "bicubic"
) -> Tensor:
    """Read a table over the offsets within one grid as one over the offsets between two others.

    That grid is stretched over the larger of the two, along each axis; offset 0 stays offset 0.

    Args:
        table: [heads, 2 height − 1, 2 width − 1]; in a video with frames before height.
        queries, keys: the new sizes, in patches: (height, width), or (frames, height, width).
        stretch: "bicubic" or "bilinear", the table taken for an image (not antialiased); or "geometric": offsets
            0 and ±1 keep their numbers, the others move outwards by steps that form a geometric progression, and
            what lies between them is interpolated linearly.

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
            if stretch == "geometric":
                weights = _progression(old, 2 * most - 1, new)
            else:
                weights = _weights(old, 2 * most - 1, stretch, False, new)
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
