"""Annotations one by one: which can be used, which can be mended, and what is wrong with the others."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeGuard

from whereformer.lab.detect.boxes import Picture
from whereformer.lab.detect.findings import Fate, Finding, short
from whereformer.lab.detect.outlines import outline, wrong_mask

SLACK = 0.5  # pixels that a box may stand over the edge of its image: what rounding does
LARGEST = 1 << 62  # of ids and coordinates


class _Skip(Exception):
    """Why an annotation cannot be used: its kind, and what stands there."""


def usable(
    annotations: Sequence[Any],
    pictures: Mapping[int, Picture],
    listed: Container[int],
    labels: Mapping[int, int],
    findings: list[Finding],
) -> dict[int, list[dict[str, Any]]]:
    """The boxes that can be used, of each image, as `boxes_of` takes them.

    Args:
        annotations: as in COCO's JSON.
        pictures: the images that can be used, by their ids.
        listed: the ids of all images.
        labels: of the categories, by their ids.
        findings: where what is wrong is added.
    """
    rows: dict[int, list[dict[str, Any]]] = {}
    seen: dict[int, tuple[Any, ...]] = {}
    unnamed: list[dict[str, Any]] = []

    for one in annotations:
        number = one.get("id") if isinstance(one, Mapping) else None
        mended: list[tuple[str, str]] = []
        picture = None
        try:
            picture = _picture(one, pictures, listed)
            row = _row(one, picture, labels, mended)
            content = (picture.id, row["label"], row["xywh"])
            if not is_id(number):
                mended.append(("annotation without id", "it gets a new one"))
                unnamed.append(row)
            elif seen.setdefault(number, content) is not content:
                if seen[number] == content:
                    raise _Skip("repeated annotation id", "the same box again")
                mended.append(("repeated annotation id", "another box gets a new one"))
                unnamed.append(row)
            rows.setdefault(picture.id, []).append(row)
            findings += [_finding(one, picture, kind, says, "mended") for kind, says in mended]
        except _Skip as skip:
            kind, says = skip.args
            findings.append(_finding(one, picture, kind, says, "skipped"))

    for number, row in enumerate(unnamed, max(seen, default=0) + 1):
        row["id"] = number
    return rows


def _finding(one: Any, picture: Picture | None, kind: str, says: str, fate: Fate) -> Finding:
    about = one if isinstance(one, Mapping) else {}
    at = f", on image {picture.id} ({picture.width} x {picture.height})" if picture else ""
    return Finding(kind, str(about.get("where") or f"annotation {short(about.get('id'))}"), says + at, fate)


def _picture(one: Any, pictures: Mapping[int, Picture], listed: Container[int]) -> Picture:
    if not isinstance(one, Mapping):
        raise _Skip("not an annotation", f"{short(one)}, expected an object")
    number = one.get("image_id")
    if not is_id(number) or number not in listed:
        raise _Skip("unknown image", f"image {short(number)} is not in the list")
    if number not in pictures:
        raise _Skip("box of a skipped image", f"image {number}")
    return pictures[number]


def _row(
    one: Mapping[str, Any], picture: Picture, labels: Mapping[int, int], mended: list[tuple[str, str]]
) -> dict[str, Any]:
    """One box; what had to be mended is noted, with its kind and what stands there."""
    category, crowd = one.get("category_id"), one.get("iscrowd", 0)
    if not is_id(category) or category not in labels:
        raise _Skip("unknown category", short(category))
    if crowd not in (0, 1):
        raise _Skip("iscrowd", f"{short(crowd)}, expected 0 or 1")
    given = one.get("bbox")
    if given is None or given == []:
        given = outline(one.get("segmentation"))
        if given is None:
            raise _Skip("no box", "neither a box nor an outline")
        mended.append(("no box", f"its outline gives {short(given)}"))
    if not _is_box(given):
        raise _Skip("not a box", f"{short(given)}, expected four finite numbers")
    xywh = tuple(float(number) for number in given)
    if min(xywh[2:]) <= 0:
        raise _Skip("no area", short(given))
    inside = _inside(xywh, picture)
    if min(inside[2:]) <= 0:
        raise _Skip("outside the image", short(given))
    clipped = max(abs(a - b) for a, b in zip(_corners(xywh), _corners(inside), strict=True)) > SLACK
    if clipped:
        mended.append(("partly outside", f"{short(given)} is cut off"))
        xywh = inside
    if wrong := wrong_mask(one.get("segmentation"), picture):
        mended.append(("mask", f"{wrong}: its box is used"))
    area, of_box = one.get("area"), xywh[2] * xywh[3]
    if area is None:
        area = of_box
    elif not (_is_number(area) and area > 0):
        mended.append(("area", f"{short(area)}: that of its box is used"))
        area = of_box
    if clipped:
        area = min(area, of_box)
    return {
        "id": one.get("id"),
        "label": labels[category],
        "xywh": xywh,
        "area": float(area),
        "crowd": bool(crowd),
    }


def _inside(xywh: Sequence[float], picture: Picture) -> tuple[float, float, float, float]:
    left, top, right, bottom = _corners(xywh)
    left, right = (min(max(x, 0.0), float(picture.width)) for x in (left, right))
    top, bottom = (min(max(y, 0.0), float(picture.height)) for y in (top, bottom))
    return left, top, right - left, bottom - top


def _corners(xywh: Sequence[float]) -> tuple[float, float, float, float]:
    x, y, w, h = xywh
    return x, y, x + w, y + h


def _is_box(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 4 and all(_is_number(number) for number in value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST  # pyright: ignore[reportOperatorIssue]


def is_id(value: object) -> TypeGuard[int]:
    """Whether it can be the id of something."""
    return type(value) is int and abs(value) < LARGEST
