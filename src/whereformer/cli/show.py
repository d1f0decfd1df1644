"""What commands print, and what they need for it."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from whereformer.errors import InputError

WIDTH = 120  # characters of a line where there is no terminal
TEXT = 42  # of a column of text, where columns of numbers would leave less


def make_console() -> Any:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 100)


def print_table(header: Sequence[str], lines: Sequence[Sequence[str]], *, text: int = 1) -> None:
    """To stdout; the first columns hold `text`, which may be folded, the others numbers."""
    needs("rich")
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_lines=text == len(header)
    )
    for i, title in enumerate(header):
        if i < text:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    columns = list(zip(header, *lines, strict=True))[text:]
    numbers = sum(2 + max(len(part) for cell in cells for part in cell.split("\n")) for cells in columns)
    width = None if sys.stdout.isatty() else max(WIDTH, TEXT * text + numbers)
    Console(highlight=False, markup=False, width=width).print(table)


def print_facts(title: str, facts: dict[str, str]) -> None:
    """With rich if it is there, and without."""
    if find_spec("rich") is None:
        print(f"\n{title}")
        for name, said in facts.items():
            print(f"  {name:{max(16, *map(len, facts))}}  {said}")
        return
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    console.print(Text(f"\n{title}", style="bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=18)
    table.add_column(overflow="fold")
    for name, said in facts.items():
        table.add_row(f"  {name}", said)
    console.print(table)


def shortened(lines: Sequence[str], most: int = 8, width: int = 300) -> str:
    cut = [line if len(line) <= width else f"{line[:width]} ..." for line in lines[:most]]
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([*cut, *more])


LAB = ("accelerate", "matplotlib", "rich", "safetensors", "scipy", "sklearn", "timm", "torchvision")
DETECT = (*LAB, "faster_coco_eval", "transformers", "yaml")


def needs_lab() -> None:
    needs(*LAB)


def needs_detect() -> None:
    needs(*DETECT, extra="detect")


def needs(*packages: str, extra: str = "lab") -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InputError(f'{", ".join(missing)} missing: pip install "whereformer[{extra}]"')
