"""What is installed, what works, and what is missing."""

import ctypes
import importlib
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from textwrap import shorten

import torch

from whereformer import __version__
from whereformer.attention import attention
from whereformer.backends import FASTEST_FIRST, library
from whereformer.catalog import parse
from whereformer.errors import InputError
from whereformer.grid import Grid

SAMPLES = ("none", "rope_axial", "swin", "irpe", "irpe(on='qkv')")
"""Encodings that use each kind of form."""

GRID = Grid(5, 7, prefix=1)
HEADS, HEAD_DIM = 2, 16

MODULES = {"scikit-learn": "sklearn", "pytest-xdist": "xdist", "pyyaml": "yaml"}
"""Modules that are not called as the library that brings them, but for hyphens."""

IN_A_CHECKOUT = "cmake -S . -B build && cmake --build build, with GCC or Clang on the PATH"
FROM_SOURCE = "pip install --force-reinstall --no-deps --no-cache-dir -v, with GCC or Clang on the PATH"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        topic, name: what.
        says: how it is.
        broken: whether it is there and does not work.
    """

    topic: str
    name: str
    says: str
    broken: bool = False


def examine() -> Iterator[Finding]:
    """All that can be found out, by topic: versions, devices, kernel, attention, libraries."""
    yield Finding("versions", "whereformer", __version__)
    yield Finding("versions", "python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("versions", "torch", torch.__version__)
    yield Finding(
        "devices", "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    cuda = torch.cuda.is_available()
    yield Finding("devices", "cuda", torch.cuda.get_device_name() if cuda else "none")
    yield from _kernel()
    for device in ("cpu", "cuda") if cuda else ("cpu",):
        yield from _attention(device)
    yield from _libraries()


def _kernel() -> Iterator[Finding]:
    path = library.path()
    if path is None:
        yield Finding("kernel", "library", "none: torch does its work, only slower")
        if library.LOG.is_file():
            log = library.LOG.read_text(encoding="utf-8", errors="replace")
            yield Finding("kernel", "why", f"{digest(log)} (all of it: {library.LOG})")
        checkout = Path(__file__).parents[2].joinpath("CMakeLists.txt").is_file()
        yield Finding("kernel", "to build it", IN_A_CHECKOUT if checkout else FROM_SOURCE)
        return
    try:
        isa = ctypes.CDLL(str(path)).whereformer_isa
    except (OSError, AttributeError) as error:
        yield Finding("kernel", "library", f"{path} does not load: {error}", broken=True)
        return
    yield Finding("kernel", "library", str(path))
    isa.restype = ctypes.c_char_p
    if instructions := isa():
        yield Finding("kernel", "instructions", instructions.decode())
    else:
        yield Finding("kernel", "instructions", "WHEREFORMER_ISA names none that run here", broken=True)


def digest(log: str) -> str:
    """
    From the first error on.

    >>> digest("Configuring\\nCMake Error at CMakeLists.txt:6 (project):\\n\\n  No compiler\\n\\n  is set")
    'CMake Error at CMakeLists.txt:6 (project): No compiler is set'
    """
    found = re.search(r"^.*\berror\b", log, re.IGNORECASE | re.MULTILINE)
    return shorten(log[found.start() :] if found else log, width=300, placeholder=" ...")


def _attention(device: str) -> Iterator[Finding]:
    """Each sample with each backend, against the reference in float64."""
    topic = f"attention on {device}"
    for sample in SAMPLES:
        try:
            differences = _differences(sample, device)
        except Exception as error:
            yield Finding(topic, sample, f"{type(error).__name__}: {error}", broken=True)
            continue
        auto = next(iter(differences), "reference")
        off = ", ".join(f"{name} {difference:.0e}" for name, difference in differences.items())
        # Each number is a mean of values of size 1, whose weights come from sums of HEAD_DIM products.
        bound = 4 * (GRID.tokens + HEAD_DIM) * torch.finfo(torch.float32).eps
        wrong = not all(difference <= bound for difference in differences.values())
        says = f"auto takes {auto}" + (f"; off by {off}" if off else "")
        yield Finding(topic, sample, says, broken=wrong)


def _differences(sample: str, device: str) -> dict[str, float]:
    """The largest difference from the reference, for each backend that can serve, fastest first."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        encodings = [factory(HEADS * HEAD_DIM, HEADS, GRID).to(device) for factory in parse(sample)]
        for parameter in (parameter for e in encodings for parameter in e.parameters()):
            parameter.normal_()
        q, k, v = torch.randn(3, 2, HEADS, GRID.tokens, HEAD_DIM, device=device)
        doubles = [deepcopy(encoding).double() for encoding in encodings]
        exact = attention(q.double(), k.double(), v.double(), GRID, doubles, backend="reference")
        found = {}
        for name in FASTEST_FIRST:
            try:
                out = attention(q, k, v, GRID, encodings, backend=name)
            except InputError:  # it cannot serve
                continue
            found[name] = (out - exact).abs().max().item()
    return found


def _libraries() -> Iterator[Finding]:
    for name, extra in extras().items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("libraries", name, f'missing: pip install "whereformer[{extra}]"')
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(MODULES.get(name, name.replace("-", "_")))
        except Exception as error:
            yield Finding("libraries", name, f"{version} does not load: {error}", broken=True)
        else:
            yield Finding("libraries", name, version)


def extras() -> dict[str, str]:
    """The optional libraries, and the extra that brings each; none in a checkout that was not installed."""
    try:
        requirements = metadata.requires("whereformer") or []
    except metadata.PackageNotFoundError:
        return {}
    pattern = re.compile(r"([\w.-]+).*; *extra *== *['\"](\w+)['\"]")
    found = (match.groups() for line in requirements if (match := pattern.match(line)))
    return {name: extra for name, extra in found if name != "whereformer"}
