"""`whereformer doctor`: what it finds, what it calls broken, and its exit code."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from whereformer import backends, doctor
from whereformer.backends import library
from whereformer.cli import main
from whereformer.doctor import SAMPLES, digest, examine, extras


def call(capsys, *arguments: str) -> tuple[int, str]:
    code = 0
    try:
        main(["doctor", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def _no_libraries(monkeypatch):
    """Importing all of them takes seconds."""
    monkeypatch.setattr(doctor, "extras", dict)


def found(topic: str) -> dict[str, doctor.Finding]:
    return {one.name: one for one in examine() if one.topic == topic}


def test_here_nothing_is_broken(capsys):
    code, out = call(capsys, "--json")
    said = json.loads(out)
    assert code == 0
    assert said["broken"] == []
    assert said["versions"].keys() == {"whereformer", "python", "torch"}
    assert said["attention on cpu"].keys() == set(SAMPLES)
    assert said["kernel"]["library"].startswith(str(library.path() or "none"))


@pytest.mark.parametrize("rich", [True, False])
def test_in_words(capsys, monkeypatch, rich):
    if not rich:
        monkeypatch.setattr("whereformer.cli.show.find_spec", lambda name: None)
        monkeypatch.setitem(sys.modules, "rich.table", None)
    code, out = call(capsys)
    assert code == 0
    assert all(sample in out for sample in SAMPLES)
    assert out.endswith("All that is installed works.\n")


def test_without_a_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "path", lambda: None)
    monkeypatch.setattr(library, "LOG", tmp_path / "log")
    kernel = found("kernel")
    assert kernel.keys() == {"library", "to build it"}
    assert not kernel["library"].broken
    library.LOG.write_text("-- one\nkernel.cpp:3:1: error: no vectors\n  here\n")
    assert found("kernel")["why"].says.startswith("kernel.cpp:3:1: error: no vectors here (all of it: ")


def test_a_library_that_does_not_load(capsys, monkeypatch, tmp_path):
    (tmp_path / "no.so").write_text("not a library")
    monkeypatch.setenv(library.ENVIRONMENT, str(tmp_path / "no.so"))
    code, out = call(capsys, "--json")
    assert code == 1
    assert json.loads(out)["broken"] == ["kernel: library"]
    assert "no.so does not load" in json.loads(out)["kernel"]["library"]


def test_a_library_of_something_else(monkeypatch):
    import _ctypes

    monkeypatch.setenv(library.ENVIRONMENT, _ctypes.__file__)
    assert found("kernel")["library"].broken


@pytest.mark.skipif(library.path() is None, reason="no compiled kernel")
@pytest.mark.parametrize(("isa", "code"), [("portable", 0), ("mmx", 1)])
def test_instructions_that_the_environment_names(isa, code):
    names = f"import os; os.environ['WHEREFORMER_ISA'] = {isa!r}"
    run = "from whereformer import doctor; print(*(one.broken for one in doctor._kernel()))"
    ran = subprocess.run([sys.executable, "-c", f"{names}; {run}"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"False {bool(code)}\n"


def test_a_backend_that_is_wrong(monkeypatch):
    attend = backends.sdpa.attend
    monkeypatch.setattr(backends.sdpa, "attend", lambda *arguments: attend(*arguments) * 1.001)
    assert found("attention on cpu")["irpe"].broken

    def fails(*arguments):
        raise RuntimeError("no")

    monkeypatch.setattr(backends.sdpa, "attend", fails)
    assert found("attention on cpu")["irpe"] == doctor.Finding(
        "attention on cpu", "irpe", "RuntimeError: no", True
    )


def test_libraries(monkeypatch):
    requirements = [
        "torch>=2.9",
        'scikit-learn>=1.5; extra == "lab"',
        "no-such_library[all]>=1; extra == 'test'",
        'whereformer[lab]; extra == "test"',
        'timm>=1.0; extra == "lab"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    assert extras() == {"scikit-learn": "lab", "no-such_library": "test", "timm": "lab"}
    monkeypatch.setattr(doctor, "extras", extras)
    monkeypatch.setitem(sys.modules, "timm", None)
    libraries = found("libraries")
    assert libraries["scikit-learn"].says == metadata.version("scikit-learn")
    assert libraries["no-such_library"].says == 'missing: pip install "whereformer[test]"'
    assert not libraries["no-such_library"].broken
    assert "does not load" in libraries["timm"].says
    assert libraries["timm"].broken


def test_digest_of_a_log_without_an_error():
    assert digest("killed\nby  night") == "killed by night"
