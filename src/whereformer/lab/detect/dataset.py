"""Annotated images for torch: an image and what is on it, by number."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from whereformer.lab.detect.boxes import Annotations

Sample = tuple[Tensor, dict[str, Any]]


class BoxedImages(Dataset[Sample]):
    """Images as torchvision's `tv_tensors.Image`, uint8 [3, height, width], with a target each:

    | key      | is                                                                                       |
    |----------|------------------------------------------------------------------------------------------|
    | boxes    | `tv_tensors.BoundingBoxes`, left, top, right, bottom in pixels: [boxes, 4], float32      |
    | labels   | [boxes], int64, counted from 0                                                           |
    | area     | of the objects, in pixels of the image as it is stored: [boxes], float32                 |
    | iscrowd  | [boxes], int64                                                                           |
    | image_id | [], int64: the number that the file gives the image                                      |
    | orig_size| [2], int64: height and width as the image is stored                                      |

    Args:
        annotations: the images.
        transform: of torchvision.transforms.v2, or another function of (image, target).
        crowds: whether boxes that hold crowds are among the targets; DETR is not trained on them.
    """

    def __init__(
        self,
        annotations: Annotations,
        transform: Callable[[Any, dict[str, Any]], Any] | None = None,
        *,
        crowds: bool = False,
    ) -> None:
        self.annotations = annotations
        self.transform = transform
        self.crowds = crowds

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, index: int) -> Sample:
        """
        Raises:
            InputError: the image can no longer be read.
        """
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional as F

        picture = self.annotations.pictures[index]
        size = picture.height, picture.width
        image = tv_tensors.Image(
            F.pil_to_tensor(self.annotations.tree.image(picture.file, (picture.width, picture.height)))
        )
        boxes = self.annotations.of(index)
        if not self.crowds:
            boxes = boxes[~boxes.crowd]
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes.xyxy.float(), format="XYXY", canvas_size=size),  # pyright: ignore[reportCallIssue]
            "labels": boxes.labels,
            "area": boxes.area.float(),
            "iscrowd": boxes.crowd.long(),
            "image_id": torch.tensor(picture.id),
            "orig_size": torch.tensor(size),
        }
        return self.transform(image, target) if self.transform else (image, target)
