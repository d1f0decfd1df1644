"""Images with boxes, as data: what every format is read into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whereformer.errors import InputError
from whereformer.lab.detect.tree import Tree


@dataclass(frozen=True, slots=True)
class Category:
    """A class of objects under the number that its file gives it."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Picture:
    """An image: `file` is its name in the `Tree` that it is read from; its size is in pixels."""

    id: int
    file: str
    width: int
    height: int


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of objects, a row each.

    Args:
        xywh: left, top, width, height in pixels: [boxes, 4], float64, the very numbers of the file.
        labels: the category, counted from 0: [boxes], int64.
        area: of the object in pixels, not of its box, where the file knows it: [boxes], float64.
        crowd: whether the box holds many objects that nobody told apart: [boxes], bool.
        ids: [boxes], int64, all different in a file.
    """

    xywh: Tensor
    labels: Tensor
    area: Tensor
    crowd: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | Tensor) -> "Boxes":
        return Boxes(self.xywh[rows], self.labels[rows], self.area[rows], self.crowd[rows], self.ids[rows])

    @property
    def xyxy(self) -> Tensor:
        """Left, top, right, bottom."""
        return torch.cat([self.xywh[:, :2], self.xywh[:, :2] + self.xywh[:, 2:]], dim=1)


@dataclass(frozen=True, eq=False)
class Annotations:
    """The images of one set, with their boxes.

    Args:
        pictures: the images.
        categories: a label is an index here.
        boxes: image after image.
        starts: the boxes of image i are the rows from starts[i] to starts[i + 1]: [pictures + 1], int64.
        tree: the files.
    """

    pictures: tuple[Picture, ...]
    categories: tuple[Category, ...]
    boxes: Boxes
    starts: Tensor
    tree: Tree

    def __len__(self) -> int:
        return len(self.pictures)

    def of(self, index: int) -> Boxes:
        """The boxes of one image."""
        return self.boxes[slice(int(self.starts[index]), int(self.starts[index + 1]))]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(category.name for category in self.categories)

    def subset(self, indices: Sequence[int]) -> "Annotations":
        """Some of the images, in the order of `indices`."""
        counts = [int(self.starts[i + 1] - self.starts[i]) for i in indices]
        spans = [torch.arange(int(self.starts[i]), int(self.starts[i + 1])) for i in indices]
        rows = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
        pictures = tuple(self.pictures[i] for i in indices)
        return replace(self, pictures=pictures, boxes=self.boxes[rows], starts=starts_of(counts))

    def relabelled(self, categories: Sequence[Category]) -> "Annotations":
        """The same boxes with the numbers of other `categories`, found by name.

        Raises:
            InputError: boxes of a category that is not among them.
        """
        numbers = {category.name: label for label, category in enumerate(categories)}
        used = {self.names[label] for label in self.boxes.labels.unique().tolist()}
        if unknown := sorted(used - numbers.keys()):
            raise InputError(f"categories={unknown} of some boxes, expected none but {list(numbers)}")
        table = torch.tensor([numbers.get(name, -1) for name in self.names], dtype=torch.int64)
        return replace(
            self, categories=tuple(categories), boxes=replace(self.boxes, labels=table[self.boxes.labels])
        )

    def to_coco(self) -> dict[str, Any]:
        """The JSON object of the COCO format, without segmentations."""
        boxes = self.boxes
        owners = [picture.id for index, picture in enumerate(self.pictures) for _ in range(self._count(index))]
        columns = zip(
            boxes.ids.tolist(),
            owners,
            boxes.labels.tolist(),
            boxes.xywh.tolist(),
            boxes.area.tolist(),
            boxes.crowd.tolist(),
            strict=True,
        )
        return {
            "images": [
                {"id": one.id, "file_name": one.file, "width": one.width, "height": one.height}
                for one in self.pictures
            ],
            "annotations": [
                {
                    "id": number,
                    "image_id": owner,
                    "category_id": self.categories[label].id,
                    "bbox": xywh,
                    "area": area,
                    "iscrowd": int(crowd),
                }
                for number, owner, label, xywh, area, crowd in columns
            ],
            "categories": [{"id": one.id, "name": one.name} for one in self.categories],
        }

    def _count(self, index: int) -> int:
        return int(self.starts[index + 1] - self.starts[index])


def starts_of(counts: Sequence[int]) -> Tensor:
    """
    >>> starts_of([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64).cumsum(0)])


def boxes_of(rows: Sequence[Mapping[str, Any]]) -> Boxes:
    """From rows with "xywh", "label", "area", "crowd" and "id"."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row[name] for row in rows], dtype=dtype)

    return Boxes(
        column("xywh", torch.float64).reshape(-1, 4),
        column("label", torch.int64),
        column("area", torch.float64),
        column("crowd", torch.bool),
        column("id", torch.int64),
    )
