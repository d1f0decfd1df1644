"""A run that is killed, at whatever moment, gives the numbers of one that is not."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from cuts import Killed, cut_before
from whereformer.lab.data import load
from whereformer.lab.experiment import Experiment
from whereformer.lab.record import Run
from whereformer.lab.train import train

TINY = Experiment(
    encodings=("learned",),
    baseline="learned",
    model_args={"embed_dim": 16, "depth": 1, "num_heads": 1, "weight_init": "jax", "proj_drop_rate": 0.1},
    epochs=2,
    warmup=1,
    batch_size=256,
)


def run(folder):
    torch.set_num_threads(1)
    return train(TINY, "learned", 0, load(TINY), Run(folder), Accelerator(cpu=True), checkpoint_every=0)


def numbers(folder):
    run = Run(folder)
    lines = [run.result() or {}, *run.log()]
    weights = {
        (name, key): tensor.tolist()
        for name in ("last", "best")
        for key, tensor in load_file(folder / f"{name}.safetensors").items()
    }
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines], weights


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder)
    return folder


def test_between_any_two_changes_of_a_file(tmp_path, unbroken):
    """Cut before the first, second, ... sync, rename or removal of a run, until a run has no more of them."""
    cuts = 0
    while True:
        folder = tmp_path / str(cuts)
        try:
            with cut_before(cuts):
                run(folder)
            break
        except Killed:
            run(folder)
            assert numbers(folder) == numbers(unbroken)
            assert not list(folder.glob("*.pt")) + list(folder.glob(".*"))
        cuts += 1
    assert cuts > 25  # 9 files: written, renamed, their folder synced


def test_by_the_system(tmp_path, unbroken):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["whereformer.lab.train", "whereformer.adapters.timm", "sklearn.datasets"])
    moments = random.Random(0)
    for _ in range(8):
        process = context.Process(target=run, args=(tmp_path,))
        process.start()
        time.sleep(moments.uniform(0.2, 1))
        process.kill()
        process.join()
    process = context.Process(target=run, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert numbers(tmp_path) == numbers(unbroken)


def test_ctrl_c_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "whereformer.cli", "compare", "--encodings", "none", "--out", str(tmp_path)]
    command += ["--seeds", "100"]  # more than there is time for
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    while not list(tmp_path.glob("runs/none/seed-0/experiment.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers hear it too
    try:
        out, error = process.communicate(timeout=15)
    except subprocess.TimeoutExpired:  # Python drops what is raised in a destructor; one presses again
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error.endswith(f"\nwhereformer: interrupted; to go on: whereformer compare --resume {tmp_path}\n")
    assert "Traceback" not in error
