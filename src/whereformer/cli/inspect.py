"""whereformer inspect: what a checkpoint holds."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whereformer.cli.show import needs, print_facts, shortened

EXAMPLES = """\
examples:
  whereformer inspect deit_small_patch16_224_ctx_product_50_shared_k.pth
      whose names these are, which model they fit, which encodings it has; no weights are read
  whereformer inspect folder/of/a/model --json
  whereformer inspect owner/name@revision
      on the Hugging Face hub
  whereformer inspect last.pth --part model_ema
"""


UNKNOWN = "the file does not say it: what its encodings learn is below"


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", metavar="CKPT", help="a file, a folder, or owner/name on the hub")
    command.add_argument("--part", metavar="NAME", help="which state dict, if the file holds several")


def inspect(options: argparse.Namespace) -> None:
    """say what a checkpoint holds: layout, model, encodings, grid, what does not fit; no weights are read"""
    needs("rich", "safetensors", "timm")
    from whereformer.adapters import inspect as look

    found = look(options.checkpoint, part=options.part)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    layout, best = found.layout, next(iter(found.models), None)
    own = "of an equipped model" if found.equipped else "timm's, or none of the known"
    facts = {
        "layout": f"{layout.name}: {layout.source}" if layout else own,
        "encoding": found.encoding if found.encoding != "unknown" else UNKNOWN,
        "grid": f"{found.grid[0]} x {found.grid[1]}" if found.grid else "not told by its tables",
        "prefix tokens": f"{found.prefix_tokens}, of which {found.prefix_rows} have rows in the position table",
        "resized as": found.resize,
        "parameters": f"{found.parameters:,}, {found.bytes / 1e6:,.1f} MB",
        "dtypes": ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items()),
    }
    if found.part:
        others = f" (also there: {', '.join(found.others)}; see --part)" if found.others else ""
        facts["part"] = found.part + others
    if layout and layout.note:
        facts["note"] = layout.note
    print_facts(found.source, facts)
    exact = [str(match) for match in found.models if match.fits]
    if exact:
        print_facts("timm model", {"fits": "\n".join(exact)})
    elif best:
        print_facts("timm model", {"nearest": str(best), "does not fit": shortened(best.problems)})
    elif layout:
        print_facts("timm model", {"fits": "none: it is not of timm"})
    if found.tables:
        print_facts("tables", dict(_tables(found.tables)))
    if found.encodings:
        print_facts("what encodings learn", dict(_encodings(found.encodings)))
    if found.dropped:
        print_facts("left out by convert", {"": shortened([", ".join(found.dropped)])})


def _tables(tables: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """One line for all tables of a kind and size."""
    same: dict[tuple[Any, ...], list[Any]] = {}
    for table in tables:
        same.setdefault((table.kind, table.shape, table.grid), []).append(table)
    for (kind, shape, grid), alike in same.items():
        of = " x ".join(map(str, grid)) if grid else "a grid that is not told"
        more = f" ... {alike[-1].name} ({len(alike)})" if len(alike) > 1 else ""
        rows = f", {alike[0].prefix} rows of prefix tokens" if alike[0].prefix else ""
        yield alike[0].name + more, f"{kind}, {' x '.join(map(str, shape))}, of {of}{rows}"


def _encodings(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """One line for those that differ in the numbers of blocks alone."""
    same: dict[tuple[Any, ...], list[str]] = {}
    for name, shape in shapes.items():
        where, _, what = f".{name}".partition(".encodings.")
        same.setdefault((re.sub(r"\d+", "N", where), what, shape), []).append(name)
    for (_, _, shape), names in same.items():
        more = f" ... {names[-1]} ({len(names)})" if len(names) > 1 else ""
        yield names[0] + more, " x ".join(map(str, shape))
