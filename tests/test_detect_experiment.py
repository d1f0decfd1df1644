"""Experiments in detection: what they accept, and the paper's recipe."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

import boxed
from whereformer import Grid, InputError
from whereformer.lab.detect.augment import Augmentation
from whereformer.lab.detect.experiment import DetectionExperiment, paper
from whereformer.lab.detect.source import opened
from whereformer.lab.experiment import Experiment

EXAMPLE = Path(__file__).parent.parent / "examples" / "detr_irpe_coco.py"
DEFAULT = DetectionExperiment()


def test_json_gives_the_same_experiment():
    experiment = replace(DEFAULT, queries=(3, 4), decoder_encoding="irpe", ema=0.99, clip=None)
    assert DetectionExperiment.from_json(experiment.to_json()) == experiment
    assert DetectionExperiment.from_json(experiment.to_json()).digest() == experiment.digest() != DEFAULT.digest()
    assert experiment.single("none", 2).digest() == experiment.digest()
    with pytest.raises(InputError, match=r"is not known|missing"):
        DetectionExperiment.from_json(Experiment().to_json())


@pytest.mark.parametrize("epochs", [150, 300])
def test_the_recipe_of_the_paper(monkeypatch, epochs):
    monkeypatch.setenv("EPOCHS", str(epochs))
    monkeypatch.setenv("COCO", "somewhere")
    experiment = DetectionExperiment.from_python(EXAMPLE)
    assert experiment == paper("somewhere", epochs)
    said = {
        "data": "somewhere",
        "areas": "pixels",
        "model": "detr",
        "model_args": {},
        "backbone_weights": "pretrained",
        "frozen_norm": True,
        "queries": None,
        "epochs": epochs,
        "schedule": "drop",
        "drop": {150: 100, 300: 200}[epochs],
        "batch_size": 16,
        "learning_rate": 1e-4,
        "backbone_learning_rate": 1e-5,
        "weight_decay": 1e-4,
        "warmup": 0,
        "clip": 0.1,
        "ema": None,
    }
    assert {name: asdict(experiment)[name] for name in said} == said
    assert experiment.backbone.startswith("resnet50")
    assert experiment.augmented == Augmentation()
    assert (experiment.augmented.shorter[0], max(experiment.augmented.shorter)) == (480, 800)
    assert experiment.home(32) == Grid(25, 42)
    assert "detr_sine + irpe(ratio=2)" in experiment.encodings


def test_augmentation_is_scaled_then_changed():
    experiment = replace(DEFAULT, augmentation={"scaled": 96, "flip": 0.0, "shorter": [80, 96]})
    assert experiment.augmented == replace(Augmentation.scaled(96), flip=0.0, shorter=(80, 96))
    assert experiment.home(16) == Grid(6, 10)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"encodings": ("no_such",)}, "no_such"),
        ({"baseline": "irpe"}, "baseline='irpe'"),
        ({"data": ""}, "data=''"),
        ({"data": "folder", "data_args": {"train": 9}}, "only data='shapes'"),
        ({"data_args": {"size": 2}}, "size=2"),
        ({"data_args": {"trains": 2}}, "trains unknown"),
        ({"broken": "keep"}, "broken='keep'"),
        ({"augmentation": {"scaled": 0}}, "size=0"),
        ({"augmentation": {"turn": 0.5}}, "turn unknown"),
        ({"augmentation": {"flip": 2}}, "flip=2"),
        ({"areas": "all"}, "areas='all'"),
        ({"model": "yolo"}, "model='yolo'"),
        ({"model_args": {"d_model": {1}}}, "model_args="),
        ({"frozen_norm": 1}, "frozen_norm=1"),
        ({"weights": 3}, "weights=3"),
        ({"queries": (3,)}, r"queries=\(3,\)"),
        ({"queries": (0, 3)}, r"queries=\(0, 3\)"),
        ({"queries": None, "decoder_encoding": "irpe"}, "decoder_encoding='irpe'"),
        ({"decoder_on": "none"}, "decoder_on='none'"),
        ({"epochs": 0}, "epochs=0"),
        ({"schedule": "drop", "drop": 12}, "drop=12"),
        ({"schedule": "step"}, "schedule='step'"),
        ({"schedule": "cosine", "drop": 5}, "drop=5"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"backbone_learning_rate": -1.0}, "backbone_learning_rate=-1"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"warmup": 0.5}, "warmup=0.5"),
        ({"clip": 0}, "clip=0"),
        ({"ema": 1.0}, "ema=1.0"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"evaluate_every": 0}, "evaluate_every=0"),
    ],
)
def test_what_is_wrong_is_named(changes, match):
    with pytest.raises(InputError, match=match):
        replace(DEFAULT, **changes)


def test_data_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="data='nowhere'"):
        opened(replace(DEFAULT, data="nowhere"), tmp_path)


@pytest.mark.parametrize("wrong", [{"iscrowd": 1}, {"category_id": 99}])
def test_data_without_boxes_to_train_on_is_refused(tmp_path, wrong):
    boxed.picture(tmp_path / "val" / "1.png", 40, 30)
    for name, row in {"train": {**boxed.box(1, 1), **wrong}, "val": boxed.box(1, 1)}.items():
        text = boxed.coco([boxed.image(1, "1.png")], [row])
        boxed.write(tmp_path, {f"annotations/instances_{name}.json": text})
    with pytest.raises(InputError, match="none of the 1 images to train on holds a box"):
        opened(replace(DEFAULT, data=str(tmp_path), batch_size=1), tmp_path)
