"""Where the compiled CPU kernel is: a shared library with the plain C interface of csrc/whereformer.h."""

import os
import sys
from pathlib import Path

HOME = Path(__file__).parents[1] / "_kernel"
"""Filled by the installation, or by `cmake -S . -B build && cmake --build build` in a checkout."""

NAME = "libwhereformer" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

LOG = HOME / "not-built.log"
"""What csrc/building.py keeps of a build that failed."""

ENVIRONMENT = "WHEREFORMER_LIBRARY"
"""The variable that names another build, say one with sanitizers."""


def path() -> Path | None:
    """The library; None if there is none."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    return found if (found := HOME / NAME).is_file() else None
