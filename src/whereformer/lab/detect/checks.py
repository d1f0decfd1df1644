"""What is wrong with annotations, found before anything is trained: each finding names what it is about."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from whereformer.errors import InputError, check_one_of
from whereformer.lab.detect.boxes import Annotations, Category, Picture, boxes_of, starts_of
from whereformer.lab.detect.tree import Tree

SLACK = 0.5  # pixels that a box may stand over the edge of its image: what rounding does
LARGEST = 1 << 62  # of ids and coordinates
EXAMPLES = 5  # findings of each kind that a report shows
FORMS = ("skip", "refuse")

Broken = Literal["skip", "refuse"]
Fate = Literal["skipped", "mended"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, and what became of it.

    Args:
        kind: a few words, the same for all findings of a kind.
        where: the image or the annotation, with its id or its file and line.
        says: what stands there.
        fate: "skipped", or "mended" if enough was left to use it.
    """

    kind: str
    where: str
    says: str
    fate: Fate = "skipped"

    def __str__(self) -> str:
        return f"{self.where}: {self.says}"


@dataclass(frozen=True)
class Report:
    """What a set holds and what is wrong with it.

    Args:
        name: of the set.
        images, boxes: how many there are, and how many are left.
        crowds: boxes left that hold a crowd.
        empty: images left that hold no boxes.
        per_category: boxes left of each category, crowds among them.
        findings: all of them.
    """

    name: str
    images: tuple[int, int]
    boxes: tuple[int, int]
    crowds: int
    empty: int
    per_category: Mapping[str, int]
    findings: tuple[Finding, ...]

    def kinds(self) -> dict[str, list[Finding]]:
        """The findings of each kind, the most frequent kind first."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: [one for one in self.findings if one.kind == kind] for kind, _ in counts.most_common()}

    def lines(self) -> Iterator[str]:
        """The report as text."""
        (images, images_left), (boxes, boxes_left) = self.images, self.boxes
        yield (
            f"{self.name}: {_of(images_left, images, 'images')}, {_of(boxes_left, boxes, 'boxes')} in"
            f" {len(self.per_category)} categories; {self.crowds:,} are crowds; {self.empty:,} images hold none"
        )
        for kind, findings in self.kinds().items():
            fates = Counter(finding.fate for finding in findings)
            yield f"  {kind}: {', '.join(f'{count:,} {fate}' for fate, count in fates.items())}"
            yield from (f"    {finding}" for finding in findings[:EXAMPLES])
            if len(findings) > EXAMPLES:
                yield f"    and {len(findings) - EXAMPLES:,} more"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name,
            "images": {"found": self.images[0], "left": self.images[1], "empty": self.empty},
            "boxes": {"found": self.boxes[0], "left": self.boxes[1], "crowds": self.crowds},
            "per_category": dict(self.per_category),
            "findings": {
                kind: [{"where": one.where, "says": one.says, "fate": one.fate} for one in findings]
                for kind, findings in self.kinds().items()
            },
        }


@dataclass
class Raw:
    """A set as a file says it, in the terms of the COCO format; nothing in it is known to be right.

    Args:
        name: of the set, for reports.
        images, annotations, categories: as in COCO's JSON; annotations of other formats have a "where".
        folder: of the tree, where the files of the images are.
        findings: what was wrong already when it was read.
    """

    name: str
    images: list[Any]
    annotations: list[Any]
    categories: list[Any]
    folder: str = ""
    findings: list[Finding] = field(default_factory=list)


def examine(raw: Raw, tree: Tree, *, broken: Broken = "skip") -> tuple[Annotations, Report]:
    """What can be used of a set, and what was found.

    Args:
        broken: "skip" leaves broken images and annotations away, and mends what it can; "refuse" raises if
            anything is wrong.

    Raises:
        InputError: it is refused; or no image is left; or the categories make no sense.
    """
    check_one_of("broken", broken, FORMS)
    categories = _categories(raw)
    findings = list(raw.findings)
    pictures = _pictures(raw, tree, findings)
    rows = _rows(raw, {one.id: one for one in pictures}, categories, findings)
    if findings and broken == "refuse":
        kinds = Counter(finding.kind for finding in findings)
        first = "; ".join(str(finding) for finding in findings[:EXAMPLES])
        counts = ", ".join(f"{count:,} x {kind}" for kind, count in kinds.most_common())
        raise InputError(f"{raw.name} is refused: {counts}. First: {first}. broken='skip' goes on without them")
    if not pictures:
        first = "; ".join(str(finding) for finding in findings[:EXAMPLES]) or "it lists none"
        raise InputError(f"{raw.name}: no image of {len(raw.images)} is left: {first}")
    ordered = [row for picture in pictures for row in rows.get(picture.id, ())]
    counts = [len(rows.get(picture.id, ())) for picture in pictures]
    boxes = boxes_of(ordered)
    annotations = Annotations(tuple(pictures), categories, boxes, starts_of(counts), tree)
    per_category = Counter(boxes.labels.tolist())
    report = Report(
        raw.name,
        images=(len(raw.images), len(pictures)),
        boxes=(len(raw.annotations), len(boxes)),
        crowds=int(boxes.crowd.sum()),
        empty=counts.count(0),
        per_category={one.name: per_category[label] for label, one in enumerate(categories)},
        findings=tuple(findings),
    )
    return annotations, report


def _categories(raw: Raw) -> tuple[Category, ...]:
    found: dict[int, str] = {}
    for one in raw.categories:
        if not isinstance(one, Mapping) or not _is_id(one.get("id")):
            raise InputError(f"{raw.name}: category {_short(one)}, expected one with a whole number as its id")
        name = str(one.get("name", one["id"]))
        if found.setdefault(one["id"], name) != name:
            raise InputError(f"{raw.name}: category {one['id']} is both {found[one['id']]!r} and {name!r}")
    if not found:
        raise InputError(f"{raw.name}: it has no categories")
    if twice := [name for name, count in Counter(found.values()).items() if count > 1]:
        raise InputError(f"{raw.name}: more than one category is called {twice[0]!r}")
    return tuple(Category(number, found[number]) for number in sorted(found))


def _pictures(raw: Raw, tree: Tree, findings: list[Finding]) -> list[Picture]:
    """The images that can be read and whose size is what the file says."""
    files: dict[int, str] = {}
    sizes: dict[int, tuple[Any, Any]] = {}
    for one in raw.images:
        number = one.get("id") if isinstance(one, Mapping) else None
        if not _is_id(number):
            findings.append(Finding("image without id", f"image {_short(number)}", _short(one)))
            continue
        where, name = f"image {number}", one.get("file_name")
        if number in files:
            says = f"{name!r} has the id of {files[number]!r}"
            findings.append(Finding("repeated image id", where, says))
        elif not isinstance(name, str) or (file := located(tree, raw.folder, name)) is None:
            says = f"no file {name!r}" + (f" in {raw.folder!r}" if raw.folder else "")
            findings.append(Finding("missing image", where, says))
        else:
            files[number], sizes[number] = file, (one.get("width"), one.get("height"))

    headers = tree.headers(files.values())
    pictures = []
    for number, file in files.items():
        where, header, said = f"image {number}", headers[file], sizes[number]
        if isinstance(header, str):
            findings.append(Finding("unreadable image", where, f"{file!r}: {header}"))
        elif said in ((None, None), (0, 0)):  # many tools leave it away
            pictures.append(Picture(number, file, *header.upright))
        elif said in (header.size, header.upright):
            pictures.append(Picture(number, file, *said))
        else:
            says = f"{file!r} is {_times(header.size)} pixels, not {_times(said)}"
            findings.append(Finding("image of another size", where, says))
    return pictures


def located(tree: Tree, folder: str, name: str) -> str | None:
    """The file that a name in an annotation file means."""
    plain = name.replace("\\", "/").removeprefix("./")
    for tried in (plain, plain.rpartition("/")[2]):
        if (file := f"{folder}/{tried}" if folder else tried) in tree.names:
            return file
    return None


class _Skip(Exception):
    """Why an annotation cannot be used: its kind, and what stands there."""


def _rows(
    raw: Raw, pictures: Mapping[int, Picture], categories: Sequence[Category], findings: list[Finding]
) -> dict[int, list[dict[str, Any]]]:
    """The boxes that can be used, of each image."""
    labels = {category.id: label for label, category in enumerate(categories)}
    listed = {one["id"] for one in raw.images if isinstance(one, Mapping) and _is_id(one.get("id"))}
    rows: dict[int, list[dict[str, Any]]] = {}
    seen: dict[int, tuple[Any, ...]] = {}
    unnamed: list[dict[str, Any]] = []

    for one in raw.annotations:
        number = one.get("id") if isinstance(one, Mapping) else None
        mended: list[tuple[str, str]] = []
        picture = None
        try:
            picture = _picture(one, pictures, listed)
            row = _row(one, picture, labels, mended)
            content = (picture.id, row["label"], row["xywh"])
            if not _is_id(number):
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
    return Finding(kind, str(about.get("where") or f"annotation {_short(about.get('id'))}"), says + at, fate)


def _picture(one: Any, pictures: Mapping[int, Picture], listed: set[int]) -> Picture:
    if not isinstance(one, Mapping):
        raise _Skip("not an annotation", f"{_short(one)}, expected an object")
    number = one.get("image_id")
    if not _is_id(number) or number not in listed:
        raise _Skip("unknown image", f"image {_short(number)} is not in the list")
    if number not in pictures:
        raise _Skip("box of a skipped image", f"image {number}")
    return pictures[number]


def _row(
    one: Mapping[str, Any], picture: Picture, labels: Mapping[int, int], mended: list[tuple[str, str]]
) -> dict[str, Any]:
    """One box; what had to be mended is noted, with its kind and what stands there."""
    category, crowd = one.get("category_id"), one.get("iscrowd", 0)
    if not _is_id(category) or category not in labels:
        raise _Skip("unknown category", _short(category))
    if crowd not in (0, 1):
        raise _Skip("iscrowd", f"{_short(crowd)}, expected 0 or 1")
    given = one.get("bbox")
    if given is None or given == []:
        given = outline(one.get("segmentation"))
        if given is None:
            raise _Skip("no box", "neither a box nor an outline")
        mended.append(("no box", f"its outline gives {_short(given)}"))
    if not _is_box(given):
        raise _Skip("not a box", f"{_short(given)}, expected four finite numbers")
    xywh = tuple(float(number) for number in given)
    if min(xywh[2:]) <= 0:
        raise _Skip("no area", _short(given))
    inside = _inside(xywh, picture)
    if min(inside[2:]) <= 0:
        raise _Skip("outside the image", _short(given))
    clipped = max(abs(a - b) for a, b in zip(_corners(xywh), _corners(inside), strict=True)) > SLACK
    if clipped:
        mended.append(("partly outside", f"{_short(given)} is cut off"))
        xywh = inside
    if wrong := _wrong_mask(one.get("segmentation"), picture):
        mended.append(("mask", f"{wrong}: its box is used"))
    area, of_box = one.get("area"), xywh[2] * xywh[3]
    if area is None:
        area = of_box
    elif not (_is_number(area) and area > 0):
        mended.append(("area", f"{_short(area)}: that of its box is used"))
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


def outline(segmentation: Any) -> list[float] | None:
    """The box around an outline: COCO's polygons, [[x, y, x, y, ...], ...], or run lengths; None for neither."""
    if isinstance(segmentation, Mapping):
        return _around_runs(segmentation)
    try:
        xs = [float(x) for polygon in segmentation for x in polygon[0::2]]
        ys = [float(y) for polygon in segmentation for y in polygon[1::2]]
    except (TypeError, ValueError):
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


def _wrong_mask(mask: Any, picture: Picture) -> str | None:
    """What is wrong with a mask of run lengths, as crowds have it; nothing, if there is none."""
    if not isinstance(mask, Mapping):
        return None
    size, counts = mask.get("size"), mask.get("counts")
    if size != [picture.height, picture.width]:
        return f"its mask is of size {_short(size)}"
    if isinstance(counts, list) and not _runs_fit(size, counts):
        return "the runs of its mask do not fill it"
    return None


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


def _is_id(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < LARGEST


def _times(size: Sequence[Any]) -> str:
    return " x ".join(str(side) for side in size)


def _of(left: int, count: int, things: str) -> str:
    return f"{count:,} {things}" if left == count else f"{left:,} of {count:,} {things}"


def _short(value: object) -> str:
    """
    >>> _short(list(range(100)))
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1...'
    """
    text = json.dumps(value, default=str)
    return text if len(text) <= 43 else f"{text[:40]}..."
