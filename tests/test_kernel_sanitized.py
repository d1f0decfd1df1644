"""The kernel between guarded pages, and with sanitizers, in processes of their own: tests/kernel_cases.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whereformer.backends import kernel, library

ROOT = Path(__file__).parent.parent
SANITIZERS = ("libasan.so", "libstdc++.so")

posix = pytest.mark.skipif(os.name != "posix", reason="guards need mprotect")


def run(first: int, count: int, **environment: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", ROOT / "tests" / "kernel_cases.py", str(first), str(count)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == f"{count} right\n"
    assert "runtime error" not in ran.stderr, ran.stderr


@posix
@pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing() or "-")
def test_nothing_outside_the_callers_tensors_is_touched() -> None:
    run(0, 40)


@posix
def test_no_sanitizer_complains(tmp_path: Path) -> None:
    """Addresses and undefined behaviour, forward and backward, on all instructions that run here."""
    if sys.platform != "linux" or not (shutil.which("g++") and shutil.which("cmake")):
        pytest.skip("needs Linux, GCC and CMake")
    found = [_of_compiler(name) for name in SANITIZERS]
    if not all(map(os.path.isabs, found)):
        pytest.skip("the compiler has no address sanitizer")
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-DWHEREFORMER_SANITIZE=address,undefined"]
    subprocess.run([*configure, "-DCMAKE_CXX_COMPILER=g++"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path, "--parallel", "3"], check=True, capture_output=True)
    run(
        *(100, 12),
        LD_PRELOAD=" ".join(found),
        ASAN_OPTIONS="detect_leaks=0:max_malloc_fill_size=1000000000:malloc_fill_byte=255",  # NaN, all over it
        UBSAN_OPTIONS="halt_on_error=1",
        **{library.ENVIRONMENT: str(tmp_path / library.NAME)},
    )


def _of_compiler(name: str) -> str:
    """Where a library is; its name alone if nowhere."""
    asked = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return asked.stdout.strip()
