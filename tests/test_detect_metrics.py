"""COCO's metrics are pycocotools' to the last digit; predictions are drawn."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from boxed import box, coco, image, picture, write
from whereformer import InputError
from whereformer.lab.detect.boxes import Annotations, Category, Picture, boxes_of, starts_of
from whereformer.lab.detect.draw import panels, sheet
from whereformer.lab.detect.draw import write as write_figure
from whereformer.lab.detect.evaluate import COCO_IMAGE, evaluate, predicted
from whereformer.lab.detect.load import load
from whereformer.lab.detect.tree import Tree

NAMES = ("AP", "AP50", "AP75", "APS", "APM", "APL", "AR1", "AR10", "AR100", "ARS", "ARM", "ARL")


def made(rows, images=((640, 480),), categories=3):
    """Annotations of images of these sizes; `rows` has for each the boxes (xywh, label, area or None, crowd)."""
    pictures = tuple(Picture(3 * n + 1, f"{n}.jpg", *size) for n, size in enumerate(images))
    flat = [
        {"id": n, "xywh": xywh, "label": label, "area": area or xywh[2] * xywh[3], "crowd": crowd}
        for n, (xywh, label, area, crowd) in enumerate(one for group in rows for one in group)
    ]
    names = tuple(Category(2 * n + 1, f"c{n}") for n in range(categories))
    starts = starts_of([len(group) for group in rows])
    return Annotations(pictures, names, boxes_of(flat), starts, Tree.__new__(Tree))


def at_random(seed, count=40, categories=3, size=(640, 480)):
    """Truth and guesses: some images without objects, crowds, equal scores, wrong categories, repeated guesses."""
    random = np.random.default_rng(seed)
    rows, guesses = [], []
    for n in range(count):
        group = []
        for _ in range(int(random.integers(0, 7)) * (n % 5 > 0)):
            w, h = np.exp(random.uniform(np.log(6), np.log(300), 2)).tolist()
            x, y = random.uniform(0, size[0] - w), random.uniform(0, size[1] - h)
            label = int(random.integers(0, categories))
            group.append(((x, y, w, h), label, w * h * random.uniform(0.4, 1), bool(random.random() < 0.12)))
            for _ in range(int(random.integers(0, 4))):
                a, b, c, d = random.normal(0, 0.12, 4)
                guess = [x + a * w, y + b * h, w * float(np.exp(c)), h * float(np.exp(d))]
                guesses.append((n, label if random.random() < 0.8 else int(random.integers(0, categories)), guess))
        guesses += [(n, 0, [*random.uniform(0, 300, 4).tolist()]) for _ in range(int(random.integers(0, 3)))]
        rows.append(group)
    predictions = [
        {"image_id": 3 * n + 1, "category_id": 2 * label + 1, "bbox": guess, "score": round(random.random(), 1)}
        for n, label, guess in guesses
    ]
    return made(rows, [size] * count, categories), predictions


def official(truth, predictions, categories=None, scale=1.0):
    """What pycocotools says; its bounds of small and large are multiplied by `scale`."""
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = truth.to_coco()
        for number, one in enumerate(known.dataset["annotations"], 1):
            one["id"] = number
        known.createIndex()
        found = COCOeval(known, known.loadRes([dict(one) for one in predictions]), "bbox")
        found.params.areaRng = [[low * scale, high * scale] for low, high in found.params.areaRng]
        if categories:
            found.params.catIds = categories
        found.evaluate()
        found.accumulate()
        found.summarize()
    return [None if value == -1 else float(value) for value in found.stats]


def numbers(scores):
    return [getattr(scores, name) for name in NAMES]


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_pycocotools_to_the_last_digit(seed):
    truth, predictions = at_random(seed)
    metrics = evaluate(truth, predictions)
    assert numbers(metrics.overall) == official(truth, predictions)
    assert 0.05 < (metrics.overall.AP or 0) < 0.95
    for category in truth.categories:
        scores = metrics.per_category[category.name]
        assert numbers(scores) == official(truth, predictions, [category.id])


def test_equal_where_more_than_a_hundred_predictions_meet_an_image():
    random = np.random.default_rng(0)
    truth = made([[((10.0 * n, 50, 9, 30), 0, None, False) for n in range(30)]])
    predictions = [
        {"image_id": 1, "category_id": 1, "bbox": [*random.uniform(0, 300, 2), 9, 30], "score": random.random()}
        for _ in range(400)
    ]
    predictions += [
        {"image_id": 1, "category_id": 1, "bbox": [10.0 * n, 50, 9, 30], "score": 0.9} for n in range(30)
    ]
    assert numbers(evaluate(truth, predictions).overall) == official(truth, predictions)


def test_sizes_as_shares_of_the_image():
    truth, predictions = at_random(5, size=(320, 300))
    scale = 320 * 300 / COCO_IMAGE
    found, plain = evaluate(truth, predictions, "share").overall, evaluate(truth, predictions).overall
    assert numbers(found) == pytest.approx(official(truth, predictions, scale=scale), abs=1e-12)
    assert found.AP == plain.AP
    assert found.APS != plain.APS


def test_overlap_by_hand():
    """Overlap 0.72: right at five of the ten overlaps asked for."""
    truth = made([[((0, 0, 100, 100), 0, None, False)]])
    overall = evaluate(truth, [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 100, 72], "score": 0.1}]).overall
    assert pytest.approx(0.5) == overall.AP
    assert pytest.approx(1) == overall.AP50
    assert (overall.AP75, overall.APS, overall.APM) == (0, None, None)
    assert pytest.approx(0.5) == overall.AR1


def test_a_wrong_box_that_is_surer_halves_precision():
    truth = made([[((0, 0, 100, 100), 0, None, False)], []], [(640, 480)] * 2)
    right = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 100, 100], "score": 0.5}
    wrong = {"image_id": 4, "category_id": 1, "bbox": [0, 0, 100, 100], "score": 0.6}  # an image without objects
    assert pytest.approx(1) == evaluate(truth, [right, {**wrong, "score": 0.4}]).overall.AP
    assert pytest.approx(0.5) == evaluate(truth, [right, wrong]).overall.AP
    assert pytest.approx(1) == evaluate(truth, [right, {**right, "score": 0.6, "category_id": 3}]).overall.AP


def test_what_meets_a_crowd_counts_neither_for_nor_against():
    truth = made([[((0, 0, 50, 50), 0, None, False), ((100, 100, 300, 300), 0, None, True)]])
    right = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 50, 50], "score": 0.5}
    inside = [{**right, "bbox": [120 + 40 * n, 150, 30, 30], "score": 0.9} for n in range(3)]
    metrics = evaluate(truth, [right, *inside])
    assert pytest.approx(1) == metrics.overall.AP
    assert metrics.boxes == {"c0": 1, "c1": 0, "c2": 0}
    outside = {**right, "bbox": [500, 10, 30, 30], "score": 0.9}
    assert pytest.approx(0.5) == evaluate(truth, [right, outside]).overall.AP


def test_nothing_predicted_and_nothing_to_find():
    truth, _ = at_random(0)
    nothing = evaluate(truth, [])
    assert set(numbers(nothing.overall)) == {0.0}
    assert nothing.row() == ["0.0"] * 6
    bare = evaluate(made([[]]), [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "score": 1}])
    assert set(numbers(bare.overall)) == {None}
    assert bare.row() == ["–"] * 6
    assert json.loads(json.dumps(bare.to_dict(), allow_nan=False))["AP"] is None


def test_an_annotation_numbered_0_is_found_like_others():
    """Its number would say "not matched"."""
    truth = made([[((0, 0, 50, 50), 0, None, False)]])
    assert truth.boxes.ids.tolist() == [0]
    right = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 50, 50], "score": 1}
    assert evaluate(truth, [right]).overall.AR1 == 1


def test_predictions_from_tensors_and_the_table():
    truth, _ = at_random(1)
    predictions = []
    for index, one in enumerate(truth.pictures):
        boxes = truth.of(index)
        predictions += predicted(truth, one.id, boxes.xyxy, boxes.labels, torch.ones(len(boxes)))
    metrics = evaluate(truth, predictions)
    assert metrics.row() == ["100.0"] * 6
    header, lines = metrics.table()
    assert header == ["category", "boxes", "AP", "AP50", "AP75", "APS", "APM", "APL"]
    counts = [int((truth.boxes.labels[~truth.boxes.crowd] == label).sum()) for label in range(3)]
    assert [line[:2] for line in lines] == [
        ["all", str(sum(counts))],
        *([name, str(count)] for name, count in zip(truth.names, counts, strict=True)),
    ]
    said = metrics.to_dict()
    assert said["AP"] == 1
    assert said["per_category"]["c1"]["boxes"] == counts[1]


GOOD = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1], "score": 0.5}


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"image_id": 2}, r"predictions\[1\]: image_id=2"),
        ({"image_id": [1]}, "expected image_id, category_id, bbox and score"),
        ({"category_id": 2}, "category_id=2, expected one of"),
        ({"bbox": [0, 0, 1]}, "four finite numbers"),
        ({"bbox": [0, 0, 1, float("nan")]}, "four finite numbers"),
        ({"score": float("inf")}, "four finite numbers"),
        ({"score": "sure"}, "expected image_id, category_id, bbox and score"),
        ({"bbox": None}, "expected image_id, category_id, bbox and score"),
    ],
)
def test_wrong_predictions_are_named(wrong, match):
    with pytest.raises(InputError, match=match):
        evaluate(made([[]]), [GOOD, {**GOOD, **wrong}])


def test_unknown_areas():
    with pytest.raises(InputError, match="areas='inches'"):
        evaluate(made([[]]), [], "inches")  # pyright: ignore[reportArgumentType]


def test_evaluation_leaves_its_arguments_alone():
    truth, predictions = at_random(2, count=6)
    before = json.dumps([truth.to_coco(), predictions])
    evaluate(truth, predictions, "share")
    assert json.dumps([truth.to_coco(), predictions]) == before


@pytest.fixture
def two_images(tmp_path):
    for number in (1, 2, 3):
        Image.new("RGB", (40, 30), (90, 90, 90)).save(picture(tmp_path / f"i/{number}.png"))
    images = [image(number, f"{number}.png") for number in (1, 2, 3)]
    boxes = [box(1, 1), box(2, 1, (0, 0, 8, 8), iscrowd=1)]
    files = {"train.json": coco(images[:2], boxes), "val.json": coco(images[2:], [])}
    return load(write(tmp_path, files)).train


def test_panels_hold_the_truth_and_what_is_sure_enough(two_images):
    guess = {"image_id": 1, "category_id": 7, "bbox": [10, 5, 20, 10], "score": 0.75}
    first, second = panels(two_images, [{**guess, "score": 0.9}, guess, {**guess, "score": 0.2}], [0, 1])
    assert [(mark.name, mark.score, mark.crowd) for mark in first.marks] == [
        ("cat", None, False),
        ("cat", None, True),
        ("dog", 0.75, False),
        ("dog", 0.9, False),
    ]
    assert (second.title, second.marks) == ("2.png", ())


def test_a_sheet_shows_boxes_where_they_are(two_images, tmp_path):
    guess = {"image_id": 1, "category_id": 7, "bbox": [10, 5, 20, 10], "score": 0.75}
    figure = sheet(panels(two_images, [guess], [0, 1]), columns=1)
    patches = [(one.get_bbox().bounds, one.get_edgecolor()) for one in figure.axes[0].patches]
    assert [bounds for bounds, _ in patches].count(
        (9.5, 4.5, 20, 10)
    ) == 3  # pixels are drawn around their centres
    assert [text.get_text() for text in figure.axes[0].texts] == ["dog 75"]
    assert figure.axes[0].get_xlim() == (-0.5, 39.5)
    path = write_figure(tmp_path / "sheet.png", figure)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    colour = np.array(patches[-1][1][:3]) * 255
    assert (np.abs(pixels - colour).max(1) < 3).sum() > 100
