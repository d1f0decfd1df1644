"""YOLO's format: a text file for each image; in a line the class, and the box in parts of the image's size."""

from typing import Any

from whereformer.errors import InputError
from whereformer.lab.detect.checks import Raw
from whereformer.lab.detect.coco import split_of
from whereformer.lab.detect.findings import Finding
from whereformer.lab.detect.tree import SUFFIXES, Header, Tree

LOOKED_FOR = "data.yaml with images/<set>/ and labels/<set>/, or <set>/images/ and <set>/labels/"

DIGITS = 5  # of the number of a class that nothing names, at most


def found(tree: Tree) -> dict[str, list[str]]:
    """The images of each set: all in the folders where some have a text file, in sets that the YAML file tells or
    the folders' names."""
    images = [name for name in tree.names if name.lower().endswith(SUFFIXES)]
    labelled = {_folder(name) for name in images if _label(name) in tree.names}
    if not labelled:
        return {}  # YAML files may be of anything
    said = _said_sets(_yaml(tree), labelled)
    sets: dict[str, list[str]] = {}
    for name in images:
        if (folder := _folder(name)) in labelled:
            split = said.get(folder) or split_of(folder) or "all"
            sets.setdefault(split, []).append(name)
    if len(sets) > 1:
        sets.pop("all", None)
    return sets


def read(tree: Tree, sets: dict[str, list[str]]) -> dict[str, Raw]:
    """All sets. An image without a text file is one without objects; a line with more than four numbers is an
    outline, and stands for the box around it.

    Raises:
        InputError: the YAML file does not name the classes.
    """
    headers = tree.headers(name for names in sets.values() for name in names)
    lines = {name: _lines(tree, name) for names in sets.values() for name in names}
    named = _names(tree)
    categories = [{"id": number, "name": name} for number, name in (named or _numbers(lines)).items()]
    return {
        split: _raw(f"{tree.root} ({split})", {name: headers[name] for name in names}, lines, categories)
        for split, names in sets.items()
    }


def _raw(title: str, headers: dict[str, Header | str], lines: dict[str, Any], categories: list[Any]) -> Raw:
    raw = Raw(title, [], [], categories)
    for image_id, (name, header) in enumerate(headers.items(), 1):
        raw.images.append({"id": image_id, "file_name": name})
        if isinstance(lines[name], str):
            raw.findings.append(Finding("unreadable annotation file", _label(name), lines[name]))
            continue
        size = (1, 1) if isinstance(header, str) else header.upright
        if not isinstance(header, str):
            raw.images[-1] |= {"width": size[0], "height": size[1]}
        for number, line in lines[name]:
            where = f"{_label(name)}, line {number}"
            try:
                label, *values = (float(word) for word in line.split())
                box = _box(values, *size)
            except ValueError:
                raw.findings.append(Finding("not a box", where, f"{line!r}, expected a class and numbers"))
                continue
            raw.annotations.append(
                {
                    "id": len(raw.annotations) + 1,
                    "where": where,
                    "image_id": image_id,
                    "category_id": int(label) if label == label // 1 else label,
                    "bbox": box,
                }
            )
    return raw


def _box(values: list[float], width: int, height: int) -> list[float]:
    """Left, top, width, height in pixels.

    >>> _box([0.5, 0.5, 0.25, 1.0], 40, 10)
    [15.0, 0.0, 10.0, 10.0]
    >>> _box([0.0, 0.0, 0.5, 0.0, 0.5, 1.0], 40, 10)
    [0.0, 0.0, 20.0, 10.0]
    """
    if len(values) == 4:
        x, y, w, h = values
        left, top = x - w / 2, y - h / 2
    elif len(values) >= 6 and len(values) % 2 == 0:
        left, top = min(values[0::2]), min(values[1::2])
        w, h = max(values[0::2]) - left, max(values[1::2]) - top
    else:
        raise ValueError("neither a box nor an outline")
    return [left * width, top * height, w * width, h * height]


def _label(image: str) -> str:
    """The text file of an image: under `labels` as it is under `images`, or beside it.

    >>> _label("images/train/0.jpg"), _label("train/images/0.jpg"), _label("train/0.jpg")
    ('labels/train/0.txt', 'train/labels/0.txt', 'train/0.txt')
    """
    *folders, file = image.split("/")
    if "images" in folders:
        last = len(folders) - 1 - folders[::-1].index("images")
        folders[last] = "labels"
    return "/".join([*folders, f"{file.rpartition('.')[0]}.txt"])


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _lines(tree: Tree, image: str) -> list[tuple[int, str]] | str:
    """The lines that say something, with their numbers; or why they cannot be read."""
    name = _label(image)
    if name not in tree.names:
        return []
    try:
        return [(number, line) for number, line in enumerate(tree.text(name).splitlines(), 1) if line.strip()]
    except InputError as error:
        return str(error)


def _yaml(tree: Tree) -> dict[str, Any]:
    """The YAML file that names classes, if there is one.

    Raises:
        InputError: it is no YAML, or its classes are neither a list nor numbered.
    """
    import yaml

    for name in sorted(tree.names, key=lambda name: (name.count("/"), name)):
        if name.endswith((".yaml", ".yml")) and name.count("/") <= 1:
            text = tree.text(name)
            try:
                content = yaml.safe_load(text)
            except (yaml.YAMLError, ValueError) as error:  # of dates too
                raise InputError(
                    f"{str(tree.root / name)!r} is not YAML: {' '.join(str(error).split())}"
                ) from None
            if not isinstance(content, dict) or "names" not in content:
                continue
            names = content["names"]
            numbered = dict(enumerate(names)) if isinstance(names, list) else names
            if not isinstance(numbered, dict) or not all(type(number) is int for number in numbered):
                raise InputError(f"{str(tree.root / name)!r}: names={names!r}, expected a list of classes")
            return {**content, "names": {number: str(numbered[number]) for number in sorted(numbered)}}
    return {}


def _names(tree: Tree) -> dict[int, str]:
    """The classes by number, as the YAML file or classes.txt names them; none if neither is there."""
    if names := _yaml(tree).get("names"):
        return names
    lists = sorted((name for name in tree.names if name.rpartition("/")[2] == "classes.txt"), key=len)
    lines = (line.strip() for line in tree.text(lists[0]).splitlines()) if lists else ()
    return dict(enumerate(line for line in lines if line))


def _said_sets(content: dict[str, Any], folders: set[str]) -> dict[str, str]:
    """The set of each folder that the YAML file leads to; its paths may begin elsewhere."""
    said: dict[str, str] = {}
    for key, split in (("train", "train"), ("val", "validation"), ("test", "test")):
        paths = content.get(key) or ()
        for path in paths if isinstance(paths, list) else [paths]:
            end = "/".join(part for part in str(path).replace("\\", "/").split("/") if part not in ("", ".", ".."))
            for folder in folders:
                if f"/{folder}/".endswith(f"/{end}/") or f"/{folder}/".startswith(f"/{end}/"):
                    said.setdefault(folder, split)
    return said


def _numbers(lines: dict[str, Any]) -> dict[int, str]:
    """Classes that nothing names, called by their numbers: all up to the highest that some line begins with, but
    for those that can only be mistakes."""
    words = (line.split()[0] for found in lines.values() if not isinstance(found, str) for _, line in found)
    highest = max((int(word) for word in words if word.isdecimal() and len(word) <= DIGITS), default=-1)
    return {number: str(number) for number in range(highest + 1)}
