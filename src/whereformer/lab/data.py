"""Images and labels, in batches whose order follows from (seed, epoch) alone."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset

from whereformer.errors import InputError
from whereformer.lab.experiment import Experiment

PREFIXES = ("torch", "hfds", "hfids", "tfds", "wds")
HELD_OUT = 0.25  # of the digits, and of an image folder that has no folder of test images

Batch = tuple[Tensor, Tensor]  # images [batch, channels, height, width], labels [batch]


class Share(NamedTuple):
    """One process among the `world` that train together: it takes every `world`-th image of each batch."""

    rank: int = 0
    world: int = 1


class Data(Protocol):
    """What training needs to know of a data set."""

    @property
    def classes(self) -> int: ...

    @property
    def channels(self) -> int: ...

    @property
    def train_count(self) -> int: ...

    @property
    def test_count(self) -> int: ...

    def train(self, seed: int, epoch: int, share: Share) -> Iterator[Batch]:
        """One epoch of training images at the size trained on; the last, incomplete batch is dropped."""
        ...

    def test(self, size: int, share: Share) -> Iterator[Batch]:
        """The test images, `size` x `size` pixels."""
        ...


def load(experiment: Experiment) -> Data:
    data = digits(experiment) if experiment.data == "digits" else Files(experiment)
    if data.train_count < experiment.batch_size:
        raise InputError(
            f"batch_size={experiment.batch_size}, expected at most the {data.train_count} training images"
        )
    return data


def seed_of(*numbers: int) -> int:
    """One 32-bit seed from several numbers, such as (seed, epoch)."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def seed_all(*numbers: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    seed = seed_of(*numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def batches(order: Sequence[int], size: int, share: Share, *, drop_last: bool) -> list[list[int]]:
    """The share of one process in each batch of `size` images.

    >>> batches(range(5), 2, Share(), drop_last=False)
    [[0, 1], [2, 3], [4]]
    >>> batches(range(5), 2, Share(rank=1, world=2), drop_last=False)
    [[1], [3]]
    """
    last = len(order) - size + 1 if drop_last else len(order)
    shares = (list(order[start : start + size][share.rank :: share.world]) for start in range(0, last, size))
    return [indices for indices in shares if indices]


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    return torch.randperm(count, generator=generator).tolist()


def held_out(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices for training and for testing, the same at every call, with equal parts of each class."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(range(len(labels)), test_size=HELD_OUT, stratify=labels, random_state=0)
    return sorted(train), sorted(test)


@dataclass(frozen=True)
class InMemory:
    """Images as two tensors, images [count, channels, height, width] and labels [count] for each half."""

    training: Batch
    testing: Batch
    classes: int
    image_size: int
    batch_size: int

    @property
    def channels(self) -> int:
        return self.training[0].shape[1]

    @property
    def train_count(self) -> int:
        return len(self.training[1])

    @property
    def test_count(self) -> int:
        return len(self.testing[1])

    def train(self, seed: int, epoch: int, share: Share) -> Iterator[Batch]:
        order = shuffled(self.train_count, seed, epoch)
        images, labels = self.training
        for indices in batches(order, self.batch_size, share, drop_last=True):
            yield resized(images[indices], self.image_size), labels[indices]

    def test(self, size: int, share: Share) -> Iterator[Batch]:
        images, labels = self.testing
        for indices in batches(range(self.test_count), 8 * self.batch_size, share, drop_last=False):
            yield resized(images[indices], size), labels[indices]


def resized(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, (size, size), mode="bicubic", antialias=True)


def digits(experiment: Experiment) -> InMemory:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, standardised by the training half."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(targets, dtype=torch.int64)
    train, test = held_out(labels.tolist())
    images = (images - images[train].mean()) / images[train].std()
    return InMemory(
        (images[train], labels[train]),
        (images[test], labels[test]),
        classes=10,
        image_size=experiment.image_size,
        batch_size=experiment.batch_size,
    )


class Files:
    """What timm's `create_dataset` reads: an image folder, torch/..., hfds/..., wds/..."""

    channels = 3

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.training: Any = self._open(experiment.train_split, training=True)
        self.testing: Any = self._open(experiment.test_split, training=False)
        if not _is_named(experiment.data):
            self._match_folders()
        elif experiment.train_split == experiment.test_split:
            raise InputError(f"test_split={experiment.test_split!r} is trained on, expected another split")
        self.classes = experiment.classes or _classes(self.training)
        self.train_count, self.test_count = len(self.training), len(self.testing)
        try:
            self._transform(experiment.image_size, training=True)
        except (TypeError, ValueError, AssertionError) as error:
            raise InputError(f"transform={dict(experiment.transform)!r} cannot be built: {error}") from error

    def train(self, seed: int, epoch: int, share: Share) -> Iterator[Batch]:
        return self._batches(self.training, self.experiment.image_size, share, (seed, epoch))

    def test(self, size: int, share: Share) -> Iterator[Batch]:
        return self._batches(self.testing, size, share, None)

    def _batches(self, dataset: Any, size: int, share: Share, order: tuple[int, int] | None) -> Iterator[Batch]:
        _innermost(dataset).transform = self._transform(size, training=order is not None)
        count, workers = self.experiment.batch_size, self.experiment.loader_workers
        if isinstance(dataset, IterableDataset):  # it shuffles, and takes this process's share, by itself
            dataset.set_loader_cfg(num_workers=workers)  # pyright: ignore[reportAttributeAccessIssue]
            dataset.set_epoch(seed_of(*order) if order else 0)  # pyright: ignore[reportAttributeAccessIssue]
            drop_last = order is not None
            yield from DataLoader(dataset, count // share.world, num_workers=workers, drop_last=drop_last)
            return
        indices = shuffled(len(dataset), *order) if order else range(len(dataset))
        sampler = batches(indices, count, share, drop_last=order is not None)
        yield from DataLoader(dataset, batch_sampler=sampler, num_workers=workers)

    def _open(self, split: str, *, training: bool, **arguments: Any) -> Any:
        from timm.data.dataset_factory import create_dataset

        experiment = self.experiment
        named = _is_named(experiment.data)
        if not named and not Path(experiment.data).is_dir():
            kinds = ", ".join(f"{prefix}/..." for prefix in PREFIXES)
            raise InputError(f"data={experiment.data!r}, expected digits, a folder of images, or one of {kinds}")
        if experiment.data.startswith("torch/") and experiment.data_root is None:
            raise InputError(f"data_root=None, expected the folder with the files of {experiment.data!r}")
        try:
            with redirect_stdout(sys.stderr):  # readers print what they miss
                return create_dataset(
                    experiment.data if named else "",
                    root=experiment.data_root if named else experiment.data,
                    split=split,
                    is_training=training,
                    batch_size=experiment.batch_size,
                    **experiment.data_args,
                    **arguments,
                )
        except (RuntimeError, AssertionError, ImportError, LookupError, TypeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"data={experiment.data!r}, split {split!r}, cannot be read: {reason}") from error

    def _match_folders(self) -> None:
        """Gives both folders one numbering of the classes, or splits the one folder there is."""
        train, test = self.training.reader, self.testing.reader
        if len(train.class_to_idx) < 2:
            raise InputError(
                f"data={self.experiment.data!r} holds one class, expected a folder for each of several"
            )
        if train.root == test.root:
            try:
                kept, held = held_out([label for _, label in train.samples])
            except ValueError as error:
                raise InputError(
                    f"data={self.experiment.data!r} is too small to hold out images: {error}"
                ) from None
            self.training, self.testing = Subset(self.training, kept), Subset(self.testing, held)
        elif extra := sorted(test.class_to_idx.keys() - train.class_to_idx.keys()):
            raise InputError(
                f"data={self.experiment.data!r}: classes in {test.root!r} that {train.root!r} lacks: {extra}"
            )
        else:
            self.testing = self._open(self.experiment.test_split, training=False, class_map=train.class_to_idx)

    def _transform(self, size: int, *, training: bool) -> Any:
        from timm.data.transforms_factory import create_transform
        from timm.models import get_pretrained_cfg
        from torchvision.transforms import Compose

        config = get_pretrained_cfg(self.experiment.model)
        statistics = {} if config is None else {"mean": config.mean, "std": config.std}
        own = dict(self.experiment.transform or {"no_aug": True}) if training else {"crop_pct": 1.0}
        return Compose([_rgb, create_transform(size, is_training=training, **{**statistics, **own})])


def _rgb(image: Any) -> Any:
    return image.convert("RGB")


def _is_named(data: str) -> bool:
    return data.partition("/")[0].lower() in PREFIXES and "/" in data and not Path(data).exists()


def _innermost(dataset: Any) -> Any:
    return dataset.dataset if isinstance(dataset, Subset) else dataset


def _classes(dataset: Any) -> int:
    inner = _innermost(dataset)
    names = getattr(inner, "classes", None) or getattr(getattr(inner, "reader", None), "class_to_idx", None)
    if not names:
        raise InputError("classes=None, expected a number: the data does not say how many classes it has")
    return len(names)
