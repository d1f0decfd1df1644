"""Files that are whole at any moment, and folders that hold one experiment."""

import errno
import os

import pytest
import torch

from whereformer import InputError
from whereformer.lab.experiment import Experiment
from whereformer.lab.record import Run, claimed, run_folder, slug, write


@pytest.fixture
def full_disk(monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill():
        monkeypatch.setattr(os, "fsync", fail)

    return fill


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path, full_disk):
    path = tmp_path / "result.json"
    write(path, "old")
    full_disk()
    with pytest.raises(OSError, match="No space left on device") as error:
        write(path, "new")
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_checkpoint_survives_one_that_could_not_be_written(tmp_path, full_disk):
    run = Run(tmp_path)
    state = {"epoch": 1, "model": {"w": torch.ones(2)}, "log": [{"epoch": 1}]}
    run.save(state)
    full_disk()
    with pytest.raises(OSError, match="No space"):
        run.save({**state, "epoch": 2})
    assert (run.load() or {})["epoch"] == 1
    assert run.log() == [{"epoch": 1}]


def test_other_processes_write_nothing(tmp_path):
    run = Run(tmp_path / "run", writes=False)
    run.start(Experiment())
    run.save({"log": []})
    run.finish({}, [], {}, {})
    assert not (tmp_path / "run").exists()


def test_a_folder_holds_one_experiment(tmp_path):
    twice = pytest.raises(InputError, match="at work there")
    with claimed(tmp_path, Experiment()), twice, claimed(tmp_path, Experiment()):
        pass
    with claimed(tmp_path, Experiment(seeds=(0, 1), encodings=("none", "peg"))):
        pass  # other runs of the same recipe
    with claimed(tmp_path, Experiment(epochs=24)):
        pass  # no run has begun
    with claimed(tmp_path, Experiment()):
        Run(run_folder(tmp_path, "none", 0)).start(Experiment())
    with pytest.raises(InputError, match="epochs=25, not 26"), claimed(tmp_path, Experiment(epochs=26)):
        pass


def test_a_damaged_result_is_named(tmp_path):
    (tmp_path / "result.json").write_text("{")
    (tmp_path / "resume.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"resume\.pt' is damaged .*delete it"):
        Run(tmp_path).load()
    with pytest.raises(InputError, match=r"result\.json' is damaged .*delete it"):
        Run(tmp_path).result()


def test_encodings_have_folders_of_their_own():
    texts = ["irpe", "irpe(on='k')", "irpe(on='q')", "irpe on k", "learned + irpe"]
    assert len({slug(text) for text in texts}) == len(texts)
    assert all(set(slug(text)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for text in texts)
