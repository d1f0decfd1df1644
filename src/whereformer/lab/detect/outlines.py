"""Outlines of objects as COCO's format has them, polygons and run lengths: the boxes around them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whereformer.lab.detect.boxes import Picture
from whereformer.lab.detect.findings import short


def outline(segmentation: Any) -> list[float] | None:
    """The box around an outline: COCO's polygons, [[x, y, x, y, ...], ...], or run lengths; None for neither."""
    if isinstance(segmentation, Mapping):
        return _around_runs(segmentation)
    try:
        xs = [float(x) for polygon in segmentation for x in polygon[0::2]]
        ys = [float(y) for polygon in segmentation for y in polygon[1::2]]
    except (LookupError, OverflowError, TypeError, ValueError):
        return None
    if not xs or not ys:
        return None
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def _around_runs(mask: Mapping[str, Any]) -> list[float] | None:
    """Run lengths go down the columns, and begin with what is not the object.

    >>> _around_runs({"size": [4, 3], "counts": [5, 2, 5]})
    [1.0, 1.0, 1.0, 2.0]
    """
    size, counts = mask.get("size"), mask.get("counts")
    if not (isinstance(counts, list) and _runs_fit(size, counts)):
        return None
    height = size[0]  # pyright: ignore[reportOptionalSubscript]
    left, top, right, bottom = math.inf, math.inf, -1, -1
    start = 0
    for index, run in enumerate(counts):
        if index % 2 and run:
            last = start + run - 1
            left, right = min(left, start // height), max(right, last // height)
            one_column = start // height == last // height
            top = min(top, start % height if one_column else 0)
            bottom = max(bottom, last % height if one_column else height - 1)
        start += run
    if right < 0:
        return None
    return [float(left), float(top), float(right - left + 1), float(bottom - top + 1)]


def _runs_fit(size: Any, counts: list[Any]) -> bool:
    shape = isinstance(size, Sequence) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    return shape and all(type(n) is int and n >= 0 for n in counts) and sum(counts) == size[0] * size[1]


def wrong_mask(mask: Any, picture: Picture) -> str | None:
    """What is wrong with a mask of run lengths, as crowds have it; nothing, if there is none."""
    if not isinstance(mask, Mapping):
        return None
    size, counts = mask.get("size"), mask.get("counts")
    if size != [picture.height, picture.width]:
        return f"its mask is of size {short(size)}"
    if isinstance(counts, list) and not _runs_fit(size, counts):
        return "the runs of its mask do not fill it"
    return None
