"""whereformer list: the encodings."""

import argparse
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from whereformer.cli.show import make_console, needs

EXAMPLES = """\
examples:
  whereformer list
      every encoding in a few words
  whereformer list irpe
      one encoding in full: its equations, its options, what it costs, what it does to a grid
  whereformer list "irpe(method='cross', on='qkv')"
  whereformer list --json
"""


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("encoding", nargs="?", metavar="NAME", help="show one in full, options and all")


def list_encodings(options: argparse.Namespace) -> None:
    """list the encodings: what they say, what they cost, where they work; or show one in full"""
    from whereformer.facts import entries, entry

    if options.encoding is None:
        found = entries()
        if options.json:
            print(json.dumps([one.to_dict() for one in found], indent=2))
        else:
            _print_entries(found)
    elif options.json:
        print(json.dumps(entry(options.encoding).to_dict(), indent=2))
    else:
        _print_entry(options.encoding)


def _print_entries(found: Sequence[Any]) -> None:
    """A table for each family."""
    needs("rich")
    from rich.table import Table
    from rich.text import Text

    from whereformer.catalog import MODULES
    from whereformer.facts import EVERYWHERE, FAMILY, MODEL, SIZES

    console = make_console()
    numbers = {"params": 6, "MACs": 5}
    widths = numbers | {"other\ngrids": 9, "two\ngrids": 5, "video": 5}
    name = max(len(one.name) for one in found)
    left = console.width - sum(widths.values()) - 2 * len(widths)
    narrow = left < name + 2 + 30  # then the name stands above what is said, not beside it
    says = max(30, left if narrow else left - name - 2)

    def table(*, header: bool = False) -> Table:
        made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=header)
        if not narrow:
            made.add_column("\nname", width=name)
        made.add_column("\nsays", width=says)
        for title, width in widths.items():
            justify = "right" if title in numbers else "left"
            made.add_column(title if "\n" in title else f"\n{title}", width=width, justify=justify)
        return made

    console.print(table(header=True))
    for family, members in groupby(found, key=lambda one: one.family):
        console.print(
            Text(f"\n{family.upper()}", style="bold").append(f"  {FAMILY[family]}", style="not bold italic")
        )
        rows = table()
        for one in members:
            title = Text(one.name, style="bold")
            said = Text(one.formula).append(f"\n{one.source} · {' + '.join(one.said) or 'nothing'}", style="dim")
            counts = (_short(one.parameters), _short(one.macs))
            ticks = ("yes" if yes else "–" for yes in (one.crosses, one.video))
            first = [title.append("\n").append_text(said)] if narrow else [title, said]
            rows.add_row(*first, *counts, one.sizes, *ticks)
        console.print(rows)
    console.print(f"\nparams, MACs: all that a {MODEL} at 224 pixels gets; MACs per image.\nother grids:")
    for sizes in SIZES:
        if any(one.sizes == sizes for one in found):
            console.print(f"  {sizes:10} {SIZES[sizes]}")
    console.print(f"{EVERYWHERE}\nAttention modules with positions of their own: {', '.join(MODULES.values())}.")
    console.print("One in full: whereformer list NAME")


def _print_entry(text: str) -> None:
    needs("rich")
    from rich.table import Table
    from rich.text import Text

    from whereformer.catalog import parse
    from whereformer.facts import docstring, entry, in_words, paragraphs
    from whereformer.lab.pictures import picture, shown

    one, (factory,) = entry(text), parse(text)
    words = docstring(factory.func)  # pyright: ignore[reportArgumentType]
    console = make_console()
    console.print(Text(one.name, style="bold").append(f"   {one.family}", style="not bold dim"))
    console.print(Text(f"\n{one.formula}", style="bold"))
    for kept, paragraph in paragraphs(words.body):
        console.print()
        console.print(paragraph, soft_wrap=kept)
    for title, rows in (
        ("options", {_options(names, one.options): said for names, said in words.options.items()}),
        ("facts", {title.lower(): said for title, said in words.sections.items()} | in_words(one)),
        ("source", {"": one.paper}),
    ):
        if not rows:
            continue
        console.print(Text(f"\n{title}", style="bold"))
        table = Table.grid(padding=(0, 2))
        for name, said in rows.items():
            table.add_row(
                *[f"  {name}".replace("\n", "\n  ")] * bool(name), "\n".join(t for _, t in paragraphs(said))
            )
        console.print(table)
    if console.is_terminal and console.color_system is not None:
        console.print()
        console.print(shown(picture(factory), console.width))


def _options(names: str, options: dict[str, object]) -> str:
    return "\n".join(f"{name}={options[name]!r}" if name in options else name for name in names.split(", "))


def _short(count: int) -> str:
    """
    >>> [_short(count) for count in (0, 384, 75_648, 45_388_800)]
    ['–', '384', '76 k', '45 M']
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.{1 if count < 9.95 * size else 0}f} {unit}"
    return str(count) if count else "–"
