"""Boxes go with their images through DETR's augmentation; batches are what transformers' DETR takes."""

import pickle

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from whereformer import InputError
from whereformer.lab.detect.augment import MEAN, SD, Augmentation, RandomCrop, collate, in_parts, in_pixels

RECIPES = {
    "resize": Augmentation(shorter=(60, 90), longest=140, crops=0, flip=0),
    "flip": Augmentation(shorter=(60, 90), longest=140, crops=0, flip=1),
    "crop": Augmentation(shorter=(60, 90), longest=140, before_crop=(50, 60), crop=(30, 45), crops=1),
    "all": Augmentation.scaled(96),
}


def sample(size=(60, 80), boxes=((10, 20, 40, 50),), image_id=1):
    """A black image with a white rectangle in the first box; box i has label, area and iscrowd i."""
    pixels = torch.zeros(3, *size, dtype=torch.uint8)
    for x1, y1, x2, y2 in boxes[:1]:
        pixels[:, y1:y2, x1:x2] = 255
    count = len(boxes)
    return tv_tensors.Image(pixels), {
        "boxes": tv_tensors.BoundingBoxes(
            torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            format="XYXY",  # pyright: ignore[reportCallIssue]
            canvas_size=size,  # pyright: ignore[reportCallIssue]
        ),
        "labels": torch.arange(count),
        "area": torch.arange(count, dtype=torch.float32),
        "iscrowd": torch.arange(count),
        "image_id": torch.tensor(image_id),
        "orig_size": torch.tensor(size),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_boxes_stay_where_the_objects_are(recipe):
    transform = RECIPES[recipe].training()
    sizes, empty = set(), 0
    for _ in range(40):
        image, target = transform(*sample())
        sizes.add(tuple(image.shape[1:]))
        bright = image[0] > (0.5 - MEAN[0]) / SD[0]
        rows, columns = bright.any(1).nonzero(), bright.any(0).nonzero()
        if not len(target["boxes"]):
            empty += 1
            assert len(rows) <= 2 or len(columns) <= 2
            continue
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(target["boxes"][0].tolist(), found, atol=1)
    assert len(sizes) >= 2
    assert empty < 20
    limit = RECIPES[recipe].longest
    assert all(max(size) <= limit for size in sizes)


def test_a_flip_exchanges_left_and_right():
    image, target = Augmentation(shorter=(60,), crops=0, flip=1).training()(*sample())
    assert target["boxes"].tolist() == [[40, 20, 70, 50]]
    assert image.shape == (3, 60, 80)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((480, 640), (800, 1066)), ((640, 480), (1066, 800)), ((300, 900), (444, 1333)), ((800, 800), (800, 800))],
)
def test_images_to_test_on_have_detrs_sizes(size, expected):
    image, target = Augmentation().testing()(*sample(size))
    assert tuple(image.shape[1:]) == expected
    assert target["boxes"].canvas_size == expected
    assert target["orig_size"].tolist() == list(size)


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (1, 1)])
def test_images_of_any_proportions_keep_a_pixel(size):
    recipe = Augmentation.scaled(32)
    for seed in range(4):
        torch.manual_seed(seed)
        for transform in (recipe.testing(), recipe.training()):
            image, target = transform(*sample(size, boxes=((0, 0, size[1], size[0]),)))
            assert 1 <= min(image.shape[1:]) <= max(image.shape[1:]) <= recipe.longest
            assert target["boxes"].canvas_size == tuple(image.shape[1:])


def test_testing_is_not_random_and_training_follows_from_the_seed():
    augmentation = Augmentation.scaled(64)

    def several(transform):
        torch.manual_seed(3)
        return [transform(*sample())[0] for _ in range(8)]

    for transform in (augmentation.testing(), augmentation.training()):
        first, second = several(transform), several(transform)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({tuple(image.shape) for image in several(augmentation.testing())}) == 1
    assert len({tuple(image.shape) for image in several(augmentation.training())}) > 2


def test_crops_are_of_all_sizes_and_places_that_were_asked_for():
    crop = RandomCrop(20, 30)
    found = [crop(sample()[0]) for _ in range(300)]
    for axis in (1, 2):
        assert {image.shape[axis] for image in found} == set(range(20, 31))
    assert crop(sample((10, 25))[0]).shape[1] == 10
    ramp = tv_tensors.Image(torch.arange(80, dtype=torch.uint8).expand(3, 60, 80))
    assert {int(crop(ramp)[0, 0, 0]) for _ in range(600)} >= set(range(50))


def test_what_is_no_longer_seen_goes_with_all_that_belongs_to_it():
    boxes = ((10, 20, 40, 50), (0, 0, 3, 3), (70, 50, 80, 60), (30, 30, 31, 60))
    labels = set()
    for _ in range(50):
        _, target = RECIPES["crop"].training()(*sample(boxes=boxes))
        assert target["labels"].tolist() == target["area"].tolist() == target["iscrowd"].tolist()
        assert len(target["labels"]) == len(target["boxes"])
        sides = target["boxes"][:, 2:] - target["boxes"][:, :2]
        assert (sides >= 1).all()
        labels.add(tuple(target["labels"].tolist()))
    assert len(labels) > 3


def test_an_image_without_objects_stays_so():
    _, target = RECIPES["all"].training()(*sample(boxes=()))
    assert target["boxes"].shape == (0, 4)


def test_colours_change_only_if_asked():
    plain = Augmentation(shorter=(60,), crops=0, flip=0)
    painted = Augmentation(shorter=(60,), crops=0, flip=0, colour=0.5)
    values = [{float(a.training()(*sample())[0].max()) for _ in range(8)} for a in (plain, painted)]
    assert len(values[0]) == 1 < len(values[1])


def test_pixels_are_standardised_as_for_imagenet():
    image, _ = Augmentation(shorter=(60,), crops=0, flip=0).training()(*sample())
    assert image.dtype == torch.float32
    expected = (1 - torch.tensor(MEAN)) / torch.tensor(SD)
    torch.testing.assert_close(image[:, 25, 20].as_subclass(torch.Tensor), expected)


def test_recipes_go_to_worker_processes():
    for transform in (RECIPES["all"].training(), RECIPES["all"].testing()):
        assert isinstance(pickle.loads(pickle.dumps(transform)), v2.Transform)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"shorter": ()}, "shorter"),
        ({"shorter": (0,)}, "shorter=0"),
        ({"shorter": (1400,)}, "longest=1333, expected at least"),
        ({"crop": (600, 384)}, "crop="),
        ({"crop": (1, 2, 3)}, "crop="),
        ({"flip": 1.5}, "flip=1.5, expected a number from 0 to 1"),
        ({"colour": -1}, "colour=-1"),
        ({"longest": 0}, "longest=0"),
    ],
)
def test_wrong_recipes(wrong, match):
    with pytest.raises(InputError, match=match):
        Augmentation(**wrong)


def test_lists_from_json_are_tuples():
    assert Augmentation(shorter=[480], crop=[1, 2]) == Augmentation(shorter=(480,), crop=(1, 2))  # pyright: ignore[reportArgumentType]


def test_parts_and_pixels_are_inverse():
    boxes = torch.rand(7, 4, dtype=torch.float64)
    torch.testing.assert_close(in_parts(in_pixels(boxes, (30, 50)), (30, 50)), boxes)


def test_batches_are_padded_below_and_to_the_right():
    transform = Augmentation(shorter=(60,), longest=200, crops=0, flip=0).testing()
    samples = [transform(*sample((60, 80), image_id=4)), transform(*sample((90, 60), ((10, 20, 40, 50),) * 2, 7))]
    batch = collate(samples, multiple=32)
    assert batch["pixel_values"].shape == (2, 3, 96, 96)
    assert batch["pixel_mask"].dtype == torch.bool
    assert batch["pixel_mask"].sum((1, 2)).tolist() == [60 * 80, 90 * 60]
    for row, (image, _) in enumerate(samples):
        inside = batch["pixel_values"][row, :, : image.shape[1], : image.shape[2]]
        assert torch.equal(inside, image.as_subclass(torch.Tensor))
        assert batch["pixel_mask"][row, image.shape[1] - 1, image.shape[2] - 1]
        assert not batch["pixel_values"][row][:, ~batch["pixel_mask"][row]].any()
    expected = [25 / 80, 35 / 60, 30 / 80, 30 / 60]  # of the image itself, not of the batch
    torch.testing.assert_close(batch["labels"][0]["boxes"], torch.tensor([expected]))
    assert type(batch["labels"][0]["boxes"]) is torch.Tensor
    assert [len(one["class_labels"]) for one in batch["labels"]] == [1, 2]
    assert batch["image_id"].tolist() == [4, 7]
    assert batch["orig_size"].tolist() == [[60, 80], [90, 60]]
    assert collate(samples)["pixel_values"].shape == (2, 3, 90, 80)


def test_transformers_detr_takes_a_batch():
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        num_labels=3,
        num_queries=5,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    model = DetrForObjectDetection(config).eval()
    transform = RECIPES["all"].testing()
    samples = [transform(*sample((60, 80))), transform(*sample((90, 60), ((10, 20, 40, 50),) * 2))]
    samples.append(transform(*sample(boxes=())))
    batch = collate(samples)
    with torch.no_grad():
        found = model(**{name: batch[name] for name in ("pixel_values", "pixel_mask", "labels")})
    assert torch.isfinite(found.loss)
    assert found.pred_boxes.shape == (3, 5, 4)
