"""Pascal VOC's format: an XML file for each image, with corners of boxes in pixels counted from 1, both inside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from whereformer.lab.detect.checks import Raw
from whereformer.lab.detect.coco import split_of
from whereformer.lab.detect.findings import Finding
from whereformer.lab.detect.tree import SUFFIXES, Tree

LOOKED_FOR = "Annotations/*.xml with JPEGImages/ and ImageSets/Main/<set>.txt, or <set>/*.xml"

LISTS = (("train", "train"), ("train", "trainval"), ("validation", "val"), ("test", "test"))
"""Which file in ImageSets/Main is of which set; the first that is there counts."""


def found(tree: Tree) -> dict[str, list[str]]:
    """The XML files of each set: "train", "validation", "test", or "all" where nothing tells sets apart."""
    files = [name for name in tree.names if name.lower().endswith(".xml")]
    sets: dict[str, list[str]] = {}
    lists = {root: _lists(tree, root) for root in {_above(name) for name in files}}
    for name in files:
        for split in _splits(name, lists[_above(name)]):
            sets.setdefault(split, []).append(name)
    if not sets or sets.keys() == {"test"}:
        return {"all": files} if files else {}
    return sets


def read(tree: Tree, sets: dict[str, list[str]]) -> dict[str, Raw]:
    """All sets, with one numbering of the categories, in alphabetical order.

    An object marked "difficult" is an object like others. Where a box of some set begins at pixel 0, pixels are
    taken to count from 0 everywhere, and the far corner not to belong to the box, as most tools write it.
    """
    documents = {name: _parsed(tree, name) for names in sets.values() for name in names}
    whole = (document for document in documents.values() if not isinstance(document, str))
    objects = [thing for document in whole for thing in document.findall("object")]
    corners = (_text(thing, f"bndbox/{side}") for thing in objects for side in ("xmin", "ymin"))
    first = 0 if any(corner in ("0", "0.0") for corner in corners) else 1
    names = sorted({_text(thing, "name") for thing in objects} - {""})
    categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    numbers = {one["name"]: one["id"] for one in categories}
    return {
        split: _raw(
            tree, f"{tree.root} ({split})", {name: documents[name] for name in files}, numbers, categories, first
        )
        for split, files in sets.items()
    }


def _raw(
    tree: Tree, title: str, documents: dict[str, Any], numbers: dict[str, int], categories: list[Any], first: int
) -> Raw:
    raw = Raw(title, [], [], categories)
    for image_id, (name, document) in enumerate(documents.items(), 1):
        if isinstance(document, str):
            raw.findings.append(Finding("unreadable annotation file", name, document))
            continue
        size = tuple(_whole(_text(document, f"size/{side}")) for side in ("width", "height"))
        raw.images.append(
            {"id": image_id, "file_name": _image(tree, name, document), "width": size[0], "height": size[1]}
        )
        for index, thing in enumerate(document.findall("object"), 1):
            raw.annotations.append(
                {
                    "id": len(raw.annotations) + 1,
                    "where": f"{name}, object {index}",
                    "image_id": image_id,
                    "category_id": numbers.get(_text(thing, "name"), _text(thing, "name")),
                    "bbox": _box(thing, first),
                }
            )
    return raw


def _above(name: str) -> str:
    """The folder above the one that holds a file, with a slash at its end; the root is "".

    >>> _above("VOC2012/Annotations/0.xml"), _above("train/0.xml"), _above("0.xml")
    ('VOC2012/', '', '')
    """
    above = name.rpartition("/")[0].rpartition("/")[0]
    return f"{above}/" if above else ""


def _splits(name: str, lists: dict[str, set[str]]) -> Iterator[str]:
    """The sets that an XML file belongs to: by the lists beside its folder, or else by the folders' names."""
    if lists:
        yield from (split for split, stems in lists.items() if Path(name).stem in stems)
    elif split := split_of(name.rpartition("/")[0]):
        yield split


def _lists(tree: Tree, root: str) -> dict[str, set[str]]:
    """The names of the images of each set that has a list."""
    lists: dict[str, set[str]] = {}
    for split, spelling in LISTS:
        if (file := f"{root}ImageSets/Main/{spelling}.txt") in tree.names:
            lines = (line.split() for line in tree.text(file).splitlines())
            lists.setdefault(split, {words[0] for words in lines if words})
    return lists


def _parsed(tree: Tree, name: str) -> Any:
    try:
        return ElementTree.fromstring(tree.text(name))
    except (ElementTree.ParseError, ValueError) as error:
        return str(error)


def _image(tree: Tree, name: str, document: Any) -> str:
    """The image of an XML file: of the same name or the one it says, beside it or in JPEGImages or images."""
    path, said = Path(name), Path(_text(document, "filename").replace("\\", "/"))
    folders = (path.parent, *(path.parent.parent / folder for folder in ("JPEGImages", "images", "Images", "")))
    stems = [f"{path.stem}{suffix}" for suffix in SUFFIXES]
    tried = [
        (folder / file).as_posix()
        for folder in folders
        for file in (
            said.name,
            *stems,
            *(file.upper() for file in stems),
            *(f"{path.stem}{s.upper()}" for s in SUFFIXES),
        )
    ]
    return next((file for file in tried if file in tree.names), said.name or path.stem)


def _box(thing: Any, first: int) -> list[float] | None:
    """Left, top, width, height; corners that are no numbers are kept as they are, for the checks."""
    corners = [_text(thing, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
    if not any(corners):
        return None
    try:
        left, top, right, bottom = (float(corner) for corner in corners)
    except ValueError:
        return corners  # pyright: ignore[reportReturnType]
    return [left - first, top - first, right - left + first, bottom - top + first]


def _text(element: Any, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _whole(text: str) -> int | str | None:
    """A number of pixels; None where none is said."""
    try:
        return int(text) if text else None
    except ValueError:
        return text
