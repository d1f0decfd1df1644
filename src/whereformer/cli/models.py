"""whereformer models: what can be attached to timm's architectures."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from whereformer.cli.show import make_console, needs

EXAMPLES = """\
examples:
  whereformer models dinov3
      what can be attached to each of timm's architectures with this in its name
  whereformer models "swinv2_*_256"
  whereformer models
      all of them: more than a thousand are built, without memory for their weights, which takes minutes
  whereformer models vit_ --json
"""


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "pattern", nargs="?", default="", metavar="PATTERN", help="in their names; * and ? are wild"
    )


def models(options: argparse.Namespace) -> None:
    """list timm's architectures: what can be attached to each, what it says itself, on which grid"""
    needs("rich", "timm")
    from rich.console import Console
    from rich.progress import track

    from whereformer.adapters.models import Share, look, names

    stderr = Console(stderr=True, highlight=False)
    asked = names(options.pattern)
    found = [
        look(name)
        for name in track(
            asked, "looking at architectures", console=stderr, transient=True, disable=len(asked) < 2
        )
    ]
    if options.json:
        share = Share.of(found)
        said = {**asdict(share), "percent": round(share.percent, 2)}
        print(json.dumps({**said, "models": [one.to_dict() for one in found]}, indent=2, ensure_ascii=False))
    else:
        _print_architectures(found)


def _print_architectures(found: Sequence[Any]) -> None:
    """A table for each family; those without attention over a grid are counted, or named if they are few."""
    from rich.table import Table
    from rich.text import Text

    from whereformer.adapters.models import Share

    console = make_console()
    families: dict[str, list[Any]] = {}
    for one in found:
        families.setdefault(one.family, []).append(one)
    for family, members in families.items():
        known = [one for one in members if one.equips]
        widest = max((len(one.name) for one in known), default=0)
        if known:
            console.print(Text(f"\n{family}", style="bold underline"))
        for (own, why), group in groupby(known, key=lambda one: (one.own, one.why)):
            console.print(Text(f"says itself: {own or 'nothing'}" + f"; {why}" * bool(why), style="dim"))
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
            table.add_column("", width=widest, no_wrap=True)
            for title in ("tokens", "q, k", "logits", "values"):
                table.add_column(title)
            table.add_column("grid", justify="right", no_wrap=True, min_width=11)
            table.add_column("heads", justify="right", no_wrap=True, min_width=8)
            for one in group:
                takes = ({"all": "yes"}.get(taken, taken) or "–" for taken in one.takes.values())
                grid = f"{one.prefix} + " * bool(one.prefix) + "{} x {}".format(*one.grid)
                table.add_row(Text(one.name, style="bold"), *takes, grid, f"{one.heads} x {one.head_dim}")
            console.print(table)
    left = [one for one in found if not one.equips]
    if left:
        console.print(Text("\nnothing can be attached to", style="bold underline"))
        reasons: dict[tuple[str, str], list[str]] = {}
        for one in left:
            reasons.setdefault((one.why, one.family), []).append(one.name)
        for (why, family), members in sorted(reasons.items()):
            several = f"{len(members)} of {family}" if len(members) > 3 else ", ".join(members)
            console.print(f"  {several}: {why}")
    console.print(f"\n{Share.of(found)}")
