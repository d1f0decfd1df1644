"""The small run: what its detector starts from, what its backbone learns first, and that it goes."""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from whereformer.lab.detect.augment import Augmentation
from whereformer.lab.detect.batches import to_test_on
from whereformer.lab.detect.experiment import ENCODINGS, SINE, DetectionExperiment
from whereformer.lab.detect.model import build
from whereformer.lab.detect.objects import SIDE, cut_out, learn_objects
from whereformer.lab.detect.source import drawn, opened
from whereformer.lab.detect.train import train
from whereformer.lab.record import Run

SMALL = DetectionExperiment()
SHORT = replace(SMALL, data_args={"train": 64, "val": 8}, epochs=2, warmup=2, evaluate_every=2, backbone_epochs=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    drawn(SHORT, folder)
    return opened(SHORT, folder)


@pytest.mark.parametrize("encoding", [ENCODINGS[0], ENCODINGS[-1]])
def test_it_goes(data, encoding, tmp_path):
    result = train(SHORT, encoding, 0, data, Run(tmp_path), Accelerator(cpu=True))
    assert result["metrics"]["images"] == 8
    losses = [line["loss"] for line in Run(tmp_path).log()]
    assert losses[1] < losses[0]


def seen(model, data):
    """Where in the image each object query looks, by the sines alone, in each head of each layer; and how its
    reference points lie: both [queries, 2], x and y in parts of the image."""
    batch = next(to_test_on(data.validation.subset([0]), Augmentation(shorter=(64,), longest=64), 1))
    kept = {}
    for number, layer in enumerate(model.model.decoder.layers):
        attention = layer.encoder_attn
        for name in ("q_pos_sine_proj", "k_pos_proj"):
            getattr(attention, name).register_forward_hook(
                lambda module, args, out, key=(number, name): kept.update({key: out})
            )
    mask = batch["pixel_mask"].clone().fill_(True)
    pixels = torch.zeros(1, 3, *mask.shape[1:])
    with torch.no_grad():
        points = model.eval().model(pixels, mask).reference_points.flatten(0, 1)
    rows, columns = (-(-side // 8) for side in mask.shape[1:])
    places = torch.cartesian_prod((torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns).flip(
        1
    )
    heads, looked = model.config.decoder_attention_heads, []
    for number in range(len(model.model.decoder.layers)):
        q, k = (kept[number, name][0].unflatten(-1, (heads, -1)) for name in ("q_pos_sine_proj", "k_pos_proj"))
        logits = torch.einsum("qhd,khd->hqk", q, k) * model.model.decoder.layers[number].encoder_attn.scaling
        looked += list(logits.softmax(-1) @ places)
    return torch.stack(looked), points


def test_queries_begin_by_looking_at_their_own_cells(data):
    looked, points = seen(build(SMALL, SINE, 0, 6), data)
    middles = (torch.arange(5) + 0.5) / 5
    torch.testing.assert_close(points, torch.cartesian_prod(middles, middles).flip(1), atol=1e-4, rtol=0)
    away = (looked - points).norm(dim=-1).mean(1)  # of each head in each layer
    assert away[0] < 0.5 / 8, "the head of the highest frequencies looks within half a patch of the middle"
    assert away.max() < 0.25, (
        "and the others, whose waves are longer, not as far from it as the middle of the image"
    )
    assert points.sub(0.5).norm(dim=-1).mean() > 0.3
    assert (seen(build(replace(SMALL, queries=None), SINE, 0, 6), data)[0].std(1) < 0.1).all()


def test_without_positions_all_look_everywhere(data):
    looked, _ = seen(build(SMALL, "none", 0, 6), data)
    torch.testing.assert_close(looked, torch.full_like(looked, 0.5))


def test_objects_are_cut_out_whole(data):
    pixels, labels = cut_out(data.train)
    counts = [len(data.train.of(index).labels[~data.train.of(index).crowd]) for index in range(len(data.train))]
    assert pixels.shape == (sum(counts), 3, SIDE, SIDE)
    assert pixels.dtype == torch.uint8
    expected = data.train.boxes.labels[~data.train.boxes.crowd]
    assert labels.bincount(minlength=6).tolist() == expected.bincount(minlength=6).tolist()


def test_a_backbone_learns_to_tell_objects_apart(data):
    """Of few objects it learns each; and how it goes follows from the seed alone."""
    few = data.train.subset(range(12))

    def learned(seed, epochs):
        backbone = build(SMALL, "none", 0, 6).model.backbone.model
        torch.rand(seed + 1)  # other draws before do not matter
        return learn_objects(backbone, few, epochs, seed), backbone.state_dict()

    first, again, other = learned(1, 2)[1], learned(1, 2)[1], learned(2, 2)[1]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert learned(0, 40)[0] > 0.6 > learned(0, 1)[0]


def test_a_detector_that_starts_from_weights_is_not_taught_objects(data, tmp_path, monkeypatch):
    monkeypatch.setattr("whereformer.lab.detect.trainee.learn_objects", lambda *args: pytest.fail("it is"))
    torch.save(build(SHORT, SINE, 0, 6).state_dict(), tmp_path / "weights.pth")
    started = replace(SHORT, weights=str(tmp_path / "weights.pth"), epochs=1, warmup=0)
    train(started, SINE, 0, data, Run(tmp_path / "run"), Accelerator(cpu=True))
    with pytest.raises(pytest.fail.Exception):
        train(SHORT, SINE, 0, data, Run(tmp_path / "other"), Accelerator(cpu=True))


def test_images_are_decoded_once_where_there_is_room(data, monkeypatch):
    from PIL import Image

    tree = data.train.subset(range(2)).tree
    picture, other = data.train.pictures[:2]
    sizes = [(one.width, one.height) for one in (picture, other)]
    first = tree.image(picture.file, sizes[0])
    first.putpixel((0, 0), (1, 2, 3))  # what was given away is not what is kept
    opened = []
    monkeypatch.setattr(Image, "open", lambda *args: opened.append(args) or pytest.fail("it was decoded again"))
    assert tree.image(picture.file, sizes[0]).getpixel((0, 0)) != (1, 2, 3)
    monkeypatch.setattr(tree, "_pictures", {})
    with pytest.raises(pytest.fail.Exception):
        tree.image(picture.file, sizes[0])
