"""A whole comparison: what it computes, what it writes, and that nothing is lost or done twice."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

from whereformer import equip
from whereformer.errors import InputError
from whereformer.lab.compare import compare
from whereformer.lab.data import load
from whereformer.lab.differences import Difference, Spread
from whereformer.lab.experiment import Experiment
from whereformer.lab.measure import measure
from whereformer.lab.plots import bias_maps
from whereformer.lab.pool import run_in_pool
from whereformer.lab.record import Run, run_folder
from whereformer.lab.report import sentences

TINY = Experiment(
    encodings=("none", "learned + irpe(on='qkv')"),
    seeds=(0, 1),
    epochs=2,
    warmup=0,
    batch_size=256,
    test_sizes=(12,),
)
COMMAND = [sys.executable, "-m", "whereformer.cli", "compare", "--json", "--workers", "1", "--seeds", "1"]
COMMAND += ["--epochs", "3", "--batch-size", "128", "--encodings", "none; irpe"]


def start(out: Path, command: list[str] = COMMAND, **options) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*command, "--out", str(out)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def finished(process: subprocess.Popen) -> tuple[dict, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out), err


def numbers(out: Path) -> dict:
    """All that a comparison found out, less what clocks say."""
    found = {}
    for path in sorted(out.glob("runs/**/*.json*")):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        values = [json.loads(line) for line in lines]
        found[str(path.relative_to(out))] = [
            {k: v for k, v in value.items() if k != "seconds"} for value in values
        ]
    return found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison")
    return compare(TINY, out, workers=1)


def test_the_table(comparison):
    none, both = comparison.rows
    assert (none.encoding, both.encoding) == TINY.encodings
    assert none.difference is None
    assert none.parameters_added == 0
    assert none.step_time == none.memory == 1
    assert both.parameters_added == 16 * 48 + 3 * 3 * 49 * 16
    assert both.macs > none.macs
    assert both.memory > 1
    assert len(both.accuracies) == 2
    assert set(both.accuracy_by_size) == {"8", "12"}
    assert both.difference.mean == pytest.approx(both.accuracy.mean - none.accuracy.mean)
    header, *lines = comparison.table()
    assert len(lines) == 2
    assert all(len(line) == len(header) for line in lines)
    assert json.loads((comparison.out / "comparison.json").read_text()) == json.loads(
        json.dumps(comparison.to_dict())
    )


def test_figures_and_report_are_there(comparison):
    names = {str(path.relative_to(comparison.out)) for path in comparison.out.glob("**/*.png")}
    assert {"figures/accuracy_by_epoch.png", "figures/accuracy_by_grid.png"} <= names
    assert sum("position_similarity" in name for name in names) == 1
    assert sum("offset_maps" in name for name in names) == 1
    page = (comparison.out / "report.html").read_text()
    assert page.count("data:image/png;base64") == len(names)
    assert "learned + irpe(on=&#x27;qkv&#x27;)" in page
    assert not list(comparison.out.glob("**/*.draft"))


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "vit_small_patch16_18x2_224"])
def test_each_layer_has_one_map(model):
    options = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "num_heads": 3, "depth": 2, "in_chans": 1}
    equipped = equip(timm.create_model(model, **options), "irpe + irpe(mode='bias') + irpe(on='v') + peg").eval()
    maps = bias_maps(equipped, torch.randn(2, 1, 8, 8))
    assert {title: [tuple(each.shape) for each in row] for title, row in maps.items()} == {
        "bias on the logits": [(7, 7)] * 2,
        "norm of the value row": [(7, 7)] * 2,
    }


def test_what_is_there_is_not_done_again(comparison, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in comparison.out.glob("runs/**/result.json")}
    assert len(before) == 4

    def refuse(*arguments):
        assert not arguments[2], "runs that are there were asked for again"

    monkeypatch.setattr("whereformer.lab.runs.run_in_pool", refuse)
    again = compare(TINY, comparison.out)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again is not None
    assert again.rows == comparison.rows


def test_further_seeds_join_those_that_are_there(comparison, monkeypatch):
    asked = []

    def remember(experiment, out, tasks, *rest):
        asked.extend(tasks)
        run_in_pool(experiment, out, tasks, *rest)

    monkeypatch.setattr("whereformer.lab.runs.run_in_pool", remember)
    compare(replace(TINY, seeds=(0, 1, 2), encodings=TINY.encodings[:1]), comparison.out, workers=1)
    assert asked == [("none", 2)]


def test_killed_at_any_moment_it_gives_the_same_numbers(tmp_path):
    whole, _ = finished(start(tmp_path / "whole"))
    broken = tmp_path / "broken"
    moments = random.Random(0)
    for _ in range(2):
        process = start(broken, start_new_session=True)
        deadline = time.monotonic() + 60
        while not list(broken.glob("runs/*/seed-0/experiment.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 2))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        for path in broken.glob("**/*.json"):
            json.loads(path.read_text())
        for path in broken.glob("**/resume.pt"):
            assert torch.load(path, weights_only=True)["epoch"] >= 1
    again, _ = finished(start(broken))
    assert numbers(broken) == numbers(tmp_path / "whole")
    assert [row["accuracies"] for row in again["rows"]] == [row["accuracies"] for row in whole["rows"]]


def test_a_disk_that_takes_no_more_costs_a_line_and_nothing_else(tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # weights do not fit, settings do

    process = start(tmp_path, preexec_fn=small_files)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert out == ""
    assert err.splitlines()[-1].startswith("whereformer: error: File too large: ")
    assert "Traceback" not in err
    finished(start(tmp_path))
    assert len(list(tmp_path.glob("runs/*/*/result.json"))) == 2


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("runs/none/seed-0/result.json", b"{", "result.json"),
        ("runs/none/seed-0/result.json", b"[]", "result.json"),
        ("runs/none/seed-0/result.json", b"\xff\xfe", "result.json"),
        ("runs/none/seed-0/log.jsonl", b"xx", "log.jsonl"),
        ("runs/none/seed-0/last.safetensors", b"", "last.safetensors"),
        ("experiment.json", b"{", "experiment.json"),
        ("experiment.json", b"{}", "experiment.json"),
        ("costs.json", b"{", "costs.json"),
    ],
)
def test_a_damaged_file_is_named(comparison, tmp_path, name, content, word):
    out = tmp_path / "copy"
    shutil.copytree(comparison.out, out)
    (out / name).write_bytes(content)
    with pytest.raises(InputError, match=word):
        compare(TINY, out, workers=1)


def test_an_experiment_that_cannot_be_built_leaves_the_folder_as_it_was(tmp_path):
    (tmp_path / "experiment.json").write_text(TINY.to_json())
    with pytest.raises(InputError, match="after=9"):
        compare(replace(TINY, encodings=("none", "peg(after=9)")), tmp_path)
    assert Experiment.from_json((tmp_path / "experiment.json").read_text()) == TINY
    with pytest.raises(InputError, match="after=9"):
        compare(replace(TINY, encodings=("none", "peg(after=9)")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_several_processes_train_one_model(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
    command = [*launch, *COMMAND[1:]]
    found, err = finished(start(tmp_path, command))
    assert err.count("whereformer: error") == 0
    assert [row["encoding"] for row in found["rows"]] == ["none", "irpe"]
    assert len(Run(run_folder(tmp_path, "irpe", 0)).log()) == 3


def test_costs_are_those_of_a_training_step():
    experiment = replace(TINY, encodings=("learned", "irpe(on='qkv')"), baseline="learned")
    costs = measure(experiment, load(experiment), torch.device("cpu"), seconds=0)
    assert set(costs) == set(experiment.encodings)
    assert costs["learned"].memory == pytest.approx(1, abs=0.05)
    assert costs["irpe(on='qkv')"].memory > costs["learned"].memory


def test_intervals_are_students():
    difference = Difference.of([3.0, 5.0, 4.0], [1.0, 1.0, 1.0], 0.1)
    assert difference.mean == 3
    assert difference.half == pytest.approx(4.302653 / 3**0.5)  # t of 2 degrees of freedom, sd 1, 3 seeds
    assert difference.sign == 1
    assert Difference.of([1.0, 4.0], [1.0, 2.0], 0.1).sign == 0
    assert Difference.of([1.0], [2.0], 0.1) == Difference(-1.0, None)
    one_image = Difference.of([50.25, 50.5], [50.0, 50.25], finest=0.25)
    assert one_image == Difference(0.25, 0.25)
    assert one_image.sign == 0
    assert str(Difference(-1.0, None)) == "-1.0"
    assert Spread.of([1.0, 3.0]) == Spread(2.0, 2**0.5)
    assert Spread.of([1.0]) == Spread(1.0, None)


def test_sentences_say_what_the_rows_show(comparison):
    none, both = comparison.rows
    for difference, words in (
        (Difference(5.0, 1.0), "came out higher"),
        (Difference(-5.0, 1.0), "came out lower"),
        (Difference(0.5, 1.0), "cannot be told apart"),
    ):
        first, *_ = sentences(TINY, [none, replace(both, difference=difference)], 450)
        assert words in first
        assert all(w not in first for w in {"higher", "lower", "told apart"} - set(words.split(" ", 2)[-1:]) - {
            word for word in ("higher", "lower", "told apart") if word in words})  # fmt: skip
    one, *_ = sentences(replace(TINY, seeds=(0,)), [none, both], 450)
    assert "One seed".lower() in one.lower()
    assert "no intervals" in one
