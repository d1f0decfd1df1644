"""What a DETR finds on images, in pixels."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    ConditionalDetrForObjectDetection,
    ConditionalDetrImageProcessor,
    DetrForObjectDetection,
    DetrImageProcessor,
)

from whereformer.errors import InputError, check_count
from whereformer.lab.detect.augment import Augmentation, collate
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.dataset import BoxedImages
from whereformer.lab.detect.evaluate import predicted
from whereformer.lab.detect.tree import Progress

PROCESSORS: dict[type[nn.Module], type[Any]] = {
    DetrForObjectDetection: DetrImageProcessor,
    ConditionalDetrForObjectDetection: ConditionalDetrImageProcessor,
}
"""What makes boxes with scores of a model's outputs: softmax over classes without "no object", or sigmoids."""


def predictions(
    model: nn.Module,
    annotations: Annotations,
    augmentation: Augmentation,
    *,
    batch_size: int = 8,
    loader_workers: int = 0,
    device: torch.device | str = "cpu",
    on_batch: Progress = lambda done, images: None,
) -> list[dict[str, Any]]:
    """All boxes that the model finds, as `evaluate` takes them: one a query for DETR, the 100 surest pairs of
    query and category for Conditional DETR.

    Args:
        model: transformers', equipped or not, on the `device`; its label i is the i-th category of `annotations`.
        annotations: the images; their boxes are not looked at.
        augmentation: says to which size images to test on are brought.
        batch_size: images at once; smaller ones are padded.
        loader_workers: processes that read images.
        on_batch: told how many images of how many are done.

    Raises:
        InputError: the model is of another kind, or an image can no longer be read.
    """
    check_count("batch_size", batch_size)
    processor = _processor(model)
    images = BoxedImages(annotations, augmentation.testing())
    loader = DataLoader(images, batch_size, num_workers=loader_workers, collate_fn=collate)
    dtype = next(parameter.dtype for parameter in model.parameters())
    training, rows = model.training, []
    model.eval()
    try:
        with torch.inference_mode():
            for number, batch in enumerate(loader):
                out = model(batch["pixel_values"].to(device, dtype), pixel_mask=batch["pixel_mask"].to(device))
                found = processor.post_process_object_detection(out, -1.0, batch["orig_size"].to(device))
                for image_id, one in zip(batch["image_id"].tolist(), found, strict=True):
                    rows += predicted(annotations, image_id, one["boxes"], one["labels"], one["scores"])
                on_batch(min(len(images), (number + 1) * batch_size), len(images))
    finally:
        model.train(training)
    return rows


def _processor(model: nn.Module) -> Any:
    for kind, processor in PROCESSORS.items():
        if isinstance(model, kind):
            return processor()
    raise InputError(
        f"model is a {type(model).__name__}, expected one of {[kind.__name__ for kind in PROCESSORS]}"
    )
