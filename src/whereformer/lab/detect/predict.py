"""What a detector finds on images, as `evaluate` takes it."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import send_to_device

from whereformer.errors import InputError
from whereformer.lab.data import Share
from whereformer.lab.detect.augment import Augmentation
from whereformer.lab.detect.batches import to_test_on
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.evaluate import predicted


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

    Of DETR that is, for each object query, the surest class but "nothing"; of Conditional DETR, whose classes do
    not exclude each other, the 100 surest pairs of a query and a class. Scores that are no numbers are left out.

    Args:
        model: equipped or not, on the `device`; its label i is the i-th category of `annotations`.
        annotations: the images; their boxes are not looked at.
        augmentation: says to which size images are brought.
        on_batch: told how many images are done.
        workers: processes that read images.

    Raises:
        InputError: the model is of another kind, or an image can no longer be read.
    """
    processor = processor_of(model)
    dtype = next(parameter.dtype for parameter in model.parameters())
    trained, rows, done = model.training, [], 0
    model.eval()
    try:
        for batch in to_test_on(annotations, augmentation, batch_size, share=share, workers=workers):
            moved: Any = send_to_device(batch, device)
            out = model(moved["pixel_values"].to(dtype), moved["pixel_mask"])
            found = processor.post_process_object_detection(out, -1.0, moved["orig_size"])
            for number, one in zip(batch["image_id"].tolist(), found, strict=True):
                rows += predicted(annotations, number, one["boxes"], one["labels"], one["scores"])
            done += len(found)
            on_batch(done)
    finally:
        model.train(trained)
    return rows


def processors() -> dict[type[Any], type[Any]]:
    """transformers' detectors, and what turns their outputs into boxes in pixels."""
    import transformers

    return {
        transformers.DetrForObjectDetection: transformers.DetrImageProcessor,
        transformers.ConditionalDetrForObjectDetection: transformers.ConditionalDetrImageProcessor,
    }


def processor_of(model: Any) -> Any:
    for kind, processor in processors().items():
        if isinstance(model, kind):
            return processor()
    expected = [kind.__name__ for kind in processors()]
    raise InputError(f"model is a {type(model).__name__}, expected one of {expected}")
