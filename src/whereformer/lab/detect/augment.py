"""From images of all sizes to batches that DETR takes: augmentation, resizing, padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from whereformer.errors import InputError, check_at_least, check_count
from whereformer.lab.detect.dataset import Sample

MEAN, SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
SHORTER = tuple(range(480, 801, 32))
LEAST = 1.0  # pixel: what remains of a box must be as wide and as high


@dataclass(frozen=True)
class Augmentation:
    """DETR's recipe (Carion et al. 2020, section 4): a flip; then the shorter side to one of several sizes, or, as
    often, first to another one, a random crop, and then that. All sizes are in pixels.

    Args:
        shorter: the sizes of the shorter side; images to test on get the largest.
        longest: the longer side is kept within it.
        before_crop: sizes of the shorter side before the crop.
        crop: the least and the greatest side of the crop.
        crops: how often there is one.
        flip: how often left and right are exchanged.
        colour: how much brightness, contrast and saturation may change, in parts; DETR leaves them alone.
    """

    shorter: tuple[int, ...] = SHORTER
    longest: int = 1333
    before_crop: tuple[int, ...] = (400, 500, 600)
    crop: tuple[int, int] = (384, 600)
    crops: float = 0.5
    flip: float = 0.5
    colour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shorter", "before_crop", "crop"):
            sizes = getattr(self, name)
            if isinstance(sizes, list):
                object.__setattr__(self, name, sizes := tuple(sizes))
            if not isinstance(sizes, tuple) or not sizes:
                raise InputError(f"{name}={sizes!r}, expected sizes in pixels")
            for size in sizes:
                check_count(name, size)
        check_count("longest", self.longest)
        if len(self.crop) != 2 or self.crop[0] > self.crop[1]:
            raise InputError(f"crop={self.crop!r}, expected the least and the greatest side in pixels")
        if self.longest < max(self.shorter):
            raise InputError(f"longest={self.longest}, expected at least the shorter side, {max(self.shorter)}")
        for name in ("crops", "flip", "colour"):
            check_at_least(name, value := getattr(self, name), 0)
            if value > 1:
                raise InputError(f"{name}={value!r}, expected a number from 0 to 1")

    @classmethod
    def scaled(cls, size: int) -> "Augmentation":
        """The recipe for small images: its sizes in the same proportion to `size` as DETR's to 800 pixels.

        >>> Augmentation.scaled(800) == Augmentation()
        True
        >>> Augmentation.scaled(128).shorter[0], Augmentation.scaled(128).longest, Augmentation.scaled(128).crop
        (77, 213, (61, 96))
        """
        check_count("size", size)

        def part(sizes: Sequence[int]) -> tuple[int, ...]:
            return tuple(max(1, round(one * size / 800)) for one in sizes)

        own = cls()
        crop = part(own.crop)
        return cls(part(own.shorter), part([own.longest])[0], part(own.before_crop), (crop[0], crop[1]))

    def training(self) -> v2.Transform:
        """For images to train on."""
        resize = ShortestSize(list(self.shorter), self.longest)
        cropped = [ShortestSize(list(self.before_crop)), RandomCrop(*self.crop), resize]
        steps: list[Any] = [
            v2.RandomHorizontalFlip(self.flip),
            v2.RandomChoice([resize, v2.Compose(cropped)], p=[1 - self.crops, self.crops]),
        ]
        if self.colour:
            steps.append(v2.ColorJitter(self.colour, self.colour, self.colour))
        return v2.Compose([*steps, *_finish()])

    def testing(self) -> v2.Transform:
        """For images to test on: nothing is random."""
        return v2.Compose([ShortestSize([max(self.shorter)], self.longest), *_finish()])


class ShortestSize(v2.RandomShortestSize):
    """The shorter side to one of some sizes; no side to less than a pixel, however long the other one is."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"size": tuple(max(1, side) for side in super().make_params(flat_inputs)["size"])}


class RandomCrop(v2.Transform):
    """A part of the image whose sides are drawn, each for itself, from `least` to `greatest` pixels, or less where
    the image is smaller."""

    def __init__(self, least: int, greatest: int) -> None:
        super().__init__()
        self.least, self.greatest = least, greatest

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        sides = v2.query_size(flat_inputs)
        drawn = [self._draw(min(self.least, side), min(self.greatest, side)) for side in sides]
        corner = [self._draw(0, side - part) for side, part in zip(sides, drawn, strict=True)]
        return {"top": corner[0], "left": corner[1], "height": drawn[0], "width": drawn[1]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(F.crop, inpt, **params)

    def _draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, ()))


def _finish() -> list[v2.Transform]:
    """What is left of the boxes, and standardised pixels."""
    return [
        v2.ClampBoundingBoxes(),
        v2.SanitizeBoundingBoxes(min_size=LEAST, labels_getter=_of_boxes),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(list(MEAN), list(SD)),
    ]


def _of_boxes(sample: Sample) -> tuple[Tensor, ...]:
    """What has a row for each box."""
    return tuple(sample[1][key] for key in ("labels", "area", "iscrowd"))


def collate(samples: Sequence[Sample], multiple: int = 1) -> dict[str, Any]:
    """A batch as transformers' DETR takes it; images lie in its top left corner.

    | key          | is                                                                  |
    |--------------|---------------------------------------------------------------------|
    | pixel_values | [batch, 3, height, width], float32, 0 beside the images             |
    | pixel_mask   | [batch, height, width], bool, True on the images                    |
    | labels       | for each image {"class_labels": [boxes], "boxes": [boxes, 4]}       |
    | image_id     | [batch], int64                                                      |
    | orig_size    | [batch, 2], int64: height and width as the image is stored          |

    The boxes are centre, width and height in parts of the image's own size, not of the batch's, as DETR's released
    weights say them.

    Args:
        samples: images and targets.
        multiple: height and width of the batch are rounded up to it.
    """
    images = [image for image, _ in samples]
    height, width = (-(-max(image.shape[axis] for image in images) // multiple) * multiple for axis in (1, 2))
    pixels = torch.zeros(len(images), 3, height, width)
    mask = torch.zeros(len(images), height, width, dtype=torch.bool)
    for row, image in enumerate(images):
        pixels[row, :, : image.shape[1], : image.shape[2]] = image
        mask[row, : image.shape[1], : image.shape[2]] = True
    targets = [target for _, target in samples]
    return {
        "pixel_values": pixels,
        "pixel_mask": mask,
        "labels": [
            {
                "class_labels": target["labels"],
                "boxes": in_parts(target["boxes"], (image.shape[1], image.shape[2])),
            }
            for image, target in samples
        ],
        "image_id": torch.stack([target["image_id"] for target in targets]),
        "orig_size": torch.stack([target["orig_size"] for target in targets]),
    }


def in_parts(xyxy: Tensor, size: tuple[int, int]) -> Tensor:
    """Corners in pixels -> centre, width and height in parts of the image's `size`, (height, width).

    >>> in_parts(torch.tensor([[0.0, 0.0, 20.0, 5.0]]), (10, 40)).tolist()
    [[0.25, 0.25, 0.5, 0.5]]
    """
    corners = xyxy.as_subclass(Tensor)
    scale = corners.new_tensor([size[1], size[0]])
    low, high = corners[:, :2] / scale, corners[:, 2:] / scale
    return torch.cat([(low + high) / 2, high - low], dim=1)


def in_pixels(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """The inverse of `in_parts`.

    >>> in_pixels(torch.tensor([[0.25, 0.25, 0.5, 0.5]]), (10, 40)).tolist()
    [[0.0, 0.0, 20.0, 5.0]]
    """
    scale = boxes.new_tensor([size[1], size[0]])
    centre, half = boxes[..., :2] * scale, boxes[..., 2:] * scale / 2
    return torch.cat([centre - half, centre + half], dim=-1)
