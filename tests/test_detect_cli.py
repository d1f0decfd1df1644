"""`whereformer detect`: numbers, files, exit codes, and one line for a mistake."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import boxed
from detectors import data, official, published, sure_of
from official import randomised
from test_cli import call
from whereformer import equip
from whereformer.lab.detect.augment import Augmentation
from whereformer.lab.detect.boxes import Annotations, Category
from whereformer.lab.detect.evaluate import evaluate
from whereformer.lab.detect.load import load
from whereformer.lab.detect.predict import predictions

COCO = {1: "person", 18: "dog"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three annotated images, and an official file with cross tables that says nothing of itself."""
    root = tmp_path_factory.mktemp("detect")
    data(root / "coco", COCO)
    torch.manual_seed(0)
    model = equip(sure_of(published(91), 18), "irpe(method='cross', ratio=20)", keep_own=True)
    randomised(model.model.encoder.layers[0].self_attn.encodings[0])
    torch.save({"model": official(model)}, root / "cross.pth")
    return root


def expected(coco: Path) -> tuple[Annotations, list[dict[str, Any]]]:
    """What the model that the file came from finds, without the command and without our reader of files."""
    truth = load(coco).validation
    torch.manual_seed(0)
    model = equip(sure_of(published(91), 18), "irpe(method='cross', ratio=20)", keep_own=True)
    randomised(model.model.encoder.layers[0].self_attn.encodings[0])
    rows = []
    for row in predictions(model, _numbered(truth), Augmentation(shorter=(64,), longest=107), batch_size=2):
        rows.append({**row, "category_id": row["category_id"] - 1000})
    return truth, [row for row in rows if row["category_id"] in COCO]


def size_of(file: Path) -> tuple[int, int]:
    with Image.open(file) as image:
        return image.size


def _numbered(truth: Annotations) -> Annotations:
    return replace(truth, categories=tuple(Category(1000 + n, str(n)) for n in range(91)))


def test_eval_gives_what_the_model_gave(capsys, folder, tmp_path):
    truth, rows = expected(folder / "coco")
    out = tmp_path / "out"
    asked = [str(folder / "cross.pth"), "--data", str(folder / "coco"), "--size", "64", "--batch-size", "2"]
    asked += ["--enc_rpe2d", "rpe-20-cross-ctx-1-k", "--out", str(out)]
    code, said, err = call(capsys, "detect", "eval", *asked, "--json")
    assert (code, err) == (0, "")
    found = json.loads(said)
    assert json.loads((out / "predictions.json").read_text()) == rows
    assert found["metrics"] == json.loads(json.dumps(evaluate(truth, rows).to_dict()))
    assert found["metrics"] == json.loads((out / "metrics.json").read_text())["metrics"]
    assert found["detector"]["encoding"] == "detr_sine + rpe-20-cross-ctx-1-k (as asked)"
    assert size_of(out / "sheet.png")[0] > 300
    code, said, _ = call(capsys, "detect", "eval", *asked)  # the folder holds such results already
    assert code == 0
    header = next(line for line in said.splitlines() if "AP50" in line)
    assert header.split() == ["AP", "AP50", "AP75", "APS", "APM", "APL", "AR1", "AR10", "AR100"]
    for word in ("3 images", "person", "dog", "instances_val.json: 3 images, 3 boxes", str(out)):
        assert word in said


def test_a_set_alone_is_tested_on_as_a_whole(capsys, folder, tmp_path):
    """COCO's val2017 and nothing else: nobody trains, so that nothing is held out."""
    data(tmp_path, COCO)
    (tmp_path / "annotations" / "instances_train.json").unlink()
    asked = [str(folder / "cross.pth"), "--data", str(tmp_path), "--size", "64", "--json"]
    asked += ["--enc_rpe2d", "rpe-20-cross-ctx-1-k"]
    code, said, _ = call(capsys, "detect", "eval", *asked)
    assert code == 0
    found = json.loads(said)
    assert (found["data"]["set"], found["metrics"]["images"]) == ("all", 3)


def test_images_that_are_not_tested_on_need_not_be_there(capsys, folder, tmp_path):
    """COCO's annotations whole, and the images of val2017 alone."""
    data(tmp_path, COCO)
    train = json.loads((tmp_path / "annotations" / "instances_train.json").read_text())
    for image in train["images"]:
        image["file_name"] = f"elsewhere-{image['file_name']}"
    (tmp_path / "annotations" / "instances_train.json").write_text(json.dumps(train))
    asked = [str(folder / "cross.pth"), "--data", str(tmp_path), "--size", "64", "--json"]
    code, said, _ = call(capsys, "detect", "eval", *asked, "--enc_rpe2d", "rpe-20-cross-ctx-1-k")
    assert code == 0
    found = json.loads(said)
    assert (found["data"]["set"], found["metrics"]["images"]) == ("validation", 3)
    code, _, err = call(capsys, "detect", "eval", *asked, "--set", "train")
    assert code == 2
    assert "elsewhere-" in err


def test_predict_writes_boxes_numbers_and_drawings(capsys, folder, tmp_path):
    """Images that nobody numbered; one of them is none."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    for name, size in (("b.png", (90, 45)), ("more/a.png", (40, 80))):
        boxed.picture(photos / name, *size)
    (photos / "broken.jpg").write_bytes(b"no image")
    asked = [str(folder / "cross.pth"), str(photos), "--size", "64", "--threshold", "0.9"]
    asked += ["--enc_rpe2d", "rpe-20-cross-ctx-1-k", "--out", str(out)]
    code, said, err = call(capsys, "detect", "predict", *asked)
    assert (code, err) == (0, "")
    assert "not looked at: broken.jpg" in said
    rows, numbers = (json.loads((out / name).read_text()) for name in ("predictions.json", "images.json"))
    assert [(one["id"], one["file_name"]) for one in numbers["images"]] == [(1, "b.png"), (2, "more/a.png")]
    assert {one["id"]: one["name"] for one in numbers["categories"]}[18] == "dog"
    assert len(numbers["categories"]) == 80
    assert len(rows) == 8
    assert all(row["category_id"] == 18 and row["score"] >= 0.9 for row in rows)
    assert size_of(out / "drawn" / "000001-b.png") == (1000, 500)
    assert size_of(out / "drawn" / "000002-a.png") == (500, 1000)
    surest = max(row["score"] for row in rows)
    one = [*asked, "--json", "--no-drawings", "--out", str(tmp_path / "other")]
    one[1], one[5] = str(photos / "b.png"), str(surest + 1e-6)
    code, said, _ = call(capsys, "detect", "predict", *one)
    assert code == 0
    assert json.loads(said)["images"] == [{"id": 1, "file": "b.png", "found": {}, "drawing": None}]
    assert not (tmp_path / "other" / "drawn").exists()


def test_files_that_are_named_are_looked_at_whatever_they_are_called(capsys, folder, tmp_path):
    boxed.picture(tmp_path / "a.png", 40, 30)
    (tmp_path / "a.png").rename(tmp_path / "photo")
    (tmp_path / "note.txt").write_text("no image")
    asked = [str(folder / "cross.pth"), "--enc_rpe2d", "rpe-20-cross-ctx-1-k", "--size", "64", "--no-drawings"]
    asked += ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "photo"), str(tmp_path / "note.txt")]
    code, said, err = call(capsys, "detect", "predict", *asked)
    assert (code, err) == (0, "")
    found = json.loads(said)
    assert [one["file"] for one in found["images"]] == ["photo"]
    assert [one["file"] for one in found["unreadable"]] == ["note.txt"]


def test_results_take_the_place_of_earlier_ones_of_their_kind(capsys, folder, tmp_path):
    out = tmp_path / "out"
    asked = [str(folder / "cross.pth"), "--enc_rpe2d", "rpe-20-cross-ctx-1-k", "--size", "64", "--out", str(out)]
    photos = [str(folder / "coco" / "val" / f"{number}.png") for number in (1, 2)]
    for shown, drawn in ((photos, ["000001-1.png", "000002-2.png"]), (photos[1:], ["000001-2.png"])):
        assert call(capsys, "detect", "predict", *asked, *shown)[0] == 0
        assert sorted(path.name for path in (out / "drawn").iterdir()) == drawn
    assert call(capsys, "detect", "eval", *asked, "--data", str(folder / "coco"))[0] == 2
    (out / "images.json").rename(out / "metrics.json")
    assert call(capsys, "detect", "predict", *asked, *photos)[0] == 2


MISTAKES = {
    "no action": [],
    "unknown action": ["trian"],
    "eval of nothing": ["eval", "--data", "{coco}"],
    "eval on nothing": ["eval", "{file}"],
    "no such detector": ["eval", "nowhere.pth", "--data", "{coco}"],
    "no detector in it": ["eval", "{coco}/annotations/instances_val.json", "--data", "{coco}"],
    "no such data": ["eval", "{file}", "--data", "nowhere"],
    "a folder of something else": ["eval", "{coco}/val", "--data", "{coco}"],
    "other tables": ["eval", "{file}", "--data", "{coco}", "--enc_rpe2d", "rpe-2.0-product-ctx-1-k"],
    "unknown encoding": ["eval", "{file}", "--data", "{coco}", "--encoding", "ipre"],
    "two encodings": ["eval", "{file}", "--data", "{coco}", "--encoding", "irpe", "--enc_rpe2d", "rpe-2"],
    "part": ["eval", "{file}", "--data", "{coco}", "--part", "ema"],
    "size": ["eval", "{file}", "--data", "{coco}", "--size", "0"],
    "no images": ["predict", "{file}"],
    "image that is not there": ["predict", "{file}", "nowhere.png"],
    "folder without images": ["predict", "{file}", "{coco}/annotations"],
    "threshold": ["predict", "{file}", "{coco}/val", "--threshold", "2"],
    "folder of something else": ["predict", "{file}", "{coco}/val", "--out", "{coco}"],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_costs_one_line_and_exit_code_2(capsys, folder, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    places = {"file": folder / "cross.pth", "coco": folder / "coco"}
    code, out, err = call(capsys, "detect", *(argument.format(**places) for argument in arguments))
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("whereformer: error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("action", ["eval", "predict"])
def test_help_shows_examples(capsys, action):
    code, out, _ = call(capsys, "detect", action, "--help")
    assert code == 0
    assert f"whereformer detect {action}" in out.partition("examples:")[2]
    assert action in call(capsys, "detect", "--help")[1]


def test_without_the_extra_it_names_it(capsys, monkeypatch):
    for name in ("faster_coco_eval", "yaml", "transformers"):
        monkeypatch.setattr("whereformer.cli.show.find_spec", lambda asked, name=name: asked != name or None)
        code, _, err = call(capsys, "detect", "predict", "x.pth", "y.png")
        assert code == 2
        assert f'{name} missing: pip install "whereformer[detect]"' in err
