"""A small set for detection that is drawn, not downloaded: shapes on textured grounds, in COCO's format."""

import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whereformer.errors import InputError, check_at_least, check_count, check_one_of
from whereformer.lab import record
from whereformer.lab.detect.scene import CATEGORIES, SIDES, draw

SETS = ("train", "val")
PART = 250  # images whose annotations are written at once, until all are there
FORMATS = ("png", "jpg")


@dataclass(frozen=True)
class Shapes:
    """What is drawn.

    Args:
        train, val: images to train on and to test on.
        size: pixels of the longer side; the shorter one is from three quarters of it on.
        seed: another one draws other images.
        most: objects in an image, at most.
        sides: of the objects, in parts of the image's shorter side, from the least to the greatest.
        crowds: parts of the images that hold a crowd, of many small shapes that are not told apart.
        format: of the images: "png", the same pixels everywhere; or "jpg", smaller.
    """

    train: int = 1000
    val: int = 250
    size: int = 128
    seed: int = 0
    most: int = 8
    sides: tuple[float, float] = SIDES
    crowds: float = 0.08
    format: str = "png"

    def __post_init__(self) -> None:
        for name in ("train", "val", "size", "most"):
            check_count(name, getattr(self, name))
        check_at_least("size", self.size, 32)
        check_at_least("crowds", self.crowds, 0)
        if self.crowds > 1:
            raise InputError(f"crowds={self.crowds!r}, expected a number from 0 to 1")
        sides = tuple(self.sides) if isinstance(self.sides, list | tuple) else ()
        if len(sides) != 2 or not all(type(side) is float for side in sides) or not 0 < sides[0] <= sides[1] <= 1:
            raise InputError(f"sides={self.sides!r}, expected two parts of 1, the least and the greatest")
        object.__setattr__(self, "sides", sides)
        if type(self.seed) is not int or self.seed < 0:
            raise InputError(f"seed={self.seed!r}, expected a whole number from 0 on")
        check_one_of("format", self.format, FORMATS)


def generate(out: Path, shapes: Shapes, on_image: Callable[[int, int], None] | None = None) -> Path:
    """Writes annotations/instances_train.json and _val.json, train/ and val/ into the folder `out`.

    Where that was interrupted it goes on, and where all is there it does nothing. Every file is whole at any
    moment; those of annotations come last. One process at a time may do so.

    Args:
        out: the folder, new or with the same set.
        shapes: what to draw.
        on_image: told how many images of how many are there.

    Returns:
        out.

    Raises:
        InputError: the folder holds another set.
    """
    _claim(out, shapes)
    total, done = shapes.train + shapes.val, 0
    for name in SETS:
        count = getattr(shapes, name)
        target = out / "annotations" / f"instances_{name}.json"
        if target.exists():
            done += count
            continue
        parts = []
        for start in range(0, count, PART):
            numbers = range(start, min(start + PART, count))
            part = out / ".parts" / f"{name}-{start:07d}.json"
            if part.exists():
                done += len(numbers)
            else:
                scenes = []
                for number in numbers:
                    scenes.append(_written(out, shapes, name, number))
                    done += 1
                    if on_image:
                        on_image(done, total)
                record.write(part, json.dumps(scenes))
            parts.append(part)
        record.write(target, json.dumps(_instances(shapes, name, parts)))
    shutil.rmtree(out / ".parts", ignore_errors=True)
    if on_image:
        on_image(total, total)
    return out


def _claim(out: Path, shapes: Shapes) -> None:
    path, asked = out / "shapes.json", {"shapes": list(CATEGORIES), **asdict(shapes)}
    if path.exists():
        if (there := record.read_json(path)) != json.loads(json.dumps(asked)):
            raise InputError(f"out={str(out)!r} holds other shapes, {there}: give another folder")
    elif out.exists() and not out.is_dir():
        raise InputError(f"out={str(out)!r} is a file: give a folder")
    elif out.exists() and any(not there.name.startswith(".") for there in out.iterdir()):
        raise InputError(f"out={str(out)!r} holds something else: give another folder")
    else:
        record.write_json(path, asked)


def _written(out: Path, shapes: Shapes, name: str, number: int) -> dict[str, Any]:
    """Draws one image and writes it; returns what COCO's format says of it."""
    from PIL import Image

    scene = draw((shapes.seed, SETS.index(name), number), shapes.size, shapes.most, shapes.crowds, shapes.sides)
    height, width = scene.pixels.shape[:2]
    file = f"{number + 1:06d}.{shapes.format}"
    buffer = io.BytesIO()
    options: dict[str, Any] = {"compress_level": 1} if shapes.format == "png" else {"quality": 92}
    Image.fromarray(scene.pixels).save(buffer, "PNG" if shapes.format == "png" else "JPEG", **options)
    path = out / name / file
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{file}.draft")
    draft.write_bytes(buffer.getvalue())
    os.replace(draft, path)
    return {
        "image": {"id": number + 1, "file_name": file, "width": width, "height": height},
        "annotations": scene.annotations,
    }


def _instances(shapes: Shapes, name: str, parts: list[Path]) -> dict[str, Any]:
    scenes = [scene for part in parts for scene in record.read_json(part)]
    annotations = [
        {"id": 0, "image_id": scene["image"]["id"], **one} for scene in scenes for one in scene["annotations"]
    ]
    for number, one in enumerate(annotations, 1):
        one["id"] = number
    return {
        "info": {"description": "shapes drawn by whereformer", "set": name, **asdict(shapes)},
        "images": [scene["image"] for scene in scenes],
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in enumerate(CATEGORIES, 1)],
    }
