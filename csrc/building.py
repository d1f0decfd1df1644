"""The build backend: scikit-build-core, which compiles the CPU kernel; or the package without, where that fails.

Such a wheel is pure Python, and holds the log of what went wrong, for `whereformer doctor`.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [  # no prepare_metadata: whether the wheel is of one platform shows when the kernel is built
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

HOME = Path("whereformer", "_kernel")
LOG = "not-built.log"
WITHOUT = """\
*** The CPU kernel was not built (why: see above). The package works without it, on torch alone, only slower.
*** It needs GCC or Clang with C++17. `whereformer doctor` tells what is missing."""


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, LOG)
        return _build(build.build_wheel, directory, settings, metadata, log, {str(log): str(HOME / LOG)})


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    home = Path("src") / HOME
    shutil.rmtree(home, ignore_errors=True)  # an older kernel must not pass for one that could not be built
    home.mkdir()
    return _build(build.build_editable, directory, settings, metadata, home / LOG, {})


def _build(
    make: Callable[..., str],
    directory: str,
    settings: dict[str, Any] | None,
    metadata: str | None,
    log: Path,
    include: dict[str, str],
) -> str:
    """A wheel with the kernel; or else without, and with the files of `include`: source -> place in the wheel."""
    settings = settings or {}
    try:
        with _copied(log):
            made = make(directory, settings, metadata)
    except (Exception, SystemExit) as error:
        with log.open("a", encoding="utf-8") as file:
            print(f"{type(error).__name__}: {error}", file=file)
        print(WITHOUT, flush=True)
        without = {"wheel.cmake": "false"} | {
            f"wheel.force-include.{source}": to for source, to in include.items()
        }
        return make(directory, settings | without, metadata)
    log.unlink()
    return made


@contextmanager
def _copied(log: Path) -> Iterator[None]:
    """All that this process and the compilers it runs print goes into a file, then to stdout as well."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for to, stream in enumerate(kept, start=1):
            os.dup2(stream, to)
            os.close(stream)
        print(log.read_text(encoding="utf-8", errors="replace"), flush=True)
