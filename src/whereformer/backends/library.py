"""Where the compiled CPU kernel is: a shared library with the plain C interface of csrc/whereformer.h."""

import os
import sys
from pathlib import Path

NAME = "libwhereformer" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
ENVIRONMENT = "WHEREFORMER_LIBRARY"  # another build, say one with sanitizers


def path() -> Path | None:
    """The library that the environment names, or else the one beside this file: put there by the installation, or
    by `cmake -S . -B build && cmake --build build` in a checkout. None if there is none."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    return found if (found := Path(__file__).with_name(NAME)).is_file() else None


def why_missing() -> str:
    """The log of the build that failed at installation, or "" if none is kept."""
    log = Path(__file__).with_name("kernel-not-built.log")
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
