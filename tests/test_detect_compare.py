"""`whereformer detect train`: the experiment that options mean, its report, and what its runs are asked later."""

import json
from argparse import ArgumentParser
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from test_cli import call
from whereformer import InputError
from whereformer.cli import main
from whereformer.cli.detect import train
from whereformer.lab.detect.detector import Detector
from whereformer.lab.detect.experiment import SMALL_MODEL, DetectionExperiment, paper
from whereformer.lab.detect.model import build
from whereformer.lab.detect.predict import predictions
from whereformer.lab.detect.report import _compared, _rows, sentences
from whereformer.lab.detect.source import opened

IRPE = "detr_sine + irpe(ratio=2)"
TINY = DetectionExperiment(
    encodings=("none", IRPE),
    baseline="none",
    seeds=(0,),
    data_args={"train": 8, "val": 4, "size": 32},
    augmentation={"scaled": 32},
    model_args={**SMALL_MODEL, "d_model": 16, "num_queries": 6, "encoder_layers": 1, "decoder_layers": 1},
    backbone_args={"stem": 8, "layers": [1, 1], "channels": [8, 16]},
    model="detr",
    queries=None,
    schedule="drop",
    backbone_epochs=0,
    warmup=0,
    epochs=2,
    drop=1,
    batch_size=4,
    evaluate_every=1,
)


# ---------------------------------------------------------------------------------------------------------------
# The command, on runs of two steps.


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "experiment.json").write_text(TINY.to_json())
    return folder


@pytest.fixture(scope="module")
def told(out) -> dict[str, Any]:
    """What the command says."""
    with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as err:
        main(["detect", "train", "--resume", str(out), "--workers", "1", "--json"])
    assert "instances_train.json: 8 images" in err.getvalue()
    assert err.getvalue().count(": AP ") == 2
    return json.loads(said.getvalue())


def results(out: Path) -> dict[str, Any]:
    read = (json.loads(path.read_text()) for path in sorted(out.glob("runs/*/seed-0/result.json")))
    return {result["encoding"]: result for result in read}


def test_train_and_again(told, out, capsys):
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*/result.json")}
    assert len(before) == 2
    for row, encoding in zip(told["rows"], TINY.encodings, strict=True):
        metrics = results(out)[encoding]["metrics"]
        assert row["encoding"] == encoding
        assert row["APs"] == [100 * metrics["AP"]]
        assert row["scores"]["AR100"] == {"mean": 100 * metrics["AR100"], "sd": None}
        assert row["per_category"].keys() == metrics["per_category"].keys() == told["boxes"].keys()
    base, other = told["rows"]
    assert base["difference"] is None
    assert other["difference"] == {"mean": other["APs"][0] - base["APs"][0], "half": None}
    assert told["sentences"][0] == "With one seed there are no intervals: any difference to 'none' may be chance."
    assert told["reports"][0]["images"]["found"] == 8
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == 2 + len(TINY.encodings)
    assert "detr_sine + irpe(ratio=2), seed 0: what is there" in page

    code, said, err = call(capsys, "detect", "train", "--resume", str(out))
    assert code == 0
    assert ": AP " not in err  # no run is told as new
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for word in ("minus base", "AP50", "AR100", "category", "ring", "irpe(ratio=2)", str(out / "report.html")):
        assert word in said


@pytest.mark.parametrize("encoding", TINY.encodings)
def test_eval_of_a_run_gives_its_result(told, out, capsys, tmp_path, encoding):
    """From the weights in its folder and the images that it was tested on."""
    folder = next(
        path.parent
        for path in out.glob("runs/*/seed-0/result.json")
        if (encoding == "none") == (path.parts[-3] == "none")
    )
    asked = [str(folder), "--batch-size", "4", "--out", str(tmp_path)]
    code, said, _ = call(capsys, "detect", "eval", *asked, "--json")
    assert code == 0
    found = json.loads(said)
    assert found["metrics"] == results(out)[encoding]["metrics"]
    assert found["detector"]["encoding"] == encoding
    assert found["areas"] == "share"
    model = build(TINY, encoding, 3, 6)
    model.load_state_dict(load_file(folder / "last.safetensors"))
    rows = predictions(model, opened(TINY, out).validation, TINY.augmented, 4)
    assert json.loads((tmp_path / "predictions.json").read_text()) == rows
    detector = Detector.load(folder / "best.safetensors")
    assert detector.experiment == TINY.single(encoding, 0)
    assert [one.name for one in detector.categories if one] == list(found["metrics"]["per_category"])


def test_predict_with_a_run(told, out, capsys, tmp_path):
    folder = out / "runs" / "none" / "seed-0"
    asked = [str(folder / "last.safetensors"), str(out / "shapes" / "val"), "--threshold", "0"]
    code, _, err = call(capsys, "detect", "predict", *asked, "--out", str(tmp_path / "found"))
    assert (code, err) == (0, "")
    rows = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert len(rows) == 4 * 6  # images x queries
    assert len(list((tmp_path / "found" / "drawn").iterdir())) == 4


def test_what_is_no_run(told, out, tmp_path):
    with pytest.raises(InputError, match="holds 2 runs, expected one of them, such as"):
        Detector.load(out)
    with pytest.raises(InputError, match="says itself what it holds"):
        Detector.load(out / "runs" / "none" / "seed-0", encoding="none")
    (tmp_path / "experiment.json").write_text(TINY.to_json())
    with pytest.raises(InputError, match="the run is not finished"):
        Detector.load(tmp_path)


# ---------------------------------------------------------------------------------------------------------------
# What options mean.


def asked(*arguments: str) -> DetectionExperiment:
    parser = ArgumentParser()
    train.arguments(parser)
    return train._asked(parser.parse_args(arguments))[0]


def test_without_options_it_is_the_small_experiment():
    assert asked() == DetectionExperiment()


@pytest.mark.parametrize("epochs", [150, 300])
def test_data_asks_for_the_recipe_of_the_paper(tmp_path, epochs):
    spec = "rpe-2.0-product-ctx-1-k"
    experiment = asked("--data", str(tmp_path), "--enc_rpe2d", spec, "--epochs", str(epochs))
    encoding = f"detr_sine + {spec}"
    assert experiment == replace(paper(str(tmp_path), epochs), encodings=(encoding,), baseline=encoding)
    assert experiment.drop == {150: 100, 300: 200}[epochs]


def test_options_change_what_they_name_and_nothing_else(tmp_path):
    (tmp_path / "w.pth").write_bytes(b"")
    base = DetectionExperiment()
    changed = {
        "--encodings": ("none; detr_sine + irpe", {"encodings": ("none", "detr_sine + irpe"), "baseline": "none"}),
        "--baseline": ("none", {"baseline": "none"}),
        "--seeds": ("2", {"seeds": (0, 1)}),
        "--broken": ("refuse", {"broken": "refuse"}),
        "--size": ("96", {"augmentation": {"scaled": 96, "crops": 0.0}}),
        "--model": ("detr", {"model": "detr"}),
        "--backbone": ("resnet18", {"backbone": "resnet18", "backbone_args": {}}),
        "--backbone-weights": (str(tmp_path / "w.pth"), {"backbone_weights": str(tmp_path / "w.pth")}),
        "--epochs": ("6", {"epochs": 6}),
        "--batch-size": ("4", {"batch_size": 4}),
        "--lr": ("2e-3", {"learning_rate": 2e-3, "backbone_learning_rate": 2e-3}),
        "--ema": ("0.99", {"ema": 0.99}),
        "--precision": ("bf16", {"precision": "bf16"}),
        "--loader-workers": ("2", {"loader_workers": 2}),
    }
    for option, (value, fields) in changed.items():
        assert asked(option, value) == replace(base, **fields), option
    assert asked("--data", str(tmp_path), "--recipe", "small") == replace(base, data=str(tmp_path))
    assert asked("--data", str(tmp_path), "--backbone-weights", "none").backbone_weights is None
    assert asked("--epochs", "1").drop is None
    assert asked("--data", str(tmp_path), "--loader-workers", "0") == replace(
        paper(str(tmp_path)), loader_workers=0
    )


def test_who_reads_is_no_part_of_the_recipe():
    assert replace(TINY, loader_workers=2).digest() == TINY.digest() != replace(TINY, epochs=3).digest()


MISTAKES = {
    "unknown encoding": ["--encodings", "ipre"],
    "unknown official option": ["--enc_rpe2d", "rpe-2.0-nothing"],
    "no encodings": ["--encodings", ";"],
    "baseline elsewhere": ["--encodings", "none; detr_sine", "--baseline", "learned"],
    "the paper's recipe without data": ["--recipe", "paper"],
    "no such data": ["--data", "nowhere", "--recipe", "small"],
    "data without annotations": ["--data", ".", "--recipe", "small"],
    "unknown backbone": ["--experiment", "tiny.py", "--backbone", "no_such_model"],
    "unknown model": ["--model", "yolo"],
    "learning rate": ["--lr", "-1"],
    "nothing to resume": ["--resume", "nowhere"],
    "no experiment": ["--experiment", "nowhere.py"],
    "another kind of experiment": ["--experiment", "other.py"],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_costs_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(TINY.to_json())
    text = "from pathlib import Path\nfrom whereformer.lab.detect.experiment import DetectionExperiment as E\n"
    Path("tiny.py").write_text(text + "experiment = E.from_file(Path('tiny.json'))\n")
    Path("other.py").write_text("from whereformer.lab.experiment import Experiment\nexperiment = Experiment()\n")
    code, out, err = call(capsys, "detect", "train", *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("whereformer: error: ")
    assert not list(tmp_path.glob("**/result.json"))


# ---------------------------------------------------------------------------------------------------------------
# What numbers show.


def made(*aps: tuple[float | None, ...]) -> Any:
    """Results of each encoding, a tuple of APs over seeds, and the experiment that they would be of."""
    encodings = ("detr_sine", IRPE, "none")[: len(aps)]
    experiment = replace(TINY, encodings=encodings, baseline="detr_sine", seeds=tuple(range(len(aps[0]))))
    names = ("AP", "AP50", "AP75", "APS", "APM", "APL", "AR1", "AR10", "AR100")
    found = {
        (encoding, seed): {
            "metrics": {**dict.fromkeys(names, ap), "per_category": {"cat": {"AP": ap, "boxes": 3}}},
            "seconds": 1.0,
        }
        for encoding, of_seeds in zip(encodings, aps, strict=True)
        for seed, ap in enumerate(of_seeds)
    }
    return experiment, _rows(experiment, found)


def test_differences_are_paired_by_seed():
    experiment, (base, other, lower) = made((0.30, 0.40, 0.50), (0.32, 0.41, 0.53), (0.1, 0.2, 0.3))
    assert base.difference is None
    assert (base.scores["AP"].mean, base.scores["AP"].sd) == pytest.approx((40, 10))
    assert other.difference.mean == pytest.approx(2)  # 2, 1 and 3
    assert other.difference.half == pytest.approx(4.302653 * 1 / 3**0.5, rel=1e-6)
    assert lower.difference.sign == -1
    said = sentences(experiment, [base, other, lower], 250, False)
    assert f"'none' came out lower; {IRPE!r} cannot be told apart" in said[0]
    assert "250 images" in said[1]
    assert "for the choice of seed" in said[1]


def test_one_seed_says_nothing_about_the_difference():
    experiment, rows = made((0.3,), (0.4,))
    said = sentences(experiment, rows, 9, True)
    assert said[0] == "With one seed there are no intervals: any difference to 'detr_sine' may be chance."
    assert "interval" not in "".join(said[1:])
    assert "held out of the only set" in said[1]


def test_where_there_is_nothing_to_find_there_is_no_number():
    _, rows = made((0.3, None), (0.4, 0.5))
    assert rows[0].scores["AP"] is None
    assert rows[1].difference is None
    json.dumps([asdict(row) for row in rows], allow_nan=False)
    assert _compared(rows[1], [0.1, 0.2]).difference.mean == pytest.approx(44.85)
