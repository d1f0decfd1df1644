"""One run in detection: what it learns, and that a break in it, or several processes, do not show."""

import json
import math
import multiprocessing
import os
import socket
import time
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file

from cuts import Killed, cut_before
from whereformer import InputError, load_checkpoint
from whereformer.lab.detect.batches import to_test_on, to_train_on
from whereformer.lab.detect.evaluate import evaluate
from whereformer.lab.detect.experiment import SMALL_MODEL, DetectionExperiment
from whereformer.lab.detect.model import build
from whereformer.lab.detect.predict import predictions
from whereformer.lab.detect.source import drawn, opened
from whereformer.lab.detect.train import CATEGORIES_KEY, EXPERIMENT_KEY, train, train_all
from whereformer.lab.detect.trainee import rate
from whereformer.lab.record import Run
from whereformer.lab.runs import accelerator_for

IRPE = "detr_sine + irpe(ratio=2)"
TINY = DetectionExperiment(
    encodings=("none", IRPE),
    baseline="none",
    seeds=(0,),
    data_args={"train": 8, "val": 4, "size": 32},
    augmentation={"scaled": 32},
    model_args={**SMALL_MODEL, "d_model": 16, "num_queries": 6, "encoder_layers": 1, "decoder_layers": 1}
    | {"dropout": 0.1},
    backbone_args={"stem": 8, "layers": [1, 1], "channels": [8, 16]},
    model="detr",
    queries=None,
    backbone_epochs=1,
    schedule="drop",
    learning_rate=5e-4,
    backbone_learning_rate=5e-4,
    warmup=0,
    epochs=3,
    drop=2,
    batch_size=4,
    evaluate_every=2,
)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detect")
    drawn(TINY, folder)
    return folder


@pytest.fixture(scope="module")
def data(out):
    return opened(TINY, out)


def run(data, folder, experiment=TINY, encoding=IRPE, stop_after=None):
    def on_epoch(epochs):
        if epochs == stop_after:
            raise Killed

    accelerator = Accelerator(cpu=True)
    return train(experiment, encoding, 0, data, Run(folder), accelerator, on_epoch, checkpoint_every=0)


def numbers(folder):
    """All that a run found out, less what clocks say."""
    run = Run(folder)
    lines = [run.result() or {}, *run.log()]
    weights = {name: load_file(folder / f"{name}.safetensors") for name in ("last", "best")}
    values = {(name, key): tensor.tolist() for name, held in weights.items() for key, tensor in held.items()}
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines], values


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run(data, folder)
    return folder


def test_it_learns(data, tmp_path):
    """Eight images by heart: chance is 0, and so is a detector that finds where but not what."""
    experiment = replace(
        TINY,
        augmentation={"scaled": 32, "shorter": [32], "crops": 0, "flip": 0},
        model_args={**TINY.model_args, "dropout": 0.0, "decoder_layers": 2, "d_model": 32},
        epochs=40,
        drop=35,
        learning_rate=2e-3,
        backbone_learning_rate=2e-3,
        evaluate_every=40,
    )
    known = replace(data, validation=data.train)
    result = run(known, tmp_path, experiment)
    log = Run(tmp_path).log()
    assert log[-1]["loss"] < log[0]["loss"] / 2
    assert result["metrics"]["AP50"] > 0.1


def test_the_log_and_the_result(data, unbroken):
    log, result = Run(unbroken).log(), Run(unbroken).result() or {}
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert ["AP" in line for line in log] == [False, True, True]  # every second, and the last
    assert all(math.isfinite(line["loss"]) for line in log)
    assert (result["encoding"], result["seed"]) == (IRPE, 0)
    assert result["best_AP"] == max(line.get("AP", -1) for line in log) == log[result["best_epoch"] - 1]["AP"]
    assert set(result["metrics"]["per_category"]) == set(data.train.names)
    assert TINY.words(result) == f"AP {100 * result['metrics']['AP']:.1f}"


def test_a_finished_run_leaves_weights_that_load(data, unbroken):
    assert sorted(path.name for path in unbroken.iterdir()) == [
        "best.safetensors", "experiment.json", "last.safetensors", "log.jsonl", "result.json",
    ]  # fmt: skip
    with safe_open(unbroken / "last.safetensors", "pt") as file:
        about = file.metadata()
    experiment = DetectionExperiment.from_json(about[EXPERIMENT_KEY])
    assert experiment == TINY.single(IRPE, 0)
    assert json.loads(about[CATEGORIES_KEY]) == [[one.id, one.name] for one in data.train.categories]
    model = build(experiment, IRPE, 1, len(data.train.categories), filled=False)
    load_checkpoint(model, unbroken / "last.safetensors")
    rows = predictions(model, data.validation, TINY.augmented, 3)
    result = Run(unbroken).result() or {}
    assert len(rows) == 6 * len(data.validation)
    ap = evaluate(data.validation, rows, "share").overall.AP
    assert ap == pytest.approx(result["metrics"]["AP"], abs=1e-3)


@pytest.mark.parametrize("kind", ["detr", "conditional_detr"])
def test_predictions_are_what_the_model_says(data, kind):
    """Written again with loops: the surest class of each query, or all pairs of a query and a class."""
    model = build(replace(TINY, model=kind), "detr_sine", 0, 6).eval()
    truth = data.validation.subset([1])
    (batch,) = to_test_on(truth, TINY.augmented, 1)
    with torch.no_grad():
        out = model(batch["pixel_values"], batch["pixel_mask"])
    height, width = batch["orig_size"][0].tolist()
    expected = []
    for logits, (x, y, w, h) in zip(out.logits[0].tolist(), out.pred_boxes[0].tolist(), strict=True):
        box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
        if kind == "detr":
            scores = [math.exp(v) / sum(map(math.exp, logits)) for v in logits][:-1]
            expected.append((max(scores), 1 + scores.index(max(scores)), *box))
        else:
            expected += [(1 / (1 + math.exp(-v)), label, *box) for label, v in enumerate(logits, 1)]
    rows = predictions(model, truth, TINY.augmented, 1)
    found = [(row["score"], row["category_id"], *row["bbox"]) for row in rows]
    assert {row["image_id"] for row in rows} == {truth.pictures[0].id}
    for ours, theirs in zip(sorted(found), sorted(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_between_any_two_changes_of_a_file(data, tmp_path, unbroken):
    """Cut before every third sync, rename or removal of a run, until a run has no more of them."""
    cuts = 1
    while True:
        folder = tmp_path / str(cuts)
        try:
            with cut_before(cuts):
                run(data, folder)
            break
        except Killed:
            run(data, folder)
            assert numbers(folder) == numbers(unbroken)
            assert not list(folder.glob("*.pt")) + list(folder.glob(".*"))
        cuts += 7
    assert cuts > 21


@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_broken_run_with_an_average_gives_the_same_numbers(data, tmp_path, stop_after):
    experiment = replace(TINY, ema=0.9, warmup=3, clip=None, schedule="cosine", drop=None)
    run(data, tmp_path / "unbroken", experiment)
    with pytest.raises(Killed):
        run(data, tmp_path / "broken", experiment, stop_after=stop_after)
    assert Run(tmp_path / "broken").result() is None
    run(data, tmp_path / "broken", experiment)
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "unbroken")


def test_the_average_is_what_is_kept(data, tmp_path, unbroken):
    """With a decay of nearly 0 it is the last weights themselves, and with one of nearly 1 the first ones."""
    for decay in (1e-12, 1 - 1e-12):
        run(data, tmp_path / str(decay), replace(TINY, ema=decay))
    last = load_file(unbroken / "last.safetensors")
    follows, stays = (load_file(tmp_path / str(decay) / "last.safetensors") for decay in (1e-12, 1 - 1e-12))
    name = "model.encoder.layers.0.mlp.fc1.weight"
    torch.testing.assert_close(follows[name], last[name], rtol=0, atol=1e-6)
    first = build(TINY, IRPE, 0, 6).state_dict()[name]
    step = 2 * TINY.learning_rate  # of AdamW's first, at most
    assert (stays[name] - first).abs().max() < step < 1.5 * (last[name] - first).abs().max()


def test_the_numbers_do_not_depend_on_who_reads(data):
    batches = [
        list(to_train_on(data.train, TINY.augmented, 4, seed=3, epoch=5, workers=workers)) for workers in (0, 2)
    ]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
        assert torch.equal(one["labels"][0]["boxes"], other["labels"][0]["boxes"])
    (again, *_) = to_train_on(data.train, TINY.augmented, 4, seed=3, epoch=6)
    assert not torch.equal(again["image_id"], batches[0][0]["image_id"]) or not torch.equal(
        again["pixel_values"], batches[0][0]["pixel_values"]
    )


def test_learning_rates():
    drop = replace(TINY, epochs=4, drop=3, warmup=2)
    assert [rate(drop, update, 2) for update in range(8)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.1, 0.1])
    cosine = replace(TINY, epochs=4, drop=None, schedule="cosine")
    expected = [(1 + math.cos(math.pi * update / 8)) / 2 for update in range(8)]
    assert [rate(cosine, update, 2) for update in range(8)] == pytest.approx(expected)


def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path):
    experiment = replace(TINY, learning_rate=1e30, clip=None)
    with pytest.raises(InputError, match=r"not finite in epoch 1, step 2"):
        run(data, tmp_path, experiment)


def test_what_does_not_fit_is_named(data, out):
    with pytest.raises(InputError, match="at most the 8 images"):
        opened(replace(TINY, batch_size=9), out)


@pytest.mark.usefixtures("fresh_accelerate")
def test_mixed_precision(data, tmp_path):
    experiment = replace(TINY, precision="bf16", epochs=2, drop=None)
    result = train(experiment, IRPE, 0, data, Run(tmp_path), accelerator_for("bf16"))
    assert math.isfinite(Run(tmp_path).log()[-1]["loss"])
    assert result["metrics"]["images"] == len(data.validation)


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["whereformer.lab.detect.train", "whereformer.adapters.transformers.detr", "faster_coco_eval", "timm"]
)


def alone(out, folder, experiment, hold_after=None):
    def on_epoch(epochs):
        if epochs == hold_after:
            time.sleep(600)

    torch.set_num_threads(1)
    accelerator = accelerator_for("no")
    run = Run(folder, writes=accelerator.is_main_process)
    train(experiment, IRPE, 0, opened(experiment, out), run, accelerator, on_epoch, checkpoint_every=0)


def test_killed_by_the_system(out, tmp_path, unbroken):
    """In a process of its own, killed while it is at work, and then let be."""
    process = CONTEXT.Process(target=alone, args=(out, tmp_path, TINY, 2))
    process.start()
    while not (tmp_path / "log.jsonl").exists() and process.is_alive():
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not (tmp_path / "result.json").exists()
    assert (tmp_path / "resume.pt").exists()
    process = CONTEXT.Process(target=alone, args=(out, tmp_path, TINY))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert numbers(tmp_path) == numbers(unbroken)


def one_of_two(rank, port, *rest):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    alone(*rest)
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one(out, tmp_path):
    """Images of one size, as batches are padded, and no dropout: the same updates, but for rounding."""
    experiment = replace(
        TINY,
        augmentation={"scaled": 32, "shorter": [32], "before_crop": [32], "crop": [24, 24], "crops": 1},
        model_args={**TINY.model_args, "dropout": 0.0},
        clip=None,
        learning_rate=1e-3,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rest = (port, out, tmp_path / "two", experiment)
    processes = [CONTEXT.Process(target=one_of_two, args=(rank, *rest)) for rank in range(2)]
    for process in processes:
        process.start()
    data = opened(experiment, out)
    run(data, tmp_path / "one", experiment)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    (one, *logs), _ = numbers(tmp_path / "one")
    (two, *others), _ = numbers(tmp_path / "two")
    for ours, theirs in zip(logs, others, strict=True):
        for name in ("loss", "loss_ce", "loss_bbox", "loss_giou"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4)
    assert two["metrics"]["predictions"] == one["metrics"]["predictions"] == 6 * 4
    assert two["metrics"]["AP"] == pytest.approx(one["metrics"]["AP"], abs=1e-3)
    first, second = (load_file(tmp_path / name / "last.safetensors") for name in ("one", "two"))
    start = build(experiment, IRPE, 0, 6).state_dict()
    learned = [name for name in first if not name.endswith("k_proj.bias")]  # softmax does not see these
    moved, apart = (
        torch.stack([(first[name] - other[name]).double().square().sum() for name in learned]).sum().sqrt()
        for other in (start, second)
    )
    assert apart < 0.01 * moved


def test_all_runs_of_an_experiment(out, tmp_path):
    experiment = replace(TINY, epochs=1, drop=None, encodings=("none", "detr_sine"))
    found = train_all(experiment, tmp_path, workers=1)
    assert found is not None
    data, runs = found
    assert list(runs) == [("none", 0), ("detr_sine", 0)]
    assert all(run.result() is not None for run in runs.values())
    assert data.train.names == ("disc", "ring", "square", "triangle", "star", "cross")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/*")}
    train_all(experiment, tmp_path, workers=1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(InputError, match="epochs=1, not 2"):
        train_all(replace(experiment, epochs=2), tmp_path)
