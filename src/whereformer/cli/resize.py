"""whereformer resize: a checkpoint at another size."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whereformer.cli.arguments import count
from whereformer.cli.show import needs, print_table
from whereformer.errors import InputError
from whereformer.resample import RECIPES

EXAMPLES = """\
examples:
  whereformer resize vit_base_224.safetensors --to 384 --out vit_base_384.safetensors
  whereformer resize dinov2_vits14.pth --to 672x1022 --recipe dinov2 --out dinov2_672x1022.safetensors
      height x width
  whereformer resize swin_tiny_224.pth --from 224 --to 384 --window 12 --out swin_tiny_384.pth
  whereformer resize flexivit.safetensors --to 240 --new-patch 8 --out flexivit_8.safetensors

Everything that is no table of places or offsets stays to the bit. Load the result into a model that is built for
the new size; or resize the model, with whereformer.resize in Python.
"""


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", metavar="CKPT", help="a file, a folder, or owner/name on the hub")
    command.add_argument(
        "--to", type=_size, required=True, metavar="PIXELS", help="384, or 672x1022: height x width"
    )
    command.add_argument(
        "--out", type=Path, required=True, metavar="NEW", help="the file to write, of either kind"
    )
    command.add_argument(
        "--from", type=_size, metavar="PIXELS", dest="from_", help="what the weights are for, if they do not tell"
    )
    command.add_argument("--patch", type=_size, metavar="PIXELS", help="of the patch embedding (its stride)")
    command.add_argument("--new-patch", type=_size, metavar="PIXELS", help="if that is to change (FlexiViT)")
    command.add_argument(
        "--window", type=_size, metavar="PATCHES", help="new windows of a Swin; without, they stay"
    )
    command.add_argument("--recipe", choices=sorted(RECIPES), help="without: as the library of the weights does")


def resize(options: argparse.Namespace) -> None:
    """resize a checkpoint to images of another size: its tables of places and offsets, and patch kernels"""
    needs("rich", "safetensors")
    from rich.console import Console
    from rich.progress import Progress

    from whereformer.adapters.resize_weights import Plan, plan, resize_file, spelled

    if options.patch is None and options.new_patch is not None:
        raise InputError(f"new_patch={options.new_patch}, expected --patch too: from which size")

    def planned(weights: Any) -> Plan:
        found = plan(
            weights,
            options.to,
            home_size=options.from_,
            patch_size=options.patch,
            new_patch_size=options.new_patch,
            window=options.window,
            recipe=options.recipe,
        )
        progress.update(task, total=(progress.tasks[0].total or 0) + sum(_bytes(w) for w in weights.values()))
        return found

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("resizing", total=None)
        done = resize_file(options.checkpoint, options.out, planned, lambda count: progress.advance(task, count))
    if options.json:
        print(json.dumps(done.to_dict() | {"out": str(options.out)}, indent=2))
        return
    lines = [
        [old.name, old.kind, _sizes(old.shape), _sizes(new.shape), spelled(old.recipe_for(done.recipe))]
        for old, new in done.moves
    ]
    print_table(["table", "over", "was", "is", "recipe"], _together(lines), text=5)
    for key in done.dropped:
        print(f"dropped {key}: it follows from the size")
    print(f"{options.out}: for images of {_sizes(done.new.image)}, everything else as in {options.checkpoint}")


def _bytes(weight: Any) -> int:
    return math.prod(weight.shape) * weight.dtype.itemsize


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _together(lines: Sequence[list[str]]) -> list[list[str]]:
    """Lines that differ in the numbers of blocks alone, as one."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name, *rest in lines:
        groups.setdefault((re.sub(r"\d+", "N", name), *rest), []).append([name, *rest])
    return [
        [members[0][0] + (f" ... {members[-1][0]} ({len(members)})" if len(members) > 1 else ""), *members[0][1:]]
        for members in groups.values()
    ]


def _size(text: str) -> tuple[int, int]:
    numbers = text.split("x")
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number, or HEIGHTxWIDTH")
    height, width = count(numbers[0]), count(numbers[-1])
    return height, width
