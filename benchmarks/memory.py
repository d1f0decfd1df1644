"""The memory that one call takes beyond its inputs, at its peak, as the system sees it (Linux, glibc).

The call runs in a process of its own, forked before torch has started a thread. A small call comes first, so that
libraries are loaded, threads run and caches of code are filled; then the inputs are made, and the system is told
to forget the peak so far. The peak of resident memory then holds whatever was touched, by whomever: tensors, the
scratch of torch's kernels and of ours, buffers that stay for the next call. Pages of files (code) are left out.
Memory that is freed goes back to the system at once, and huge pages are off, so the resolution is a page; repeated
measurements lie within about 0.1 MB of one another, with two threads 0.2 MB.
"""

import ctypes
import gc
import multiprocessing
import re
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from whereformer import InputError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
PR_SET_THP_DISABLE = 41
Call = Callable[[], object]


def can_measure() -> bool:
    return Path("/proc/self/clear_refs").exists() and hasattr(ctypes.CDLL(None), "mallopt")


def free() -> int:
    """Bytes that the system could give."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def peak(small: Callable[[], Call], make: Callable[[], Call], limit: int) -> int | str:
    """Bytes that a call adds at its peak to what was there before; or why there is no such number.

    Args:
        small: makes the call that comes first.
        make: makes the inputs, and returns the call to be measured.
        limit: bytes that the process may take.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(small, make, limit, send))
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        return f"needs more than {limit / 2**30:.3g} GiB, or crashes"
    finally:
        process.join()


def _child(small: Callable[[], Call], make: Callable[[], Call], limit: int, send: Connection) -> None:
    _give_back_at_once()
    most = _status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        send.send(_peak(small(), make))
    except InputError as error:
        send.send(str(error))
    except (MemoryError, RuntimeError) as error:
        scarce = isinstance(error, MemoryError) or "memory" in str(error)
        send.send(
            f"needs more than {limit / 2**30:.3g} GiB" if scarce else f"failed: {str(error).splitlines()[0]}"
        )


def _peak(small: Call, make: Callable[[], Call]) -> int:
    small()
    call = make()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("RssAnon")
    kept = call()
    peak, files = _status("VmHWM"), _status("RssFile") + _status("RssShmem")
    del kept
    return peak - files - before


def _give_back_at_once() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 1 << 16), (M_TRIM_THRESHOLD, 0), (M_TOP_PAD, 0)):
        libc.mallopt(name, value)


def _status(name: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
