"""One run: what it learns, and that a break in it does not show."""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file

from whereformer import InputError, load_checkpoint
from whereformer.lab.data import load
from whereformer.lab.experiment import Experiment
from whereformer.lab.record import Run
from whereformer.lab.train import train
from whereformer.lab.trainee import build, optimizer_of

SHORT = Experiment(epochs=4, warmup=1, batch_size=256, encodings=("none", "learned + irpe(on='qkv')"))
SPEC = SHORT.encodings[1]


class Killed(Exception):
    pass


def run(folder, experiment=SHORT, encoding=SPEC, stop_after=None):
    def on_epoch(epochs):
        if epochs == stop_after:
            raise Killed

    return train(
        experiment, encoding, 0, load(experiment), Run(folder), Accelerator(cpu=True), on_epoch, checkpoint_every=0
    )


def without_times(values):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in values]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, run(folder)


def test_it_learns(unbroken):
    folder, result = unbroken
    log = Run(folder).log()
    assert [line["epoch"] for line in log] == [1, 2, 3, 4]
    assert log[-1]["loss"] < log[0]["loss"]
    assert result["accuracy"] == log[-1]["accuracy"] > 20  # chance is 10
    assert result["accuracy_by_size"]["8"] == result["accuracy"]
    assert set(result["accuracy_by_size"]) == {"6", "8", "10", "12"}


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_broken_run_gives_the_same_numbers(tmp_path, unbroken, stop_after):
    folder, expected = unbroken
    with pytest.raises(Killed):
        run(tmp_path, stop_after=stop_after)
    assert Run(tmp_path).result() is None
    result = run(tmp_path)
    assert without_times([result]) == without_times([expected])
    assert without_times(Run(tmp_path).log()) == without_times(Run(folder).log())
    for name in ("last", "best"):
        ours, theirs = (load_file(place / f"{name}.safetensors") for place in (tmp_path, folder))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_finished_run_leaves_weights_that_load(unbroken):
    folder, result = unbroken
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.safetensors", "experiment.json", "last.safetensors", "log.jsonl", "result.json",
    ]  # fmt: skip
    assert Experiment.from_json((folder / "experiment.json").read_text()) == SHORT.single(SPEC, 0)
    data = load(SHORT)
    model = load_checkpoint(build(SHORT, SPEC, 1, data), folder / "last.safetensors").eval()
    pixels, labels = data.testing  # pyright: ignore[reportAttributeAccessIssue]
    right = (model(pixels).argmax(-1) == labels).float().mean()
    assert 100 * float(right) == pytest.approx(result["accuracy"], abs=1e-4)
    with safe_open(folder / "last.safetensors", "pt") as file:
        assert "IRPE(" in file.metadata()["whereformer.encoding"]


def test_encodings_start_from_the_same_shared_weights():
    data = load(SHORT)
    models = [build(SHORT, encoding, 3, data).state_dict() for encoding in ("none", "peg", SPEC)]
    shared = set.intersection(*(set(model) for model in models))
    assert "blocks.2.mlp.fc2.weight" in shared
    assert all(torch.equal(models[0][name], model[name]) for model in models for name in shared)


def test_tables_do_not_decay():
    model = build(SHORT, SPEC, 0, load(SHORT))
    groups = optimizer_of(SHORT, model).param_groups
    still = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert {id(p) for name, p in model.named_parameters() if "encodings" in name} <= still


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "resnet18", "model_args": {}}, "resnet18"),
        ({"model": "no_such_model"}, "no_such_model"),
        ({"model_args": {"no_such_argument": 1}}, "no_such_argument"),
        ({"optimizer": "no_such_optimizer"}, "no_such_optimizer"),
        ({"encodings": ("none", "peg(after=2)")}, "after=2"),
    ],
)
def test_what_cannot_be_built_is_named(tmp_path, changes, match):
    experiment = replace(SHORT, **changes)
    with pytest.raises(InputError, match=match):
        run(tmp_path, experiment, experiment.encodings[-1])


@pytest.mark.usefixtures("fresh_accelerate")
def test_mixed_precision(tmp_path):
    experiment = replace(SHORT, precision="bf16", epochs=1, warmup=0)
    result = train(
        experiment, SPEC, 0, load(experiment), Run(tmp_path), Accelerator(cpu=True, mixed_precision="bf16")
    )
    assert 0 <= result["accuracy"] <= 100
