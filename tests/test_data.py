"""The embedded digits, image folders, and how batches are made."""

import numpy as np
import pytest
import torch
from PIL import Image

from whereformer import InputError
from whereformer.lab.data import Share, load, shuffled
from whereformer.lab.experiment import Experiment, images


def folder(root, counts, size=16):
    generator = np.random.default_rng(0)
    for place, count in counts.items():
        (root / place).mkdir(parents=True)
        for i in range(count):
            pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / place / f"{i}.png")
    return root


def on(path, **changes):
    changes = {"image_size": 16, "patch_size": 4, "batch_size": 4, "loader_workers": 0, **changes}
    return Experiment(**{**images(str(path)).__dict__, **changes})


def collect(batches):
    parts = list(batches)
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def test_digits_are_the_real_ones_standardised_and_held_out_in_equal_parts():
    data = load(Experiment())
    assert (data.classes, data.channels, data.train_count, data.test_count) == (10, 1, 1347, 450)
    pixels, labels = collect(data.test(8, Share()))
    assert pixels.shape == (450, 1, 8, 8)
    assert labels.bincount().tolist() == [45, 46, 44, 46, 45, 46, 45, 45, 43, 45]
    training, _ = data.training  # pyright: ignore[reportAttributeAccessIssue]
    assert abs(training.mean()) < 1e-5
    assert abs(training.std() - 1) < 1e-5
    assert collect(data.test(12, Share()))[0].shape[-2:] == (12, 12)


def test_an_epochs_order_follows_from_seed_and_epoch_alone():
    data = load(Experiment())
    first = collect(data.train(1, 2, Share()))
    assert all(torch.equal(a, b) for a, b in zip(first, collect(data.train(1, 2, Share())), strict=True))
    assert not torch.equal(first[1], collect(data.train(1, 3, Share()))[1])
    assert sorted(shuffled(10, 0, 0)) == list(range(10))


def test_processes_share_every_image_and_no_two():
    data = load(Experiment())
    whole = collect(data.test(8, Share()))[1]
    parts = [collect(data.test(8, Share(rank, 3)))[1] for rank in range(3)]
    assert sum(len(part) for part in parts) == len(whole)
    steps = [len(list(data.train(0, 0, Share(rank, 3)))) for rank in range(3)]
    assert len(set(steps)) == 1


def test_a_folder_with_train_and_validation(tmp_path):
    root = folder(tmp_path, {"train/cat": 5, "train/dog": 5, "validation/cat": 1, "validation/dog": 2})
    data = load(on(root))
    assert (data.classes, data.channels, data.train_count, data.test_count) == (2, 3, 10, 3)
    pixels, labels = collect(data.test(32, Share()))
    assert pixels.shape == (3, 3, 32, 32)
    assert sorted(labels.tolist()) == [0, 1, 1]
    assert collect(data.train(0, 0, Share()))[0].shape == (8, 3, 16, 16)


def test_a_plain_folder_is_split(tmp_path):
    data = load(on(folder(tmp_path, {"cat": 8, "dog": 12})))
    assert (data.train_count, data.test_count) == (15, 5)
    assert sorted(collect(data.test(16, Share()))[1].tolist()) == [0, 0, 1, 1, 1]


def test_classes_have_one_numbering(tmp_path):
    root = folder(tmp_path, {"train/a": 3, "train/b": 3, "train/c": 3, "validation/c": 2})
    assert collect(load(on(root)).test(16, Share()))[1].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("counts", "changes", "match"),
    [
        ({}, {}, "cannot be read"),
        ({"cat": 0}, {}, "cannot be read"),
        ({"cat": 8}, {}, "one class"),
        ({"cat": 1, "dog": 1}, {"batch_size": 1}, "too small"),
        ({"train/cat": 4, "train/dog": 4, "validation/bird": 2}, {}, "bird"),
        ({"cat": 8, "dog": 8}, {"batch_size": 64}, "batch_size=64"),
    ],
)
def test_folders_that_will_not_do(tmp_path, counts, changes, match):
    root = folder(tmp_path / "images", counts)
    root.mkdir(exist_ok=True)
    with pytest.raises(InputError, match=match):
        load(on(root, **changes))


def test_paths_and_names_that_lead_nowhere(tmp_path):
    with pytest.raises(InputError, match="expected digits, a folder"):
        load(on(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="data_root"):
        load(on("torch/cifar10"))
    with pytest.raises(InputError, match="cannot be read"):
        load(on("torch/no_such_set", data_root=str(tmp_path)))
