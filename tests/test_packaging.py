"""The package with its compiled kernel, and without."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import whereformer
from whereformer.backends import library

ROOT = Path(__file__).parent.parent
COMPILES = shutil.which("c++") and (shutil.which("cmake") or find_spec("cmake"))

needs_compiler = pytest.mark.skipif(not COMPILES, reason="no C++ compiler, or no CMake")
needs_kernel = pytest.mark.skipif(library.path() is None, reason="no compiled kernel")


def python(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_library_is_beside_the_package_or_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    assert library.HOME.parent == Path(whereformer.__file__).parent
    monkeypatch.setattr(library, "HOME", tmp_path)
    assert library.path() is None
    (tmp_path / library.NAME).touch()
    assert library.path() == tmp_path / library.NAME
    monkeypatch.setenv(library.ENVIRONMENT, "elsewhere.so")
    assert library.path() == Path("elsewhere.so")


@needs_kernel
def test_one_openmp_serves_torch_and_the_kernel():
    code = f"""
import ctypes, pathlib, torch
ctypes.CDLL({str(library.path())!r})
maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
print(*sorted({{line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}}))
"""
    assert len(python(code).split()) == 1


@needs_kernel
def test_the_library_shows_its_c_interface_alone():
    if (nm := shutil.which("nm")) is None:
        pytest.skip("no nm")
    shown = subprocess.run(
        [nm, "-D", "--defined-only", library.path()], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].lstrip("_") for line in shown.stdout.splitlines()}
    passes = {"whereformer_forward", "whereformer_backward"}
    assert names == passes | {"whereformer_error", "whereformer_isa", "whereformer_layout"}


@pytest.fixture
def project(tmp_path):
    """A copy of what a build reads."""
    pytest.importorskip("scikit_build_core")
    here = tmp_path / "project"
    here.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, here)
    shutil.copytree(ROOT / "csrc", here / "csrc")
    unwanted = shutil.ignore_patterns("__pycache__", "_kernel")
    shutil.copytree(ROOT / "src", here / "src", ignore=unwanted)
    return here


def build(project: Path, hook: str = "build_wheel", **environment: str) -> tuple[Path, str]:
    """The wheel, and what was printed."""
    code = f"import os, building; os.chdir({str(project)!r}); print(building.{hook}({str(project)!r}))"
    said = python(code, PYTHONPATH=str(project / "csrc"), **environment)
    return project / said.splitlines()[-1], said


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def sources(project: Path) -> set[str]:
    return {str(path.relative_to(project / "src")) for path in (project / "src").rglob("*") if path.is_file()}


def test_without_a_compiler_the_package_is_whole_but_for_the_kernel(project):
    stale = project / "src" / "whereformer" / "_kernel" / library.NAME
    stale.parent.mkdir()
    stale.touch()
    wheel, said = build(project, CXX="/nonexistent")
    stale.unlink()
    assert "The CPU kernel was not built" in said
    assert wheel.name == f"whereformer-{whereformer.__version__}-py3-none-any.whl"
    assert files(wheel) == sources(project) | {"whereformer/_kernel/not-built.log"}

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(project / "site")
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if isinstance(finder, type)]  # no editable installation's
from whereformer import doctor
from whereformer.cli import main
doctor.extras = dict  # importing all libraries takes seconds
main(["doctor", "--json"])
"""
    said = json.loads(python(code, PYTHONPATH=str(project / "site"), WHEREFORMER_LIBRARY=""))
    assert said["broken"] == []
    assert "/nonexistent" in said["kernel"]["why"]


def test_an_editable_build_that_fails_leaves_no_older_kernel(project):
    home = project / "src" / "whereformer" / "_kernel"
    home.mkdir()
    (home / library.NAME).touch()
    build(project, "build_editable", CXX="/nonexistent")
    assert [path.name for path in home.iterdir()] == ["not-built.log"]


@needs_compiler
def test_an_error_of_the_compiler_is_kept(project):
    (project / "csrc" / "kernel.cpp").write_text("#error on purpose\n")
    wheel, said = build(project)
    assert "The CPU kernel was not built" in said
    with zipfile.ZipFile(wheel) as archive:
        assert "#error on purpose" in archive.read("whereformer/_kernel/not-built.log").decode()


@needs_compiler
@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_with_a_compiler_the_kernel_is_where_it_is_looked_for(project, hook):
    """With a kernel of two lines, which compiles in a moment."""
    empty = "int forward(const WfAttention &) { return 0; } int backward(const WfAttention &) { return 0; }"
    (project / "csrc" / "kernel.cpp").write_text(f'#include "isa.h"\nnamespace wf::WF_ISA {{ {empty} }}\n')
    before = sources(project)
    wheel, said = build(project, hook)
    assert "The CPU kernel was not built" not in said
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    kernel = f"whereformer/_kernel/{library.NAME}"
    if hook == "build_wheel":
        assert files(wheel) == before | {kernel}
    else:
        assert sources(project) == before | {kernel}
