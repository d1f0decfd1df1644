"""What may import what; what a bare import brings in; the public names."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import whereformer

SOURCE = Path(whereformer.__file__).parent

CORE = {
    *("errors", "grid", "images", "windows", "index", "forms", "encoding", "encodings", "resample"),
    *("catalog", "attention", "facts"),
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "grid": {"errors"},
    "index": {"errors", "grid"},
    "forms": {"errors", "grid", "index"},
    "images": {"errors", "grid"},
    "windows": {"errors", "grid"},
    "mask": {"errors"},
    "kept": set(),
    "resample": {"errors"},
    "encoding": {"errors", "grid", "forms", "resample"},
    "encodings": {"errors", "grid", "index", "forms", "encoding", "resample", "kept"},
    "catalog": {"errors", "grid", "encoding", "encodings"},
    "backends": {"errors", "grid", "index", "forms", "mask", "kept"},
    "again": {"grid", "forms", "encoding", "backends"},
    "attention": {"again", "errors", "grid", "images", "forms", "encoding", "mask", "backends"},
    "layers": {
        *("errors", "grid", "index", "forms", "mask", "resample", "encoding", "encodings", "backends"),
        "attention",
    },
    "facts": {"errors", "grid", "forms", "encoding", "catalog", "backends"},
    "testing": {"errors", "grid", "images", "forms", "encoding", "catalog", "attention", "backends"},
    "translation": {"errors", "grid", "encoding", "resample"},
    "adapters": {*CORE, "translation"},
    "lab": {*CORE, "adapters"},
    "doctor": {*CORE, "__version__", "backends"},
    "__main__": {"cli"},
    "cli": {*CORE, "__version__", "adapters", "lab", "doctor"},
}
"""Each part of the package, and the parts it may import: those to its left in the picture of the design."""

OPTIONAL_FREE = ALLOWED.keys() - {"adapters", "lab", "cli", "__main__"}
"""Parts that know no library but torch, not even inside a function."""


def part(file: Path) -> str:
    return file.relative_to(SOURCE).with_suffix("").parts[0]


FILES = sorted(file for file in SOURCE.rglob("*.py") if part(file) != "__init__")


def imported(file: Path) -> set[str]:
    """Full names of the modules, or names in them, that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_parts_import_what_is_on_their_left(file: Path) -> None:
    ours = {name.split(".")[1] for name in imported(file) if name.startswith("whereformer.")}
    assert "whereformer" not in imported(file), "import names from the module that defines them"
    unwanted = ours - ALLOWED[part(file)] - {part(file)}
    assert not unwanted
    if part(file) in OPTIONAL_FREE:
        roots = {name.split(".")[0] for name in imported(file)} - {"whereformer", "torch"}
        assert roots <= sys.stdlib_module_names


def test_import_brings_in_torch_and_nothing_optional() -> None:
    code = """
import json, sys, warnings, torch
before = set(sys.modules)
warnings.simplefilter("error")
import whereformer, whereformer.testing
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = set(json.loads(found.stdout)) - sys.stdlib_module_names
    assert brought == {"whereformer"}


def test_public_names() -> None:
    assert sorted(whereformer.__all__) == [
        "AddedValues",
        "AxisBias",
        "BucketBias",
        "BucketValues",
        "Buckets",
        "DenseBias",
        "Grid",
        "InputError",
        "LowRankBias",
        "MatrixRotation",
        "OffsetBias",
        "Packed",
        "Padded",
        "Points",
        "PositionEncoding",
        "Rotation",
        "Scores",
        "Windows",
        "attention",
        "describe",
        "encode",
        "encodings",
        "equip",
        "explain",
        "layers",
        "load_checkpoint",
        "parse",
        "resize",
        "translate",
        "unequip",
    ]
    for name in whereformer.__all__:
        assert hasattr(whereformer, name)
