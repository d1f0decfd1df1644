"""Small annotated folders, written as tools write them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CAT, DOG = {"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}


def picture(path: Path, width: int = 40, height: int = 30, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(str(path))).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def image(number: int, file: str | None = None, width: int = 40, height: int = 30) -> dict[str, Any]:
    return {"id": number, "file_name": file or f"{number}.jpg", "width": width, "height": height}


def box(number: int, of: int, xywh: Any = (10, 5, 20, 10), category: int = 3, **more: Any) -> dict[str, Any]:
    return {"id": number, "image_id": of, "category_id": category, "bbox": list(xywh), **more}


def coco(images: Sequence[Any], annotations: Sequence[Any], categories: Sequence[Any] = (CAT, DOG)) -> str:
    return json.dumps({"images": images, "annotations": annotations, "categories": categories})


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
