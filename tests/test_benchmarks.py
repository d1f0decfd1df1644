"""The benchmarks run and say what they should; no time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
QUICK = ["--rounds", "2", "--seconds", "0.01", "--threads", "1"]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, FOLDER / script, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_attention(tmp_path):
    out, page = tmp_path / "results.json", tmp_path / "page.md"
    chosen = ["--grids", "3x2", "--encodings", "none", "QKV", "--backends", "reference", "sdpa", "cpu"]
    shown = run("attention.py", *QUICK, *chosen, "--out", str(out), "--markdown", str(page))
    result = json.loads(out.read_text())
    assert result["machine"]["threads"] == 1
    assert result["options"]["grids"] == ["3x2"]
    cells = {(c["step"], c["encoding"], c["backend"]): c for c in result["cells"]}
    steps = ("forward", "forward+backward")
    pairs = [("plain", "plain"), *((e, b) for e in ("none", "QKV") for b in ("reference", "sdpa", "cpu"))]
    assert set(cells) == {(step, *pair) for step in steps for pair in pairs}
    for step in steps:
        assert cells[step, "plain", "plain"]["time"]["ratio"] == 1
        served = [cells[step, "QKV", "reference"], cells[step, "none", "sdpa"]]
        for cell in served:
            low, high = cell["time"]["quartiles"]
            assert low <= cell["time"]["ratio"] <= high
            assert cell["why"] is None
        assert "BucketValues" in cells[step, "QKV", "sdpa"]["why"]
        assert cells[step, "QKV", "sdpa"]["time"] is None
    assert all((cell["time"] is None) == bool(cell["why"]) for cell in cells.values())
    for text in (shown, page.read_text()):
        assert "BucketValues" in text


def test_model(tmp_path):
    out = tmp_path / "results.json"
    run("model.py", *QUICK, "--models", "test_vit", "--encodings", "K", "--batch", "1", "--out", str(out))
    cells = json.loads(out.read_text())["cells"]
    assert [(c["step"], c["encoding"]) for c in cells] == [
        (step, encoding) for step in ("forward", "training") for encoding in ("plain", "K")
    ]
    assert all(cell["images_per_second"] > 0 and cell["why"] is None for cell in cells)


def test_help_shows_examples():
    assert "python benchmarks/attention.py" in run("attention.py", "--help")


PEAKS = """
import ctypes, json, memory, torch

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def scratch():
    room = libc.malloc(8_000_000)
    libc.memset(room, 1, 8_000_000)
    libc.free(room)

def passing():
    return torch.ones(2_000_000).sum()

calls = [scratch, passing, lambda: None, lambda: torch.ones(2_000_000_000)]
print(json.dumps([memory.peak(lambda: passing, lambda: call, 2**30) for call in calls]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_memory_sees_tensors_and_what_torch_does_not():
    command = [sys.executable, "-c", PEAKS]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=FOLDER).stdout
    *peaks, refused = json.loads(out)
    assert peaks == pytest.approx([8_000_000, 8_000_000, 0], abs=400_000)
    assert refused == "needs more than 1 GiB"
