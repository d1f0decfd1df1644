"""Whole timm models with an encoding in every block, beside the same models unequipped: images per second."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import nn

import whereformer
from timing import DTYPES, PLAIN, Notes, Table, Time, interleaved, options, prepare, write
from whereformer import InputError, PositionEncoding
from whereformer.adapters import behaviours

MODELS = ("deit_tiny_patch16_224", "deit_small_patch16_224")
ENCODINGS = {  # the model's own table stays, so that all that differs is what attention does
    "none": "learned",
    "bias": "learned + irpe(mode='bias')",
    "K": "learned + irpe(on='k')",
    "QK": "learned + irpe(on='qk')",
    "QKV": "learned + irpe(on='qkv')",
    "swin": "learned + swin",
    "decomposed": "learned + decomposed",
    "rope": "learned + rope_axial",
}
BACKENDS = ("auto", "reference", "sdpa", "cpu")
BATCHES = {"forward": 8, "training": 4}
STD = 0.1  # of what is in the tables: at zero, some of the work could be skipped

EXAMPLES = """\
examples:
  python benchmarks/model.py
      DeiT-Ti and DeiT-S, forward and training steps, whichever backend is the fastest
  python benchmarks/model.py --models deit_small_patch16_224 --encodings K QKV --seconds 20 --out results.json
  python benchmarks/model.py --backends auto sdpa cpu --steps forward --markdown results.md
  python benchmarks/model.py --models vit_base_patch16_224 --isa avx2 --threads 1
"""


def build(name: str, encoding: str) -> nn.Module:
    """The model, equipped unless `encoding` is PLAIN."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False)
    if encoding == PLAIN:
        return model
    whereformer.equip(model, ENCODINGS[encoding])
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            for table in module.parameters():
                nn.init.normal_(table, std=STD)
    return model


def run(name: str, encoding: str, backend: str, step: str, batch: int, dtype: torch.dtype) -> Callable[[], object]:
    """A forward pass in inference mode, or a training step: forward, cross entropy, backward, AdamW."""
    model = build(name, encoding).train(step == "training")
    images = torch.randn(batch, 3, *model.patch_embed.img_size)  # pyright: ignore
    autocast = partial(torch.autocast, "cpu", dtype, enabled=dtype != torch.float32)
    attend = patch.object(behaviours, "attention", partial(whereformer.attention, backend=backend))

    def forward() -> None:
        with torch.inference_mode(), attend, autocast():
            model(images)

    if step == "forward":
        return forward
    labels = torch.arange(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def training() -> None:
        optimizer.zero_grad()
        with attend, autocast():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return training


def compared(
    name: str, step: str, batch: int, dtype: str, variants: list[tuple[str, str]], rounds: int, seconds: float
) -> list[dict[str, object]]:
    """What was found of the plain model, and of all variants (encoding, backend)."""
    calls: dict[str, Callable[[], object]] = {}
    whys: dict[str, str] = {}
    for encoding, backend in [(PLAIN, "auto"), *variants]:
        key = PLAIN if encoding == PLAIN else f"{encoding} {backend}"
        if encoding == "none" and backend != "auto":
            whys[key] = "where no encoding speaks in attention, equip leaves it alone"
            continue
        call = run(name, encoding, backend, step, batch, DTYPES[dtype])
        try:
            call()
        except InputError as error:
            whys[key] = str(error)
        else:
            calls[key] = call
    times = interleaved(calls, rounds, seconds)

    def cell(encoding: str, backend: str, key: str) -> dict[str, object]:
        time = times.get(key)
        return {
            "model": name,
            "step": step,
            "dtype": dtype,
            "batch": batch,
            "encoding": encoding,
            "backend": backend,
            "why": whys.get(key),
            "time": time and asdict(time),
            "images_per_second": time and _speed(time, batch),
            "speed_ratio": time and 1 / time.ratio,
        }

    return [cell(PLAIN, PLAIN, PLAIN), *(cell(e, b, f"{e} {b}") for e, b in variants)]


def _speed(time: Time, batch: int) -> float:
    return 1e3 * batch / time.milliseconds


def rows(found: list[dict], backends: list[str], notes: Notes) -> Iterator[list[str]]:
    """Lines of the table for one model and step."""
    plain, *others = found
    head = [plain["model"], plain["step"], plain["dtype"], f"{plain['images_per_second']:.2f}"]
    at = {(cell["encoding"], cell["backend"]): cell for cell in others}
    for encoding in dict.fromkeys(cell["encoding"] for cell in others):
        line = [at[encoding, backend] for backend in backends]
        yield [*head, encoding, *(notes(cell["why"]) if cell["why"] else _said(cell) for cell in line)]
        head = [""] * len(head)


def _said(cell: dict) -> str:
    low, high = (1 / ratio for ratio in reversed(cell["time"]["quartiles"]))
    return f"{cell['speed_ratio']:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = options(str(__doc__), EXAMPLES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="of timm")
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["auto"])
    parser.add_argument("--steps", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--batch", type=int, metavar="N", help="images (default: 8 forward, 4 in training)")
    parser.set_defaults(seconds=6.0)
    asked = parser.parse_args()
    prepare(asked)
    variants = [(encoding, backend) for encoding in asked.encodings for backend in asked.backends]
    notes, lines, results = Notes(), [], []
    for dtype in asked.dtypes:
        for step in asked.steps:
            for name in asked.models:
                print(f"{name}, {step}, {dtype}", file=sys.stderr, flush=True)
                batch = asked.batch or BATCHES[step]
                found = compared(name, step, batch, dtype, variants, asked.rounds, asked.seconds)
                lines += rows(found, asked.backends, notes)
                results += found
    header = ["model", "step", "dtype", "images/s, unequipped", "encoding", *asked.backends]
    about = (
        "Images per second, as ratios to the unequipped model: median (quartiles) over rounds; above 1 is faster."
        " bfloat16 is autocast."
    )
    command = " ".join(["python", "benchmarks/model.py", *sys.argv[1:]])
    write(asked, "Whole models with positions", command, results, Table(header, lines, [about, *notes.lines()]))


if __name__ == "__main__":
    main()
