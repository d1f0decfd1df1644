"""Batches of annotated images, whose order and augmentation follow from (seed, epoch) alone."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from whereformer.lab.data import Share, batches, seed_of, shuffled
from whereformer.lab.detect.augment import Augmentation, collate
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.dataset import BoxedImages, Sample

Batch = dict[str, Any]  # as `collate` makes it


def to_train_on(
    annotations: Annotations,
    augmentation: Augmentation,
    size: int,
    *,
    seed: int,
    epoch: int,
    share: Share = Share(),  # noqa: B008
    workers: int = 0,
) -> Iterator[Batch]:
    """One epoch; the last, incomplete batch is dropped.

    What becomes of an image follows from the seed, the epoch and its number: neither the processes that train nor
    the `workers` that read change it.
    """
    images = Drawn(BoxedImages(annotations, augmentation.training()), seed, epoch)
    order = batches(shuffled(len(images), seed, epoch), size, share, drop_last=True)
    yield from DataLoader(images, batch_sampler=order, num_workers=workers, collate_fn=collate)


def to_test_on(
    annotations: Annotations,
    augmentation: Augmentation,
    size: int,
    *,
    share: Share = Share(),  # noqa: B008
    workers: int = 0,
) -> Iterator[Batch]:
    """All images, each once, in order."""
    images = BoxedImages(annotations, augmentation.testing())
    order = batches(range(len(images)), size, share, drop_last=False)
    yield from DataLoader(images, batch_sampler=order, num_workers=workers, collate_fn=collate)


class Drawn(Dataset[Sample]):
    """Images whose augmentation is drawn from (seed, epoch, number of the image); other draws are left alone."""

    def __init__(self, images: BoxedImages, seed: int, epoch: int) -> None:
        self.images, self.seed, self.epoch = images, seed, epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(self.seed, self.epoch, index))  # not of all devices: slow
            return self.images[index]
