"""The command line: help, JSON, exit codes, and one line for a mistake."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

import whereformer
from whereformer.catalog import CATALOG, FAMILIES
from whereformer.cli import main
from whereformer.cli.show import print_table


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", ["compare", "list", "cost", "doctor"])
def test_help_shows_examples(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert "examples:" in out
    assert f"whereformer {command}" in out


def test_version(capsys):
    assert call(capsys, "--version") == (0, f"whereformer {whereformer.__version__}\n", "")


def test_list(capsys):
    code, out, _ = call(capsys, "list", "--json")
    assert code == 0
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert found.keys() == CATALOG.keys()
    assert found["irpe"]["moments"] == ["biases"]
    assert found["irpe"]["options"]["ratio"] == 1.9
    assert all(entry["formula"] and entry["paper"] for entry in found.values())
    code, out, _ = call(capsys, "list")
    assert code == 0
    assert all(name in out for name in CATALOG)
    assert all(family.upper() in out for family in FAMILIES)
    assert max(map(len, out.splitlines())) <= 100


def test_list_of_one(capsys):
    code, out, _ = call(capsys, "list", "irpe(on='qkv', method='cross')")
    assert code == 0
    assert "on='qkv'" in out
    assert "method='cross'" in out
    assert "shared=True" in out
    assert "e_ij = q_i·k_j/√d + b_ij" in out
    assert "BucketBias and BucketValues" in out
    code, out, _ = call(capsys, "list", "irpe(on='qkv', method='cross')", "--json")
    assert code == 0
    assert json.loads(out)["moments"] == ["biases", "values"]


def test_list_of_one_in_a_terminal_shows_a_picture(capsys, monkeypatch):
    monkeypatch.setattr(
        "whereformer.cli.encodings.make_console",
        lambda: Console(width=100, force_terminal=True, color_system="truecolor"),
    )
    code, out, _ = call(capsys, "list", "sincos2d")
    assert code == 0
    assert "similarity" in out
    assert out.count("[48;2;") + out.count(";48;2;") >= 9 * 13 * 3


def test_cost(capsys):
    code, out, _ = call(capsys, "cost", "--model", "test_vit", "--encodings", "none; irpe", "--json")
    assert code == 0
    none, irpe = json.loads(out)
    assert irpe["parameters"] > none["parameters"]
    code, out, _ = call(capsys, "cost", "--model", "test_vit", "--encodings", "irpe(on='qkv')")
    assert code == 0
    assert "irpe(on='qkv')" in out


MISTAKES = {
    "no command": [],
    "unknown command": ["compair"],
    "unknown option": ["list", "--jsn"],
    "list of an unknown encoding": ["list", "ipre"],
    "list of two encodings": ["list", "learned + irpe"],
    "list of a bad value": ["list", "irpe(on='x')"],
    "unknown encoding": ["compare", "--encodings", "nonsense"],
    "wrong option": ["compare", "--encodings", "irpe(side='k')"],
    "bad value": ["compare", "--encodings", "irpe(on='v', mode='bias')"],
    "no encodings": ["compare", "--encodings", ";"],
    "baseline elsewhere": ["compare", "--encodings", "none; peg", "--baseline", "learned"],
    "seeds": ["compare", "--seeds", "0"],
    "missing folder": ["compare", "--data", "no/such/folder"],
    "unknown data set": ["compare", "--data", "torch/nonsense", "--data-root", "."],
    "indivisible": ["compare", "--image-size", "9"],
    "unknown model": ["compare", "--model", "no_such_model"],
    "not a vit": ["compare", "--model", "resnet18"],
    "nothing to resume": ["compare", "--resume", "no/such/folder"],
    "no experiment": ["compare", "--experiment", "no_such_file.py"],
    "learning rate": ["compare", "--lr", "-1"],
    "cost of what": ["cost", "--image-size", "96"],
    "cost of a strange size": ["cost", "--model", "test_vit", "--image-size", "90"],
    "cost of no vit": ["cost", "--model", "resnet18"],
    "cost of nothing": ["cost", "--model", "no_such_model"],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_costs_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("whereformer: error: ")
    assert not list(tmp_path.glob("**/result.json"))


def test_a_folder_without_images(capsys, tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    out = tmp_path / "out"
    code, _, err = call(capsys, "compare", "--data", str(tmp_path / "images"), "--out", str(out))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "images" in err


def test_another_experiment_in_the_folder(capsys, tmp_path):
    from whereformer.lab.experiment import Experiment

    (tmp_path / "experiment.json").write_text(Experiment().to_json())
    (tmp_path / "runs" / "none" / "seed-0").mkdir(parents=True)
    code, _, err = call(capsys, "compare", "--epochs", "7", "--out", str(tmp_path))
    assert code == 2
    assert "epochs=25, not 7" in err


def test_without_the_lab_extra_it_names_it(capsys, monkeypatch):
    monkeypatch.setattr("whereformer.cli.show.find_spec", lambda name: None)
    for arguments in (["compare"], ["cost"], ["list"], ["list", "irpe"]):
        code, _, err = call(capsys, *arguments)
        assert code == 2
        assert 'pip install "whereformer[lab]"' in err
    assert call(capsys, "list", "--json")[0] == 0


def test_the_command_is_installed():
    found = subprocess.run(
        [sys.executable, "-m", "whereformer.cli", "list", "--json"], capture_output=True, text=True, check=True
    )
    assert len(json.loads(found.stdout)) == len(CATALOG)


def test_a_table_of_many_columns_keeps_its_text_readable(capsys):
    numbers = [str(n) * 9 for n in range(10)]
    print_table(["encoding", *"abcdefghij"], [["detr_sine(offset=-0.5) + irpe(ratio=2)", *numbers]])
    assert "detr_sine(offset=-0.5) + irpe(ratio=2)  000000000" in capsys.readouterr().out
