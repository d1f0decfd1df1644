"""Files of weights: read without running anything, seen without being read, written whole or not at all."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cuts import Killed, cut_before
from whereformer import InputError
from whereformer.adapters.files import DTYPES, Entry, open_checkpoint
from whereformer.adapters.writing import write_weights

STATE = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "n": torch.tensor(7),
}


def holds(source, state: dict[str, Tensor], **options) -> None:
    checkpoint = open_checkpoint(source, **options)
    assert checkpoint.entries.keys() == state.keys()
    for name, value in state.items():
        entry = checkpoint.entries[name]
        assert (entry.shape, entry.dtype) == (tuple(value.shape), value.dtype)
        assert torch.equal(entry.read(), value)


def saved(folder: Path, kind: str) -> Path | str:
    """The same weights in every form."""
    halves = {"one": {"a.weight": STATE["a.weight"]}, "two": {"b": STATE["b"], "n": STATE["n"]}}
    if kind == "safetensors":
        save_file(STATE, folder / "model.safetensors")
        return folder / "model.safetensors"
    if kind == "torch":
        torch.save(STATE, folder / "model.pth")
        return folder / "model.pth"
    if kind == "torch before 1.6":
        torch.save(STATE, folder / "model.pth", _use_new_zipfile_serialization=False)
        return folder / "model.pth"
    for name, half in halves.items():
        if "safetensors" in kind:
            save_file(half, folder / f"{name}.safetensors", metadata={"half": name, name: "x"})
        else:
            torch.save(half, folder / f"{name}.bin")
    suffix = "safetensors" if "safetensors" in kind else "bin"
    index = folder / f"{'model' if suffix == 'safetensors' else 'pytorch_model'}.{suffix}.index.json"
    shards = {key: f"{name}.{suffix}" for name, half in halves.items() for key in half}
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    if "name" in kind:
        return folder / "model.safetensors"
    return folder if "folder" in kind else index


KINDS = (
    *("safetensors", "torch", "torch before 1.6", "safetensors, sharded", "torch, sharded"),
    *("safetensors, sharded, folder", "torch, sharded, folder", "safetensors, sharded, by the name of the whole"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(tmp_path, kind):
    holds(saved(tmp_path, kind), STATE)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_folder_with_one_file(tmp_path, kind):
    path = Path(saved(tmp_path, kind))
    path.rename(tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin"))
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    holds(tmp_path, STATE)
    assert open_checkpoint(tmp_path).configuration == {"architecture": "test_vit"}


def test_metadata_of_shards_is_put_together(tmp_path):
    metadata = open_checkpoint(saved(tmp_path, "safetensors, sharded")).metadata
    assert metadata == {"half": "two", "one": "x", "two": "x"}


WRAPPED = {
    "model": ({"model": STATE, "epoch": 3}, "model", ""),
    "state_dict": ({"state_dict": STATE, "optimizer": {"state": {}}}, "state_dict", ""),
    "teacher, not student": ({"student": {"x": torch.ones(1)}, "teacher": STATE}, "teacher", ""),
    "model, not its average": ({"model_ema": {"x": torch.ones(1)}, "model": STATE}, "model", ""),
    "average alone": ({"model_ema": STATE}, "model_ema", ""),
    "in one another": ({"state_dict": {"model": STATE}}, "state_dict.model", ""),
    "DataParallel": ({f"module.{k}": v for k, v in STATE.items()}, "", "module."),
    "backbone": (
        {"encoder": {f"module.backbone.{k}": v for k, v in STATE.items()}},
        "encoder",
        "module.backbone.",
    ),
    "some other name": ({"generator": STATE, "step": 7}, "generator", ""),
}


@pytest.mark.parametrize(("content", "part", "prefix"), WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("as_file", [True, False])
def test_wrappers(tmp_path, content, part, prefix, as_file):
    source = content
    if as_file:
        source = tmp_path / "wrapped.pth"
        torch.save(content, source)
    checkpoint = open_checkpoint(source)
    assert (checkpoint.part, checkpoint.prefix) == (part, prefix)
    holds(source, STATE)


def test_a_part_can_be_asked_for(tmp_path):
    other = {"x": torch.ones(1)}
    torch.save({"model": STATE, "model_ema": other}, tmp_path / "two.pth")
    holds(tmp_path / "two.pth", other, part="model_ema")
    assert open_checkpoint(tmp_path / "two.pth").others == ("model_ema",)
    with pytest.raises(InputError, match=r"part='ema', expected one of \['model', 'model_ema'\]"):
        open_checkpoint(tmp_path / "two.pth", part="ema")
    with pytest.raises(InputError, match="several state dicts"):
        open_checkpoint({"one": STATE, "two": STATE})


class Hostile:
    def __reduce__(self):
        return (os.system, ("touch hostile-was-here",))


@pytest.mark.parametrize("name", ["bad.pth", "bad.safetensors", "folder"])
@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_file_is_run(tmp_path, monkeypatch, name, zipped):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        path = path / "pytorch_model.bin"
    torch.save({"model": STATE, "note": Hostile()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"safely|not a safetensors"):
        open_checkpoint(tmp_path / name)
    assert not Path("hostile-was-here").exists()


def test_training_arguments_are_read(tmp_path):
    torch.save({"model": STATE, "args": argparse.Namespace(lr=1)}, tmp_path / "released.pth")
    holds(tmp_path / "released.pth", STATE)


def test_indices_name_files_beside_them(tmp_path):
    for name in ("../model.bin", "/etc/passwd", 3):
        (tmp_path / "a.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(InputError, match="expected a file beside it"):
            open_checkpoint(tmp_path / "a.index.json")
    (tmp_path / "a.index.json").write_text("[]")
    with pytest.raises(InputError, match="not an index"):
        open_checkpoint(tmp_path / "a.index.json")
    save_file(STATE, tmp_path / "one.safetensors")
    (tmp_path / "a.index.json").write_text(json.dumps({"weight_map": {"gone": "one.safetensors"}}))
    with pytest.raises(InputError, match=r"promises 'gone'.*one\.safetensors does not"):
        open_checkpoint(tmp_path / "a.index.json")


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "nowhere.pth")
    with pytest.raises(FileNotFoundError):
        open_checkpoint("no/such.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="0 files of weights"):
        open_checkpoint(tmp_path / "empty")
    for name in ("a", "b"):
        save_file(STATE, tmp_path / "empty" / f"{name}.safetensors")
    with pytest.raises(InputError, match="2 files of weights"):
        open_checkpoint(tmp_path / "empty")


# The hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local cache, and no network."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def cached(hub: Path, kind: str, revision: str = "main") -> None:
    repository, commit = hub / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(commit)
    saved(folder, kind)
    (folder / "config.json").write_text('{"architecture": "test_vit"}')


@pytest.mark.parametrize("kind", ["safetensors", "safetensors, sharded", "torch, sharded"])
def test_an_id_of_the_hub_in_the_cache(hub, kind):
    cached(hub, kind)
    for source in ("owner/name", "hf-hub:owner/name@main"):
        holds(source, STATE)
        assert open_checkpoint(source).configuration == {"architecture": "test_vit"}


def test_an_id_of_the_hub_without_a_network(hub):
    with pytest.raises(
        InputError, match=r"'owner/name' is no file, and as an id of the hub .* nor is there a network"
    ):
        open_checkpoint("owner/name")
    cached(hub, "safetensors")
    with pytest.raises(InputError, match="nor is there a network"):
        open_checkpoint("owner/name@v2")


def test_an_id_of_the_hub_with_a_network(hub, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    asked = []

    def download(repository, name, revision):
        asked.append((repository, name, revision))
        if repository == "owner/none":
            raise RepositoryNotFoundError(
                "404: no such repository\nmore",
                response=SimpleNamespace(headers={}, request=None, status_code=404),
            )
        if name != "pytorch_model.bin" or repository != "owner/name":
            raise EntryNotFoundError("404")
        return str(hub / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    torch.save(STATE, hub / "pytorch_model.bin")
    holds("owner/name@v1", STATE)
    assert asked[0] == ("owner/name", "model.safetensors", "v1")
    with pytest.raises(InputError, match="on the hub holds none of"):
        open_checkpoint("owner/other")
    with pytest.raises(InputError, match="RepositoryNotFoundError: 404: no such repository"):
        open_checkpoint("owner/none")


# Writing


def entries(state: dict[str, Tensor]) -> dict[str, Entry]:
    return {name: Entry.of(value) for name, value in state.items()}


def test_what_is_written_is_read_by_safetensors(tmp_path):
    state = {
        str(dtype): torch.arange(6).remainder(2).reshape(2, 3).to(dtype)
        for dtype in DTYPES
        if dtype not in (torch.uint16, torch.uint32, torch.uint64)
    }
    state |= {
        "none": torch.zeros(0, 4),
        "one": torch.tensor(1.5),
        "slant": torch.randn(4, 3).mT,
        "ü": torch.ones(1),
    }
    path = tmp_path / "folder" / "model.safetensors"
    assert write_weights(path, entries(state), {"a": "b"}) == [path]
    found = load_file(path)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].double() if not value.is_complex() else found[name],
                           value.double() if not value.is_complex() else value), name  # fmt: skip
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "b", "format": "pt"}
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for name, value in state.items():  # as mapped memory wants it
        assert (start + header[name]["data_offsets"][0]) % value.dtype.itemsize == 0, name


def test_dtypes_that_safetensors_does_not_have(tmp_path):
    with pytest.raises(InputError, match=r"x is of dtype torch\.complex128"):
        write_weights(tmp_path / "m.safetensors", entries({"x": torch.zeros(1, dtype=torch.complex128)}), {})
    assert not list(tmp_path.iterdir())


def test_large_ones_are_several_files_and_an_index(tmp_path):
    state = {f"layer.{n}": torch.randn(10) for n in range(7)}
    path = tmp_path / "model.safetensors"
    written = write_weights(path, entries(state), {"a": "b"}, shard=90)
    assert [p.name for p in written] == [
        *(f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)),
        "model.safetensors.index.json",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in written)
    holds(written[-1], state)
    holds(path, state)
    assert open_checkpoint(path).metadata["a"] == "b"
    index = json.loads(written[-1].read_text())
    assert index["metadata"]["total_size"] == 280
    write_weights(path, entries(state), {})  # and one again: the old index is gone
    holds(path, state)
    assert not written[-1].exists()


def test_in_place(tmp_path):
    state = {f"layer.{n}": torch.randn(10) for n in range(7)}
    path = tmp_path / "model.safetensors"
    write_weights(path, entries(state), {})
    for shard in (90, 90, 10**9):
        write_weights(path, open_checkpoint(path).entries, {}, shard=shard)
        holds(path, state)


@pytest.mark.parametrize("shard", [10**9, 90])
def test_killed_between_any_two_changes_of_a_file(tmp_path, shard):
    """The old weights, or the new ones, or (where there are several files) none: never a mixture."""
    old, new = ({f"layer.{n}": torch.full((10,), value) for n in range(7)} for value in (1.0, 2.0))
    cuts, whole = 0, 0
    while True:
        path = tmp_path / str(cuts) / "model.safetensors"
        write_weights(path, entries(old), {}, shard=shard)
        try:
            with cut_before(cuts):
                write_weights(path, entries(new), {}, shard=shard)
            break
        except Killed:
            pass
        try:
            found = open_checkpoint(path).entries
        except (FileNotFoundError, InputError):
            assert shard == 90
        else:
            values = {entry.read()[0].item() for entry in found.values()}
            assert values in ({1.0}, {2.0})
            assert len(found) == 7
            whole += 1
        cuts += 1
    holds(path, new)
    assert cuts >= 2
    assert whole >= 2


def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "model.safetensors"
    write_weights(path, entries(STATE), {})

    def fail() -> Tensor:
        raise RuntimeError("cannot be read")

    for shard in (10**9, 20):
        with pytest.raises(RuntimeError, match="cannot be read"):
            write_weights(path, {**entries(STATE), "z": Entry((4,), torch.float32, fail)}, {}, shard=shard)
        holds(path, STATE)
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(InputError, match="z is"):
        write_weights(path, {"z": Entry((4,), torch.float32, lambda: torch.zeros(3))}, {})
    holds(path, STATE)


def test_killed_by_the_system(tmp_path):
    """At the name itself there is nothing, or everything."""
    path = tmp_path / "model.safetensors"
    code = f"""
import torch, time
from whereformer.adapters.files import Entry
from whereformer.adapters.writing import write_weights
from pathlib import Path
def read(n):
    time.sleep(0.02)
    return torch.full((1000,), float(n))
entries = {{str(n): Entry((1000,), torch.float32, lambda n=n: read(n)) for n in range(30)}}
print("ready", flush=True)
write_weights(Path({str(path)!r}), entries, {{}})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    draft = tmp_path / ".model.safetensors.draft"
    while not (draft.exists() and draft.stat().st_size > 8000):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not path.exists()
    write_weights(path, entries(STATE), {})
    holds(path, STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


# Memory


MEASURE = """
import sys
from pathlib import Path
import safetensors.torch
import torch
from whereformer.adapters.files import open_checkpoint
from whereformer.adapters.fit import in_timms_names
from whereformer.adapters.layouts import recognise
from whereformer.adapters.writing import write_weights

def peak():
    # not getrusage: its peak is at first that of the process before exec
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

torch.zeros(2).sum()
before = peak()
entries = open_checkpoint(sys.argv[1]).entries
named, steps = in_timms_names(entries, recognise(entries))
print(peak() - before)
write_weights(Path(sys.argv[2]), named, {})
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux tells it")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_files_are_processed_shard_by_shard(tmp_path, kind):
    """Four files of 48 MB, of tensors of 4 MB: at most 1.3 times one of them."""
    shard, names = 48 * 2**20, {}
    for n in range(4):
        state = {f"layers.{n}.blocks.{m}.attn.qkv.weight": torch.rand(1024, 1024) for m in range(12)}
        state[f"layers.{n}.downsample.reduction.weight"] = torch.rand(2, 2)
        state[f"layers.{n}.blocks.0.attn.relative_position_bias_table"] = torch.rand(9, 2)
        name = f"{n}.{kind}"
        save_file(state, tmp_path / name) if kind == "safetensors" else torch.save(state, tmp_path / name)
        names |= dict.fromkeys(state, name)
    index = tmp_path / f"model.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": names}))

    command = [sys.executable, "-c", MEASURE, str(index), str(tmp_path / "out.safetensors")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    seen, written = map(int, found.stdout.split())
    assert (tmp_path / "out.safetensors").stat().st_size > 4 * shard
    assert seen <= 0.1 * shard + 4 * 2**20
    assert written <= 1.3 * shard
