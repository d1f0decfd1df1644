"""A folder of annotated images of any known format -> the images to train on and those to test on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whereformer.errors import InputError, check_one_of
from whereformer.lab.data import HELD_OUT, shuffled
from whereformer.lab.detect import coco, voc, yolo
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.checks import FORMS, Broken, Raw, examine
from whereformer.lab.detect.findings import Report
from whereformer.lab.detect.tree import Progress, Tree

FORMATS: dict[str, Any] = {"COCO": coco, "YOLO": yolo, "Pascal VOC": voc}


@dataclass(frozen=True, eq=False)
class Detection:
    """Two sets of images with one numbering of their categories, and what was found in them.

    Args:
        format: which it was: "COCO", "YOLO" or "Pascal VOC".
        train, validation: the images.
        reports: one for each set that was read.
        held_out: whether `validation` was split off because there was but one set.
    """

    format: str
    train: Annotations
    validation: Annotations
    reports: tuple[Report, ...]
    held_out: bool = False


def load(
    data: Path | str, *, broken: Broken = "skip", decode: bool = False, on_image: Progress | None = None
) -> Detection:
    """Reads what lies in a folder or a zip file, whichever format that is.

    Without a set "validation", the set "test" is tested on; without that, a quarter of the images, the same at
    every call.

    Args:
        data: the folder; zip files in it count as unpacked.
        broken: "skip" leaves broken images and annotations away, "refuse" raises if there are any.
        decode: whether every image is decoded, to find those that are damaged inside; else its header is read.
        on_image: told how many headers of images are read.

    Raises:
        InputError: no format is recognised; the data is refused, or of no use.
    """
    check_one_of("broken", broken, FORMS)
    tree = Tree(data, on_image, decode=decode)
    name, sets = _recognised(tree, data)
    raws = FORMATS[name].read(tree, _chosen(sets))
    return _detection(name, raws, dict.fromkeys(raws, tree), broken)


def load_set(
    data: Path | str, which: str = "validation", *, broken: Broken = "skip", on_image: Progress | None = None
) -> tuple[str, Annotations, Report]:
    """One of the two sets that `load` finds, "train" or "validation", for which images of the other need not be
    there; or, if there is but one, "all" of it.

    Returns:
        which it is, the images, and what was found in them.

    Raises:
        InputError: as `load` does.
    """
    check_one_of("broken", broken, FORMS)
    tree = Tree(data, on_image)
    name, sets = _recognised(tree, data)
    chosen = _chosen(sets)
    alone = len(chosen) == 1
    read = "train" if alone else which
    if name == "COCO":  # the others number the categories of all sets together
        chosen = {read: chosen[read]}
    annotations, report = examine(FORMATS[name].read(tree, chosen)[read], tree, broken=broken)
    return "all" if alone else which, annotations, report


def load_files(
    train: tuple[Path | str, Path | str],
    validation: tuple[Path | str, Path | str] | None = None,
    *,
    broken: Broken = "skip",
    decode: bool = False,
    on_image: Progress | None = None,
) -> Detection:
    """The same from files in COCO's format, each with the folder or the zip file that its images are in.

    Args:
        train, validation: the JSON file, and the images.
    """
    check_one_of("broken", broken, FORMS)
    pairs = {"train": train} | ({"validation": validation} if validation else {})
    trees = {split: Tree(images, on_image, decode=decode) for split, (_, images) in pairs.items()}
    raws = {split: coco.raw(_text(Path(file)), str(file), trees[split]) for split, (file, _) in pairs.items()}
    return _detection("COCO", raws, trees, broken)


def _recognised(tree: Tree, data: Path | str) -> tuple[str, Mapping[str, Any]]:
    """The format, and what each set is read from."""
    for name, module in FORMATS.items():
        if sets := module.found(tree):
            return name, sets
    formats = "; ".join(f"{name} ({module.LOOKED_FOR})" for name, module in FORMATS.items())
    raise InputError(f"data={str(data)!r} holds {len(tree.names):,} files, but nothing of {formats}")


def _chosen(sets: Mapping[str, Any]) -> dict[str, Any]:
    """One set to train on, and one to test on if there is one; what they are read from."""
    train = next((sets[name] for name in ("train", "all") if name in sets), None)
    test = next((sets[name] for name in ("validation", "test") if name in sets), None)
    if train is None:
        train, test = test, None
    return {"train": train} | ({"validation": test} if test is not None else {})


def _detection(name: str, raws: Mapping[str, Raw], trees: Mapping[str, Tree], broken: Broken) -> Detection:
    examined = {split: examine(raw, trees[split], broken=broken) for split, raw in raws.items()}
    reports = tuple(report for _, report in examined.values())
    train = examined["train"][0]
    if "validation" in examined:
        return Detection(name, train, examined["validation"][0].relabelled(train.categories), reports)
    order = shuffled(len(train), 0, 0)
    count = max(1, round(HELD_OUT * len(order)))
    if count == len(order):
        raise InputError(f"{reports[0].name}: one image is left, expected another one to test on")
    held, kept = sorted(order[:count]), sorted(order[count:])
    return Detection(name, train.subset(kept), train.subset(held), reports, held_out=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"annotations={str(path)!r} cannot be read: {error}") from None
