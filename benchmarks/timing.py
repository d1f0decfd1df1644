"""What the benchmarks share: rounds that interleave, the machine, options, tables."""

import argparse
import ctypes
import json
import os
import platform
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch

import whereformer

PLAIN = "plain"
LEAST_ROUNDS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ISA = {
    "avx2": {
        "WHEREFORMER_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "avx512": {
        "WHEREFORMER_ISA": "avx512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
}
"""What keeps the kernel, and each of the libraries that torch computes with, to lesser instructions."""
FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "MKL_NUM_THREADS",
    "LD_PRELOAD",
    *ISA["avx2"],
)


@dataclass(frozen=True)
class Time:
    """How long one variant takes, beside the plain one."""

    ratio: float  # median over rounds of this variant's time over the plain one's in the same round
    quartiles: tuple[float, float]  # of the same
    milliseconds: float  # median
    rounds: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.quartiles[0]:.2f}–{self.quartiles[1]:.2f})"


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, seconds: float, seed: int = 0
) -> dict[str, Time]:
    """Times of all variants, taken in turns: each round runs each of them once, in an order drawn anew.

    A ratio is formed within a round, where both times saw the same clock, heat and neighbours, and only then the
    median is taken: a ratio of medians would compare moments that lie apart. After `LEAST_ROUNDS`, a variant that
    has used up its time leaves the rounds; the plain one stays to the end.

    Args:
        variants: one of them called `PLAIN`.
        rounds: at most.
        seconds: what each variant may take, all rounds together.
    """
    for call in variants.values():
        if _timed(call) < seconds / LEAST_ROUNDS:
            call()  # once more: the first one may have made what later ones find
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(seed)
    running = list(variants)
    while running and len(times[PLAIN]) < rounds:
        turn = list(dict.fromkeys((PLAIN, *running)))
        order.shuffle(turn)
        for name in turn:
            times[name].append(_timed(variants[name]))
        running = [n for n in running if len(times[n]) < LEAST_ROUNDS or sum(times[n]) < seconds]
    return {name: _summary(found, times[PLAIN]) for name, found in times.items()}


def _timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def _summary(times: list[float], plain: list[float]) -> Time:
    ratios = [ours / theirs for ours, theirs in zip(times, plain, strict=False)]  # from the first round on
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Time(middle, (low, high), 1e3 * statistics.median(times), len(times))


def options(description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--rounds", type=_count, default=50, metavar="N", help="at most (default: 50)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="spent on timing each cell, about (default: 1)"
    )
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="of torch and of the kernel (default: torch's)"
    )
    parser.add_argument("--isa", choices=ISA, help="keep torch and the kernel to these instructions")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table, and the machine, as markdown"
    )
    return parser


def prepare(asked: argparse.Namespace) -> None:
    """Set threads; start anew if the instructions asked for are not those of the environment."""
    wanted = ISA.get(asked.isa, {})
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wanted)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    torch.manual_seed(0)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, expected a positive integer")
    return number


def machine() -> dict[str, object]:
    """On what the numbers were taken."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags[1].split()) if flags else set()
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in have],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
        "kernel_instructions": kernel_instructions(),
        "whereformer": whereformer.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def kernel_instructions() -> str | None:
    """What the CPU kernel runs on, or None if there is none."""
    beside = Path(whereformer.__file__).parent.rglob("libwhereformer.*")
    for path in (os.environ.get("WHEREFORMER_LIBRARY"), *beside):
        if path is None:
            continue
        library = ctypes.CDLL(str(path))
        if hasattr(library, "whereformer_isa"):
            library.whereformer_isa.restype = ctypes.c_char_p
            return library.whereformer_isa().decode()
    return None


@dataclass(frozen=True)
class Table:
    """What was found, for the terminal and for a page."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def show(self) -> None:
        if find_spec("rich"):
            from rich import box
            from rich.console import Console
            from rich.table import Table as Rich

            shown = Rich(*self.header, box=box.SIMPLE)
            for row in self.rows:
                shown.add_row(*row)
            natural = Console(width=1000).measure(shown).maximum  # a terminal's own lines may wrap; cells not
            Console(highlight=False, markup=False, width=max(Console().width, natural)).print(shown)
        else:
            lines = [self.header, *self.rows]
            widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
            for line in lines:
                print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        for note in self.notes:
            print(note)

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        return "\n\n".join([table, *self.notes])


class Notes:
    """Why cells are empty: each reason once, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, why: str) -> str:
        return f"– [{self.numbers.setdefault(why, len(self.numbers) + 1)}]"

    def lines(self) -> list[str]:
        return [f"[{number}] {why}" for why, number in self.numbers.items()]


def write(asked: argparse.Namespace, title: str, command: str, cells: Iterable[Mapping], table: Table) -> None:
    """Show the table, and write the files that were asked for."""
    found = machine()
    table.show()
    if asked.out:
        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in vars(asked).items()}
        result = {"machine": found, "options": chosen, "cells": list(cells)}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if asked.markdown:
        flags = " ".join(found["flags"])  # pyright: ignore[reportArgumentType, reportCallIssue]
        about = (
            f"{found['cpu']} ({flags}), {found['cores']} cores, {found['threads']} threads; torch {found['torch']}"
            f" on {found['torch_instructions']}, the kernel on {found['kernel_instructions'] or '–'}."
        )
        asked.markdown.parent.mkdir(parents=True, exist_ok=True)
        asked.markdown.write_text(f"# {title}\n\n{about}\n\n`{command}`\n\n{table.markdown()}\n")
