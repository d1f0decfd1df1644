"""What the documentation shows is run, and its generated parts are current."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest

import whereformer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs").rglob("*.svg"))
MODULES = [module.name for module in pkgutil.walk_packages(whereformer.__path__, "whereformer.")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where classes that are pickled are looked for
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("script", ["tables.py", "encodings.py", "kernel.py", "translate.py"])
def test_generated_parts_are_current(script):
    subprocess.run([sys.executable, ROOT / "docs" / script, "--check"], check=True)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_small_and_whole(picture):
    assert picture.stat().st_size < 40_000
    drawing = ElementTree.parse(picture).getroot()
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert drawing.find("{http://www.w3.org/2000/svg}title").text


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_doctests():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(found) >= 10
