"""What a backbone learns before the detector does: to tell objects apart, cut out, as DETR's does on ImageNet."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whereformer.lab.data import seed_all
from whereformer.lab.detect.augment import MEAN, SD
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.dataset import BoxedImages

SIDE = 32  # pixels
MARGIN = 1.2  # of the longer side of a box
MOST = 20_000  # objects
BATCH, LEARNING_RATE, WEIGHT_DECAY = 64, 2e-3, 1e-2


def learn_objects(backbone: nn.Module, annotations: Annotations, epochs: int, seed: int) -> float:
    """Trains the backbone, in place; how it goes follows from the seed alone.

    Returns:
        which part of the objects it named rightly in the last epoch, while it learned.
    """
    seed_all(seed)
    like = next(backbone.parameters())
    pixels, labels = (tensor.to(like.device) for tensor in cut_out(annotations))
    mean, sd = (like.new_tensor(values)[:, None, None] * 255 for values in (MEAN, SD))
    head = nn.LazyLinear(len(annotations.categories), device=like.device)
    head(_pooled(backbone, (pixels[:1] - mean) / sd))  # finds out how many channels there are
    trained = [p for p in (*backbone.parameters(), *head.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, epochs=epochs, steps_per_epoch=steps)
    right = 0
    for _ in range(epochs):
        right = 0
        for rows in torch.randperm(len(labels)).to(like.device).split(BATCH):
            images = (pixels[rows] - mean) / sd
            images = images.flip([axis for axis in (2, 3) if torch.rand(()) < 0.5])
            logits = head(_pooled(backbone, images))
            optimizer.zero_grad()
            F.cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
            schedule.step()
            right += int((logits.argmax(1) == labels[rows]).sum())
    return right / len(labels)


def cut_out(annotations: Annotations) -> tuple[Tensor, Tensor]:
    """Objects: pixels [objects, 3, SIDE, SIDE], uint8, and labels [objects]."""
    from torchvision.transforms.v2 import functional as T

    images = BoxedImages(annotations)
    found: list[Tensor] = []
    labels: list[int] = []
    for index in torch.randperm(len(images)).tolist():
        image, target = images[index]
        for (left, top, right, bottom), label in zip(
            target["boxes"].tolist(), target["labels"].tolist(), strict=True
        ):
            half = max(right - left, bottom - top) * MARGIN / 2
            x, y = (left + right) / 2, (top + bottom) / 2
            rows = slice(max(0, int(y - half)), int(y + half) + 1)
            columns = slice(max(0, int(x - half)), int(x + half) + 1)
            found.append(T.resize(image.as_subclass(Tensor)[:, rows, columns], [SIDE, SIDE]))
            labels.append(label)
        if len(labels) >= MOST:
            break
    return torch.stack(found), torch.tensor(labels)


def _pooled(backbone: Any, images: Tensor) -> Tensor:
    return backbone(images)[-1].mean((2, 3))
