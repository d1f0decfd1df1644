"""The set of shapes: the same everywhere, with boxes around what is seen."""

import json
from hashlib import sha256

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as masks

from boxed import write
from whereformer import InputError
from whereformer.lab.detect import scene, shapes
from whereformer.lab.detect.load import load
from whereformer.lab.detect.shapes import Shapes, generate

SMALL = Shapes(train=7, val=3, size=64, crowds=0.5)


def scenes(count, size=96, most=8, crowds=0.1, seed=0):
    return [scene.draw((seed, number), size, most, crowds) for number in range(count)]


def digest(drawn):
    state = sha256()
    for one in drawn:
        state.update(str(one.pixels.shape).encode() + one.pixels.tobytes())
        state.update(json.dumps(one.annotations).encode())
    return state.hexdigest()[:16]


def contents(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }


def test_the_same_pixels_everywhere():
    assert digest(scenes(12, crowds=0.5)) == "c47358e79f874a74"


def test_seeds_and_numbers_tell_images_apart():
    assert len({digest([one]) for one in [*scenes(10), *scenes(10, seed=1)]}) == 20


def test_boxes_surround_what_is_painted(monkeypatch):
    """Three objects in red, green and blue: the strongest channel tells whose a pixel is, but for edges."""
    colours = []

    def colour(ground, dice):
        colours.append([250.0 * (channel == len(colours) % 3) for channel in range(3)])
        return colours[-1]

    monkeypatch.setattr(scene, "ground", lambda height, width, dice: np.zeros((height, width, 3)))
    monkeypatch.setattr(scene, "pattern", lambda steps, dice: np.zeros(steps.shape))
    monkeypatch.setattr(scene, "photographed", lambda canvas, dice: canvas)
    monkeypatch.setattr(scene, "contrasting", colour)
    seen = 0
    for number in range(60):
        colours.clear()
        drawn = scene.draw((number,), 96, 3, 0.0)
        for index, one in enumerate(drawn.annotations):
            strongest = drawn.pixels.argmax(-1) == index
            rows, columns = np.nonzero(strongest & (drawn.pixels.max(-1) > 115))
            x, y, w, h = one["bbox"]
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            np.testing.assert_allclose(found, [x, y, x + w, y + h], atol=1)
            assert len(rows) == pytest.approx(one["area"], abs=2 * (w + h))
            seen += 1
    assert seen > 80


def test_crowds_have_the_box_and_the_area_of_their_mask():
    found = 0
    for drawn in scenes(40, crowds=1.0):
        height, width = drawn.pixels.shape[:2]
        for one in drawn.annotations:
            if one["iscrowd"]:
                mask = masks.frPyObjects(one["segmentation"], height, width)
                assert masks.toBbox(mask).tolist() == one["bbox"]
                assert int(masks.area(mask)) == one["area"]
                found += 1
    assert found > 30


def test_objects_are_of_all_kinds_and_sizes_hidden_and_cut():
    drawn = scenes(150)
    things = [(one, image.pixels.shape) for image in drawn for one in image.annotations]
    shares = np.array([one["area"] * 640 * 480 / (shape[0] * shape[1]) for one, shape in things])
    for part in (shares < 32**2, (shares > 32**2) & (shares < 96**2), shares > 96**2):
        assert part.mean() > 0.15
    counts = np.bincount([one["category_id"] for one, _ in things])
    assert counts[1:].min() > len(things) / 12
    cut = [min(one["bbox"][:2]) == 0 or one["bbox"][0] + one["bbox"][2] == shape[1] for one, shape in things]
    assert 0.1 < np.mean(cut) < 0.5
    assert {shape[0] < shape[1] for _, shape in things} == {True, False}
    overlaps = sum(
        _overlap(a["bbox"], b["bbox"])
        for image in drawn
        for i, a in enumerate(image.annotations)
        for b in image.annotations[:i]
    )
    assert overlaps > 100
    for one, shape in things:
        x, y, w, h = one["bbox"]
        assert min(x, y) >= 0 < min(w, h)
        assert x + w <= shape[1]
        assert y + h <= shape[0]
        assert scene.LEAST_SIDE <= one["area"] <= w * h


def _overlap(a, b):
    return all(a[i] < b[i] + b[i + 2] and b[i] < a[i] + a[i + 2] for i in (0, 1))


def test_a_set_is_read_without_a_finding(tmp_path):
    seen = []
    data = load(generate(tmp_path / "set", SMALL, lambda done, count: seen.append((done, count))), broken="refuse")
    assert (len(data.train), len(data.validation)) == (7, 3)
    assert data.train.names == scene.CATEGORIES
    assert seen == [*((done, 10) for done in range(1, 11)), (10, 10)]
    first = scene.draw((0, 0, 0), 64, 8, 0.5)
    image = data.train.tree.image(data.train.pictures[0].file, first.pixels.shape[1::-1])
    assert np.array_equal(np.asarray(image), first.pixels)
    assert data.train.of(0).xywh.tolist() == [one["bbox"] for one in first.annotations]


def test_it_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "PART", 2)
    whole = contents(generate(tmp_path / "whole", SMALL))
    out, drawn = tmp_path / "set", []
    written = shapes._written
    monkeypatch.setattr(shapes, "_written", lambda *asked: drawn.append(asked[2:]) or written(*asked))

    def interrupt(done, count):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(out, SMALL, interrupt)
    assert not (out / "annotations").exists()
    assert contents(generate(out, SMALL)) == whole
    assert drawn[:5] == [("train", number) for number in range(5)]
    assert drawn[5:7] == [("train", 4), ("train", 5)]  # parts that were there are not drawn again
    drawn.clear()
    write(out, {".parts/train-0000004.json": "[]"})  # as if it ended before the last part was cleared away
    assert contents(generate(out, SMALL)) == whole
    assert drawn == []


def test_a_folder_holds_one_set(tmp_path):
    generate(tmp_path / "set", SMALL)
    with pytest.raises(InputError, match="holds other shapes"):
        generate(tmp_path / "set", Shapes(train=8, val=3, size=64))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        generate(tmp_path, SMALL)
    with pytest.raises(InputError, match="is a file: give a folder"):
        generate(tmp_path / "notes.txt", SMALL)


def test_photographs(tmp_path):
    data = load(generate(tmp_path / "set", Shapes(train=2, val=1, size=64, format="jpg")), broken="refuse")
    name = data.train.pictures[0].file
    assert name.endswith(".jpg")
    with Image.open(tmp_path / "set" / name) as image:
        assert image.format == "JPEG"


@pytest.mark.parametrize(
    "wrong",
    [{"train": 0}, {"size": 31}, {"crowds": 1.5}, {"crowds": -1}, {"seed": -1}, {"most": 0}, {"format": "gif"}]
    + [{"sides": sides} for sides in ((0.2,), (0.5, 0.2), (0.0, 0.5), (0.1, 1.5), "ab", 0.2)],
)
def test_wrong_wishes(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Shapes(**wrong)


def test_sides(tmp_path):
    """Objects are as large as asked for: turned and stretched, a shape's box is up to 1.25 √2 times its side."""
    shapes = Shapes(train=12, val=1, size=96, most=1, sides=(0.4, 0.5), crowds=0.0)
    generate(generate(tmp_path / "set", shapes), shapes)  # what is there is seen to be the same
    boxes = load(tmp_path / "set").train
    sides = torch.tensor([min(one.width, one.height) for one in boxes.pictures])
    longest = boxes.boxes.xywh[:, 2:].max(1).values / sides
    assert len(longest) == 12
    assert longest.min() > 0.2
    assert longest.max() < 0.5 * 1.25 * 2**0.5
