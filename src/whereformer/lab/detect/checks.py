"""What is wrong with a set, found before anything is trained: each finding names what it is about."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whereformer.errors import InputError, check_one_of
from whereformer.lab.detect.boxes import Annotations, Category, Picture, boxes_of, starts_of
from whereformer.lab.detect.findings import EXAMPLES, Finding, Report, short
from whereformer.lab.detect.rows import is_id, usable
from whereformer.lab.detect.tree import Tree

FORMS = ("skip", "refuse")

Broken = Literal["skip", "refuse"]


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
    listed = {one["id"] for one in raw.images if isinstance(one, Mapping) and is_id(one.get("id"))}
    labels = {category.id: label for label, category in enumerate(categories)}
    rows = usable(raw.annotations, {one.id: one for one in pictures}, listed, labels, findings)
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
        if not isinstance(one, Mapping) or not is_id(one.get("id")):
            raise InputError(f"{raw.name}: category {short(one)}, expected one with a whole number as its id")
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
        if not is_id(number):
            findings.append(Finding("image without id", f"image {short(number)}", short(one)))
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
        elif said == header.size:
            pictures.append(Picture(number, file, *header.size))
        elif said in (header.upright, (None, None), (0, 0)):  # many tools leave it away
            pictures.append(Picture(number, file, *header.upright))
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


def _times(size: Sequence[Any]) -> str:
    return " x ".join(str(side) for side in size)
