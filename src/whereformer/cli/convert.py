"""whereformer convert: a checkpoint in other names."""

import argparse
import json
import re
from pathlib import Path

from whereformer.cli import inspect
from whereformer.cli.show import needs, shortened

EXAMPLES = """\
examples:
  whereformer convert dinov2_vitb14_reg4_pretrain.pth --out dinov2.safetensors
      timm's names; what is only renamed stays to the bit
  whereformer convert deit_tiny_patch16_224_ctx_product_50_shared_k.pth --out irpe.safetensors --to ours
      the names of a timm model after whereformer.equip
  whereformer convert dinov2.safetensors --out official.safetensors --to dinov2-reg
  whereformer convert sharded/model.safetensors.index.json --out one.safetensors --shard 5GB

The new file is whole or not there. docs/checkpoints.md lists the layouts.
"""


def arguments(command: argparse.ArgumentParser) -> None:
    inspect.arguments(command)
    command.add_argument("--out", type=Path, required=True, metavar="NEW.safetensors")
    command.add_argument(
        "--to",
        default="timm",
        metavar="LAYOUT",
        help="timm (the default), ours (after equip), or an official one",
    )
    command.add_argument("--shard", type=_bytes, default="5GB", metavar="SIZE", help="the largest file (5GB)")


def convert(options: argparse.Namespace) -> None:
    """write a checkpoint as safetensors, in timm's names or another layout's, whole or not at all"""
    needs("rich", "safetensors", "timm")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from whereformer.adapters.convert import plan

    planned = plan(options.checkpoint, to=options.to, part=options.part)
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=planned.bytes)
        files = planned.write(options.out, shard=options.shard, done=lambda count: bar.advance(task, count))
    if options.json:
        print(json.dumps({**planned.to_dict(), "files": [str(file) for file in files]}, indent=2))
        return
    for line in planned.lines():
        print(line)
    model = planned.models[0] if planned.models else None
    print(
        f"\n{planned.layout.name if planned.layout else 'timm'} -> {planned.to}: {len(planned.entries)} tensors,"
        f" {planned.bytes / 1e6:,.1f} MB, {len(planned.steps)} changes; written: {', '.join(map(str, files))}"
    )
    if model and not model.fits:
        print(f"It fits no timm model as it is; nearest is {model}:\n{shortened(model.problems)}")
    elif model:
        print(f"It fits {model}")


def _bytes(text: str) -> int:
    """
    >>> _bytes("5GB"), _bytes("200 MB"), _bytes("1e3")
    (5000000000, 200000000, 1000)
    """
    found = re.fullmatch(r"([0-9.e+]+)\s*([GMK]?)B?", text.strip(), re.IGNORECASE)
    try:
        size = int(float(found[1]) * {"G": 10**9, "M": 10**6, "K": 10**3}.get(found[2].upper(), 1)) if found else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a size such as 5GB")
    return size
