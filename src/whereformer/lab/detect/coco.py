"""COCO's format: a JSON file of images, annotations and categories for each set, beside a folder of images."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whereformer.errors import InputError
from whereformer.lab.detect.checks import Raw, located
from whereformer.lab.detect.tree import Tree

SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
PARTS = ("images", "annotations", "categories")
OTHERS = ("captions_", "person_keypoints_", "panoptic_", "stuff_", "image_info_")
HEAD = 1 << 16  # bytes in which a file shows of which kind it is
SAMPLE = 50  # images by which the folder of images is recognised
LOOKED_FOR = "annotations/instances_<set>.json, <set>/_annotations.coco.json, annotations/<set>.json or <set>.json"


def split_of(path: str) -> str | None:
    """Which set a file or folder is of, by a word in its name, or else in those of the folders above it.

    >>> split_of("instances_train2017.json"), split_of("valid/images"), split_of("street")
    ('train', 'validation', None)
    """
    for name in reversed(path.lower().split("/")):
        words = set(re.findall(r"[a-z]+", name))
        for split, spellings in SPLITS.items():
            if not words.isdisjoint(spellings):
                return split
    return None


def found(tree: Tree) -> dict[str, str]:
    """The JSON file of each set: "train", "validation", "test", or "all" where one file is all there is."""
    sets: dict[str, str] = {}
    files = sorted(_candidates(tree), key=_rank)
    for name in files:
        if split := split_of(name):
            sets.setdefault(split, name)
    return sets or ({"all": files[0]} if files else {})


def read(tree: Tree, sets: dict[str, str]) -> dict[str, Raw]:
    """All sets.

    Raises:
        InputError: a file is no JSON of this kind, or none of its images is there.
    """
    return {split: raw(tree.text(name), name, tree) for split, name in sets.items()}


def raw(text: str, name: str, images: Tree) -> Raw:
    """One set.

    Args:
        text: the JSON.
        name: of the file that it is from.
        images: where the images are.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name!r} is not JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(part), list) for part in PARTS):
        keys = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise InputError(f"{name!r} holds {keys}, expected lists named {', '.join(PARTS)}")
    parts = [found[part] for part in PARTS]
    return Raw(name, *parts, folder=_folder(images, name, parts[0]))


def _candidates(tree: Tree) -> Iterator[str]:
    """JSON files in which a part of the format is begun, where such files lie."""
    keys = [f'"{part}"'.encode() for part in PARTS]
    for name in tree.names:
        path = Path(name)
        near = path.parent.name == "annotations" or len(path.parts) <= 2
        if path.suffix.lower() == ".json" and near and not path.stem.lower().startswith(OTHERS):
            head = tree.start(name, HEAD)
            if any(key in head for key in keys):
                yield name


def _rank(name: str) -> tuple[bool, bool, int, str]:
    """The likeliest first."""
    stem = Path(name).stem.lower()
    return not stem.startswith(("instances", "_annotations")), "annotations" not in name, name.count("/"), name


def _folder(tree: Tree, name: str, images: list[Any]) -> str:
    """The folder under which most images of a sample are; of several, the one that is named most like the file."""
    named = [one["file_name"] for one in images if isinstance(one, dict) and isinstance(one.get("file_name"), str)]
    sample = named[:: max(1, len(named) // SAMPLE)][:SAMPLE]
    hits = Counter(
        {folder: sum(located(tree, folder, file) is not None for file in sample) for folder in tree.folders()}
    )
    most = max(hits.values())
    if sample and not most:
        raise InputError(
            f"{name!r} lists images such as {sample[0]!r}, but none of them lies in or under {str(tree.root)!r}"
        )
    stem, beside = Path(name).stem, Path(name).parent.as_posix()

    def likeness(folder: str) -> tuple[bool, bool, bool, int]:
        last = folder.rpartition("/")[2]
        under = f"{folder}/".startswith(f"{beside}/")
        return split_of(folder) != split_of(name), not (last and last in stem), not under, folder.count("/")

    return min((folder for folder, count in hits.items() if count == most), key=likeness)
