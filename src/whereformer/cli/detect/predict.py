"""whereformer detect predict: what a detector finds on images."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from whereformer.cli.detect.common import counted, detector_arguments, detector_of, fresh
from whereformer.cli.show import needs_detect, print_facts, print_table

EXAMPLES = """\
examples:
  whereformer detect predict rpe-2.0-product-ctx-1-k.pth photos --out found
  whereformer detect predict facebook/detr-resnet-50 dog.jpg street.png --threshold 0.9 --json

Writes predictions.json in COCO's format of results, images.json with the numbers that the images and the
categories have there, and a drawing of each image.
"""

LINES = 30
"""Images that the table shows."""


def arguments(command: argparse.ArgumentParser) -> None:
    detector_arguments(command)
    command.add_argument("images", nargs="+", type=Path, metavar="IMAGES", help="files, or one folder or zip file")
    command.add_argument("--threshold", type=_part, metavar="SCORE", default=0.5, help="from 0 to 1 (0.5)")
    command.add_argument("--out", type=Path, metavar="DIR", default=Path("predictions"), help="(predictions)")
    command.add_argument("--no-drawings", action="store_true", help="write the JSON files alone")


def predict(options: argparse.Namespace) -> None:
    """what a detector finds on images: boxes in pixels with scores, and drawings"""
    needs_detect()
    from whereformer.lab.detect import results
    from whereformer.lab.detect.images import images

    fresh(options.out, "images.json")
    detector = detector_of(options)
    categories = [category for category in detector.categories if category]
    with counted("images checked") as step:
        annotations, broken = images(options.images, categories, step)
    with counted("images looked at") as step:
        rows = detector.predict(
            annotations, batch_size=options.batch_size, loader_workers=options.loader_workers, on_batch=step
        )
    rows = [row for row in rows if row["score"] >= options.threshold]
    with counted("images drawn") as step:
        drawings = results.write_predictions(
            options.out, annotations, rows, options.threshold, None if options.no_drawings else step
        )
    names = {category.id: category.name for category in categories}
    found = {picture.id: Counter[str]() for picture in annotations.pictures}
    for row in rows:
        found[row["image_id"]][names[row["category_id"]]] += 1
    if options.json:
        said = {
            "detector": {"source": str(options.detector), **detector.facts},
            "threshold": options.threshold,
            "out": str(options.out),
            "boxes": len(rows),
            "images": [
                {
                    "id": one.id,
                    "file": one.file,
                    "found": dict(found[one.id]),
                    "drawing": drawings.get(one.id),
                }
                for one in annotations.pictures
            ],
            "unreadable": [{"file": one.where, "why": one.says} for one in broken],
        }
        print(json.dumps(said, indent=2, allow_nan=False))
        return
    print_facts(str(options.detector), dict(detector.facts))
    lines = [[one.file, _listed(found[one.id]), str(one.id)] for one in annotations.pictures[:LINES]]
    print_table(["file", f"found, score from {options.threshold:g} on", "number"], lines, text=2)
    if len(found) > LINES:
        print(f"... and {len(found) - LINES:,} more")
    for one in broken:
        print(f"not looked at: {one}")
    print(f"Written: {options.out / 'predictions.json'}, images.json{', drawn' if drawings else ''}")


def _listed(found: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.most_common()) or "nothing"


def _part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 0 to 1")
    return value
