"""What a detector finds on images, as `evaluate` takes it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from whereformer.lab.data import Share
from whereformer.lab.detect.augment import Augmentation, in_pixels
from whereformer.lab.detect.batches import to_test_on
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.evaluate import MOST, predicted
from whereformer.lab.detect.loss import is_detr


@torch.no_grad()
def predictions(
    model: Any,
    annotations: Annotations,
    augmentation: Augmentation,
    batch_size: int,
    device: torch.device | str = "cpu",
    on_batch: Callable[[int], None] = lambda images: None,
    *,
    share: Share = Share(),  # noqa: B008
    workers: int = 0,
) -> list[dict[str, Any]]:
    """What a detector of transformers finds on all images, or on a process's share of them.

    Args:
        on_batch: told how many images are done.
        workers: processes that read images.
    """
    trained, rows, done = model.training, [], 0
    model.eval()
    for batch in to_test_on(annotations, augmentation, batch_size, share=share, workers=workers):
        moved: Any = send_to_device(batch, device)
        out = model(moved["pixel_values"], moved["pixel_mask"])
        for number, size, found in zip(
            batch["image_id"].tolist(), batch["orig_size"].tolist(), found_by(model, out), strict=True
        ):
            boxes, labels, scores = (value.cpu() for value in found)
            rows += predicted(annotations, number, in_pixels(boxes, (size[0], size[1])), labels, scores)
        done += len(batch["image_id"])
        on_batch(done)
    model.train(trained)
    return rows


def found_by(model: Any, out: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each image the boxes in parts of its size [found, 4], labels [found] and scores [found].

    Of DETR that is, for each object query, the surest class but "nothing"; of Conditional DETR, whose classes do
    not exclude each other, the surest pairs of a query and a class.
    """
    logits, boxes = out.logits.float(), out.pred_boxes.float()
    if is_detr(model):
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        yield from zip(boxes, labels, scores, strict=True)
        return
    classes = logits.shape[-1]
    scores, places = logits.sigmoid().flatten(1).topk(min(MOST, logits[0].numel()))
    for image, place, score in zip(boxes, places, scores, strict=True):
        yield image[place // classes], place % classes, score
