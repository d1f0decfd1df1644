"""Images without boxes, for a detector to look at."""

import os
from collections.abc import Sequence
from pathlib import Path

from whereformer.errors import InputError
from whereformer.lab.detect.boxes import Annotations, Category, Picture, boxes_of, starts_of
from whereformer.lab.detect.checks import Finding
from whereformer.lab.detect.tree import SUFFIXES, Progress, Tree


def images(
    paths: Sequence[Path | str], categories: Sequence[Category], on_image: Progress | None = None
) -> tuple[Annotations, list[Finding]]:
    """Images numbered from 1, and those that cannot be read.

    Args:
        paths: one folder or zip file, of which all images are meant; or files, in the order of their numbers.
        categories: what is looked for.
        on_image: told how many headers of how many images are read.

    Raises:
        InputError: there is no such file, or no image among them.
    """
    whole = len(paths) == 1 and (Path(paths[0]).is_dir() or Path(paths[0]).suffix.lower() == ".zip")
    tree = Tree(paths[0], on_image) if whole else _tree([Path(path) for path in paths], on_image)
    names = [name for name in tree.names if not whole or name.lower().endswith(SUFFIXES)]
    headers = tree.headers(names)
    broken = [
        Finding("unreadable image", name, header) for name, header in headers.items() if isinstance(header, str)
    ]
    readable = [(name, header) for name, header in headers.items() if not isinstance(header, str)]
    if not readable:
        why = f": {broken[0]}" if broken else f", expected files that end in {', '.join(SUFFIXES)}"
        raise InputError(f"images={[str(path) for path in paths][:3]}: none of them is an image{why}")
    pictures = tuple(Picture(number, name, *header.upright) for number, (name, header) in enumerate(readable, 1))
    empty = starts_of([0] * len(pictures))
    return Annotations(pictures, tuple(categories), boxes_of([]), empty, tree), broken


def _tree(paths: Sequence[Path], on_image: Progress | None) -> Tree:
    """The files, whatever their names end in."""
    for path in paths:
        if not path.is_file():
            raise InputError(f"images: {str(path)!r}, expected image files, or one folder or zip file of them")
    whole = [path.absolute() for path in paths]
    root = Path(os.path.commonpath([path.parent for path in whole]))
    return Tree(root, on_image, only=[path.relative_to(root).as_posix() for path in whole])
