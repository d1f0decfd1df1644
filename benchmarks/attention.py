"""Attention with positions, beside plain F.scaled_dot_product_attention without any: time and peak memory."""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memory
import whereformer
from timing import DTYPES, PLAIN, Notes, Table, Time, interleaved, options, prepare, write
from whereformer import Grid, InputError, PositionEncoding

ENCODINGS = {
    "none": "none",
    "bias": "irpe(mode='bias')",
    "K": "irpe(on='k')",
    "QK": "irpe(on='qk')",
    "QKV": "irpe(on='qkv')",
    "swin": "swin",
    "decomposed": "decomposed",
    "rope": "rope_axial",
}
BACKENDS = ("reference", "sdpa", "cpu")
PASSES = ("forward", "forward+backward")
BATCHES = {"14x14": 8, "24x24": 4, "32x32": 2, "64x64": 1}
FULL = {"grids": list(BATCHES), "dtypes": list(DTYPES)}
PREFIX = 1
STD = 0.1  # of what is in the tables: at zero, some of the work could be skipped

EXAMPLES = """\
examples:
  python benchmarks/attention.py
      two grids in float32, in about five minutes on two cores
  python benchmarks/attention.py --full --out results.json --markdown results.md
      all grids and dtypes
  python benchmarks/attention.py --grids 32x32 --encodings K QKV --backends cpu --passes forward --seconds 5
  python benchmarks/attention.py --isa avx2 --threads 1
      torch and the kernel on AVX2
"""


Peaks = dict[tuple[str, str], int | str | None]
"""Of (encoding, backend): bytes, or why it cannot run, or None where memory is not measured."""


@dataclass(frozen=True)
class Setting:
    """All that the variants of one comparison have in common."""

    grid: str
    batch: int
    heads: int
    head_dim: int
    step: str
    dtype: str

    def small(self) -> "Setting":
        return Setting("4x4", 1, self.heads, self.head_dim, self.step, self.dtype)


@dataclass(frozen=True)
class Cell:
    setting: Setting
    encoding: str
    backend: str
    why: str | None = None  # there are no numbers
    time: Time | None = None
    bytes: int | None = None  # peak, beyond the inputs

    def to_dict(self, plain: "Cell") -> dict[str, object]:
        ratio = self.bytes / plain.bytes if self.bytes is not None and plain.bytes else None
        return asdict(self.setting) | {
            "encoding": self.encoding,
            "backend": self.backend,
            "why": self.why,
            "time": None if self.time is None else asdict(self.time),
            "memory": None if self.bytes is None else {"bytes": self.bytes, "ratio": ratio},
        }


def call(setting: Setting, qkv: Tensor, encoding: str, backend: str) -> Callable[[], object]:
    """One variant, ready to run; `encoding` PLAIN is torch's own attention.

    As a block does, each starts from one tensor [batch, tokens, 3, heads, head_dim] that holds q, k and v, and
    ends with features of heads side by side; with backward, with gradients of that tensor and of all tables.
    """
    height, width = map(int, setting.grid.split("x"))
    grid = Grid(height, width, prefix=PREFIX)
    dim = setting.heads * setting.head_dim
    encodings = [] if encoding == PLAIN else _build(ENCODINGS[encoding], dim, setting.heads, grid, qkv.dtype)

    def attend() -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if encoding == PLAIN:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = whereformer.attention(q, k, v, grid, encodings, backend=backend)
        return out.transpose(1, 2).flatten(2)

    def forward() -> Tensor:
        with torch.inference_mode():
            return attend()

    if setting.step == "forward":
        return forward
    tables = [table for one in encodings for table in one.parameters()]
    gradient = torch.randn(qkv.shape[0], qkv.shape[1], dim, dtype=qkv.dtype)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), [qkv, *tables], gradient)

    return both


def inputs(setting: Setting) -> Tensor:
    height, width = map(int, setting.grid.split("x"))
    shape = (setting.batch, PREFIX + height * width, 3, setting.heads, setting.head_dim)
    return torch.randn(shape, dtype=DTYPES[setting.dtype]).requires_grad_(setting.step != "forward")


def _build(text: str, dim: int, heads: int, grid: Grid, dtype: torch.dtype) -> list[PositionEncoding]:
    encodings = [factory(dim, heads, grid).to(dtype) for factory in whereformer.parse(text)]
    for table in (table for encoding in encodings for table in encoding.parameters()):
        nn.init.normal_(table, std=STD)
    return encodings


def remembered(setting: Setting, encoding: str, backend: str, limit: int) -> int | str:
    """Bytes at the peak of one variant, or why it cannot run."""

    def made(where: Setting) -> Callable[[], Callable[[], object]]:
        return lambda: call(where, inputs(where), encoding, backend)

    return memory.peak(made(setting.small()), made(setting), limit)


def cells(setting: Setting, peaks: Peaks, asked: argparse.Namespace) -> list[Cell]:
    """All variants of a setting, the plain one first, with what is known of their memory."""
    qkv = inputs(setting)
    calls: dict[str, Callable[[], object]] = {}
    whys = {variant: peak for variant, peak in peaks.items() if isinstance(peak, str)}
    for variant in [variant for variant in peaks if variant not in whys]:
        run = call(setting, qkv, *variant)
        try:
            if peaks[variant] is None:
                run()
        except (InputError, MemoryError, RuntimeError) as error:
            whys[variant] = str(error).split("\n")[0]
        else:
            calls[_name(*variant)] = run
    if why := whys.get((PLAIN, PLAIN)):
        sys.exit(f"{setting}: torch's own attention cannot run: {why}")
    times = interleaved(calls, asked.rounds, asked.seconds)
    return [
        Cell(
            setting,
            *variant,
            whys.get(variant),
            times.get(_name(*variant)),
            None if isinstance(peak, str) else peak,
        )
        for variant, peak in peaks.items()
    ]


def _name(encoding: str, backend: str) -> str:
    return PLAIN if encoding == PLAIN else f"{encoding} {backend}"


def rows(found: list[Cell], backends: list[str], notes: Notes) -> Iterator[list[str]]:
    """Lines of the table for one setting."""
    plain, *others = found
    assert plain.time is not None
    megabytes = "" if plain.bytes is None else f", {plain.bytes / 1e6:.1f} MB"
    setting = plain.setting
    head = [f"{setting.grid}, batch {setting.batch}", setting.step, setting.dtype]
    head.append(f"{plain.time.milliseconds:.2f} ms{megabytes}")
    at = {(cell.encoding, cell.backend): cell for cell in others}
    for encoding in dict.fromkeys(cell.encoding for cell in others):
        line = [at[encoding, backend] for backend in backends]
        times = [notes(cell.why) if cell.why else str(cell.time) for cell in line]
        peaks = ["–" if c.bytes is None or not plain.bytes else f"{c.bytes / plain.bytes:.2f}" for c in line]
        yield [*head, encoding, *times, *peaks]
        head = [""] * len(head)


def main() -> None:
    parser = options(str(__doc__), EXAMPLES)
    parser.add_argument("--grids", nargs="+", type=_grid, default=["14x14", "32x32"], metavar="HxW")
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--batch", type=int, metavar="N", help="images (default: as many as make about 2000 tokens)"
    )
    parser.add_argument("--heads", type=int, default=6, metavar="N")
    parser.add_argument("--head-dim", type=int, default=64, metavar="N")
    parser.add_argument("--no-memory", action="store_true", help="time alone")
    parser.add_argument(
        "--limit", type=float, metavar="GIB", help="memory that a cell may take (default: 3/4 of what is free)"
    )
    parser.add_argument("--full", action="store_true", help="all grids and dtypes")
    asked = parser.parse_args()
    if asked.full:
        vars(asked).update(FULL)
    prepare(asked)
    variants = [(encoding, backend) for encoding in asked.encodings for backend in asked.backends]
    settings = [
        Setting(grid, asked.batch or _batch(grid), asked.heads, asked.head_dim, step, dtype)
        for dtype in asked.dtypes
        for step in asked.passes
        for grid in asked.grids
    ]
    variants.insert(0, (PLAIN, PLAIN))
    limit = int(asked.limit * 2**30) if asked.limit else memory.free() * 3 // 4
    measures = memory.can_measure() and not asked.no_memory
    peaks: dict[Setting, Peaks] = {}
    for setting in settings:  # before torch runs threads here: a process that has some cannot be forked
        _progress("memory", setting)
        peaks[setting] = {v: remembered(setting, *v, limit) if measures else None for v in variants}
    notes, lines, results = Notes(), [], []
    for setting in settings:
        _progress("time", setting)
        found = cells(setting, peaks[setting], asked)
        lines += rows(found, asked.backends, notes)
        results += [cell.to_dict(found[0]) for cell in found]
    header = ["grid", "pass", "dtype", "SDPA, no encoding", "encoding"]
    header += [f"time: {backend}" for backend in asked.backends]
    header += [f"memory: {backend}" for backend in asked.backends]
    about = (
        "Ratios to F.scaled_dot_product_attention without any encoding: time, median (quartiles) over rounds;"
        " peak memory beyond the inputs."
    )
    table = Table(header, lines, [about, *notes.lines()])
    command = " ".join(["python", "benchmarks/attention.py", *sys.argv[1:]])
    write(asked, "Attention with positions, beside attention without", command, results, table)


def _progress(what: str, setting: Setting) -> None:
    print(f"{what}: {setting.grid}, {setting.step}, {setting.dtype}", file=sys.stderr, flush=True)


def _grid(text: str) -> str:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a height and a width, such as 14x14")
    return text


def _batch(grid: str) -> int:
    height, width = map(int, grid.split("x"))
    return BATCHES.get(grid, max(1, 2000 // (height * width)))


if __name__ == "__main__":
    main()
