"""Random calls of the kernel between guarded pages, on all instructions that run here.

python tests/kernel_cases.py FIRST COUNT checks COUNT calls, from seed FIRST on; whoever reads
or writes past the caller's tensors dies of it. So this runs in a process of its own, with sanitizers or without.
"""

import ctypes
import math
import mmap
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import emulated
from kernel_calls import LOOKUPS, MASKS, Case, made, results
from whereformer.backends import kernel, library
from whereformer.backends.kernel import Arguments

SIZES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (2, 2),
    (3, 4),
    (5, 8),
    (4, 15),
    (3, 16),
    (2, 17),
    (6, 9),
    (2, 33),
    (1, 40),
    (40, 3),
]
LARGE = (100, 13)  # more keys than the kernel takes at a time
FEATURES = [1, 2, 3, 7, 8, 15, 16, 17, 24, 32, 33, 64, 80]
BUCKETS = [1, 2, 3, 5, 7, 16, 17, 49, 64, 100, 400]


def random_case(seed: int) -> tuple[Arguments, Tensor, int]:
    """What to call, the gradient of its output, and on how many threads."""
    torch.manual_seed(seed)
    choose = random.Random(seed).choice

    def grid() -> tuple[int, int, int, int]:
        height, width = choose(SIZES)
        return choose([0, 0, 1, 1, 2, 5, 17]), choose([1, 1, 2]) if height * width < 30 else 1, height, width

    queries, keys = grid(), choose([None, None, grid(), (0, 1, 1, 1), (choose([1, 20]), 1, 1, 1)])
    if seed % 10 == 0:
        queries, keys = (1, 1, *choose([(3, 4), (2, 17)])), (choose([0, 2]), 1, *LARGE)
    values = [name for name in LOOKUPS if name.startswith("values")]
    logits = [name for name in LOOKUPS if name not in values]
    lookups = [(choose(logits), choose(BUCKETS)) for _ in range(choose([0, 1, 1, 2, 3, 4, 8]))]
    lookups += [(choose(values), choose(BUCKETS)) for _ in range(choose([0, 0, 1, 1, 2, 8]))]
    features, strided = choose([*FEATURES, *([256] if seed % 10 else [])]), keys is None and choose([True, False])
    case = Case(
        *(queries, keys, tuple(lookups), choose([1, 2, 3]), choose([1, 2, 3, 5]), features),
        value_features=None if strided else choose([None, None, 1, 5, 16, 40]),
        pairs=min(choose([0, 0, 1, 4, features]), features // 2),
        half=choose([True, False]),
        per_image=choose([True, False]),
        mask=choose(["none", "none", *MASKS]),
        strided=strided,
        size=choose([0.01, 1.0, 1.0, 4.0]),
    )
    a = made(case, choose([torch.float32, torch.float32, torch.bfloat16]))
    if choose([True, False]):
        _smooth(a, choose([1, 2, 3]), choose([0, 1, 7]))
    grad_out = torch.randn(*a.q.shape[:-1], a.v.shape[-1]).to(a.q.dtype)
    if choose([True, False, False]):
        grad_out = grad_out[:1, :1, :1].expand_as(grad_out)  # as sums give it
    return a, grad_out, choose([1, 1, 2, 3, 4, 5])


def _smooth(a: Arguments, run: int, line: int) -> None:
    """Buckets that change slowly along lines, as those of real encodings do."""
    for at, entries, fields in zip(a.maps, a.entries, _fields(a), strict=True):
        by_bucket = fields[0] == kernel.VALUES or fields[1] == kernel.BY_BUCKET
        buckets = entries.shape[-2 if by_bucket else -1]
        most = max(buckets - (fields[-1] >= 0), 1)
        x, y = torch.arange(at.shape[-1]) // run, torch.arange(at.shape[-2])[:, None] * line
        at.copy_(((x + y) % most).expand_as(at))


def _fields(a: Arguments) -> list[list[int]]:
    step = len(kernel.FIELDS)
    return [list(a.lookups[n : n + step]) for n in range(0, len(a.lookups), step)]


# ---------------------------------------------------------------------------------------------------------------
# Guards.

_libc = ctypes.CDLL(None, use_errno=True)


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy of x, of the same strides, that ends (or starts) where a page starts (ends) that nobody may touch."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 1
    size = span * x.element_size()
    border = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
    room = mmap.mmap(-1, border + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for page in (start, start + border):
        if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(room, dtype=x.dtype, count=span, offset=border - size if at_end else mmap.PAGESIZE)
    if x.numel():
        flat.copy_(x.as_strided((span,), (1,)))
    return flat.as_strided(x.shape, x.stride())


def guarded_results(a: Arguments, grad_out: Tensor, at_end: bool) -> dict[str, Tensor]:
    """The output and all gradients, each NaN before, of a kernel all of whose tensors are guarded."""
    put: Callable[[Tensor], Tensor] = lambda x: guarded(x, at_end)  # noqa: E731
    new: Callable[[Tensor], Tensor] = lambda x: put(torch.full_like(x, torch.nan))  # noqa: E731
    a = a._replace(
        **{name: put(getattr(a, name)) for name in "qkv"},
        **{name: [put(x) for x in getattr(a, name)] for name in ("turns", "maps", "entries")},
        allowed=None if a.allowed is None else put(a.allowed),
        added=None if a.added is None else put(a.added),
    )
    out, lse = map(new, kernel.outputs(a, True))
    kernel.run("whereformer_forward", a, out, lse)
    *gradients, of_entries = kernel.gradients_of(a, [True] * len(a.entries))
    q, k, v = map(new, gradients)
    entries = [new(x) for x in of_entries]
    kernel.run("whereformer_backward", a, out, lse, (put(grad_out), q, k, v), entries)
    return {"out": out, "q": q, "k": k, "v": v} | {f"entries {n}": x for n, x in enumerate(entries)}


# ---------------------------------------------------------------------------------------------------------------
# Instructions, of which the kernel picks some when it is loaded.


@contextmanager
def on(isa: str):
    """The kernel on these instructions; yields False where they do not run."""
    path, before = (
        library.path(),
        {name: os.environ.get(name) for name in ("WHEREFORMER_ISA", library.ENVIRONMENT)},
    )
    assert path is not None
    load = kernel._library
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(path, Path(folder) / path.name)  # another file, another choice
            os.environ |= {"WHEREFORMER_ISA": isa, library.ENVIRONMENT: str(copy)}
            try:
                loaded = load.__wrapped__()
            except OSError as error:
                if "names no instructions that run here" not in str(error):
                    raise
                yield False
                return
        kernel._library = lambda: loaded  # type: ignore[assignment]
        yield True
    finally:
        kernel._library = load
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


INSTRUCTIONS = ("portable", "avx2", "avx512", "amx")


def right(seed: int) -> None:
    a, grad_out, threads = random_case(seed)
    exact = results(emulated.in_float64(a), grad_out, emulated.attention)
    bounds = emulated.bounds(a, grad_out, 0.0 if a.q.dtype == torch.float32 else torch.finfo(a.q.dtype).eps / 2)
    for n, isa in enumerate(INSTRUCTIONS):
        with on(isa) as runs:
            if not runs:
                continue
            torch.set_num_threads(threads)
            got = guarded_results(a, grad_out, at_end=bool((seed + n) % 2))
            torch.set_num_threads(1)
            for what, bound in bounds.items():
                error = (got[what].double() - exact[what]).abs()
                least = 1e-35  # weights below 2^-126 are zero
                assert (error <= bound + least).all(), f"seed {seed}, {isa}, {threads} threads: {what}"


def main() -> None:
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        right(seed)
    print(f"{count} right")


if __name__ == "__main__":
    main()
