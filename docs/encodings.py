"""Write a page and a picture for each encoding, and an index; with --check, only say whether they are up to date.

Pictures are not compared: torch's random numbers and roundings may differ from one machine to another.
"""

import argparse
import inspect
import sys
from itertools import groupby
from pathlib import Path

from tables import escaped, table

from whereformer import encodings, layers
from whereformer.catalog import CATALOG
from whereformer.encoding import PositionEncoding
from whereformer.facts import EVERYWHERE, FAMILY, MODEL, SIZES, Entry, docstring, entries, in_words, paragraphs
from whereformer.lab.pictures import Picture, gallery, picture, svg

FOLDER = Path(__file__).parent / "encodings"


def page(entry: Entry, shown: Picture) -> str:
    """The page of one encoding."""
    words = docstring(CATALOG[entry.name])
    cls = CATALOG[entry.name]
    parts = [
        f"# {entry.name}",
        f"{escaped(entry.paper)}. [Code]({code(cls)}) · [All encodings](README.md)",
        f"```text\n{entry.formula}\n```",
        f"![{entry.name}: {alternative(shown)}]({entry.name}.svg)",
        f"<sub>{shown.caption}</sub>",
        "## What it is",
        *(prose(kept, text) for kept, text in paragraphs(words.body)),
    ]
    if entry.options:
        parts += ["## Options", table(["option", "default", "meaning"], option_rows(entry, words.options))]
    for title, text in words.sections.items():
        parts.append(f"**{title}.** {escaped(' '.join(text.split()))}")
    parts += [
        "## Facts",
        table(["", ""], [[name, escaped(said)] for name, said in in_words(entry).items()]),
        "## Use",
        f"```python\n{usage(entry, cls.__name__)}\n```",
    ]
    return "\n\n".join(parts).replace("docs/rotary.md", "[Rotary encodings](../rotary.md)") + "\n"


def code(cls: type) -> str:
    return f"../../src/{cls.__module__.replace('.', '/')}.py"


def alternative(shown: Picture) -> str:
    return "; ".join(escaped(row.title) for row in shown.rows)


def option_rows(entry: Entry, said: dict[str, str]) -> list[list[str]]:
    meaning = {name: text for names, text in said.items() for name in names.split(", ")}
    return [
        [f"`{name}`", f"`{default!r}`", cell(meaning.get(name, ""))] for name, default in entry.options.items()
    ]


def cell(text: str) -> str:
    """Text within a table: one line."""
    pieces = []
    for kept, paragraph in paragraphs(text):
        pieces += [f"`{line}`" for line in paragraph.split("\n")] if kept else [escaped(paragraph)]
    return "<br>".join(pieces).replace("|", "\\|")


def prose(kept: bool, text: str) -> str:
    if not kept:
        return escaped(text)
    lines = text.split("\n")
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "```text\n" + "\n".join(line[indent:] for line in lines) + "\n```"


def usage(entry: Entry, cls: str) -> str:
    lines = [
        "import timm, torch, whereformer",
        "from whereformer import Grid",
        f"from whereformer.encodings import {cls}",
        "",
        'model = timm.create_model("vit_tiny_patch16_224")',
        f'whereformer.equip(model, "{entry.name}")',
        "",
        "grid = Grid(height=9, width=13, prefix=1)",
        f"encodings = [{cls}(dim=96, num_heads=3, grid=grid)]",
    ]
    if CATALOG[entry.name].at_block is not PositionEncoding.at_block:
        lines.append("encodings[0].at_block(0, depth=12)  # equip does so for each block")
    if "tokens" in entry.moments or not entry.moments:
        lines.append("x = whereformer.encode(torch.randn(2, grid.tokens, 96), grid, encodings)")
    if entry.moments != ("tokens",):
        lines += [
            "q, k, v = torch.randn(3, 2, 3, grid.tokens, 32)",
            "out = whereformer.attention(q, k, v, grid, encodings)",
        ]
    return "\n".join(lines)


def overview(family: str) -> str:
    """The file that shows a family."""
    return f"family-{family}.svg"


def drawings(found: list[Entry], pictures: dict[str, Picture]) -> dict[str, str]:
    drawn = {f"{name}.svg": svg(shown, f"{name}: what it does to a grid") for name, shown in pictures.items()}
    for family, members in groupby(found, key=lambda one: one.family):
        shown = {one.name: pictures[one.name] for one in members}
        drawn[overview(family)] = gallery(shown, f"{family} encodings, seen from the centre of a grid")
    return drawn


def index(found: list[Entry]) -> str:
    parts = [
        "# Encodings",
        "Each page has the equations, the options, what it costs, and a picture of what it does to a grid."
        " `whereformer list` shows the same in a terminal.",
        "The pictures of families show each encoding seen from the patch in the centre, on a scale of its own: the"
        " first map of its page.",
        "## Letters",
        *(prose(kept, text) for kept, text in paragraphs(inspect.cleandoc(encodings.__doc__ or ""))),
    ]
    for family, members in groupby(found, key=lambda one: one.family):
        rows = [
            [
                f"[`{one.name}`]({one.name}.md)",
                escaped(one.formula),
                f"{one.parameters:,}" if one.parameters else "–",
                f"{one.macs / 1e6:,.1f}" if one.macs else "–",
                one.sizes.replace(" ", "\u00a0"),
                "yes" if one.crosses else "–",
                "yes" if one.video else "–",
            ]
            for one in members
        ]
        header = ["", "says", "parameters", "MACs, M", "other grids", "two grids", "video"]
        parts += [
            f"## {family.capitalize()}",
            f"They {FAMILY[family]}.",
            f"![What they say, seen from the centre]({overview(family)})",
            table(header, rows),
        ]
    rows = []
    for name in layers.__all__:
        layer = getattr(layers, name)
        first = paragraphs(inspect.cleandoc(layer.__doc__))[0][1]
        rows.append([f"[`{name}`]({code(layer)})", escaped(first)])
    parts += [
        "## Attention of their own",
        "What no form can say: see [Layers](../layers.md).",
        table(["", "is"], rows),
    ]
    used = [sizes for sizes in SIZES if any(one.sizes == sizes for one in found)]
    parts += [
        "## How to read it",
        f"Parameters and multiply-adds (MACs, per image) are all that a {MODEL} at 224 pixels gets, with default"
        " options. On other grids than the one it was built for, an encoding is",
        "\n".join(f"- **{sizes}**: {SIZES[sizes]}" for sizes in used),
        f"{EVERYWHERE} [Grids, packs, padding and windows](../places.md) tells more.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    found = entries()
    pictures = {one.name: picture(CATALOG[one.name]) for one in found}
    pages = {f"{one.name}.md": page(one, pictures[one.name]) for one in found} | {"README.md": index(found)}
    images = drawings(found, pictures)
    if check:
        there = {path.name for path in FOLDER.iterdir()}
        stale = {name for name, text in pages.items() if name in there and (FOLDER / name).read_text() != text}
        if wrong := sorted(stale | there ^ {*pages, *images}):
            sys.exit(f"docs/encodings: {', '.join(wrong)} out of date; run python docs/encodings.py")
        return
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.iterdir():
        path.unlink()
    for name, text in (pages | images).items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
