"""Write the table of timm's families into models.md: of all architectures, which takes minutes.

With a file that `whereformer models --json` wrote, of those in the file.
"""

import json
import re
import sys
from itertools import groupby
from pathlib import Path

from whereformer.adapters.models import Architecture, Share, architectures
from whereformer.catalog import parse, spell

PAGE = Path(__file__).parent / "models.md"
START, END = "<!-- families -->\n", "<!-- /families -->"
BLOCKS = r"(?:^|, )(?:range\(\d+, \d+\)|\d+): "
"""In the text of encodings for some blocks."""
HEADER = ["family", "architectures", "tokens", "q, k", "logits", "values", "says itself"]


def table(found: list[Architecture]) -> str:
    """A row for each family with an architecture that equips, then the share of all."""
    rows = [HEADER, ["---", "--:", *["---"] * 5]]
    attending = sorted((one for one in found if one.equips), key=lambda one: one.family)
    for family, members in groupby(attending, key=lambda one: one.family):
        known = list(members)
        takes = [_yes({one.takes[moment] for one in known if one.takes}) for moment in known[0].takes or ()]
        says = ", ".join(dict.fromkeys(map(_says, known)))
        rows.append([family, str(len(known)), *takes, says])
    missed = "".join(f"\n- {_missed(one)}" for one in found if one.attends and not one.equips)
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{lines}\n\n{Share.of(found)}" + (f" The others:\n{missed}" if missed else "") + "\n"


def _yes(found: set[str]) -> str:
    if found == {"all"}:
        return "yes"
    return "some" if found - {""} else "–"


def _says(one: Architecture) -> str:
    """The names of the encodings that equal what it says itself; or those of its attributes."""
    if not one.equal:
        return f"*{one.own}*" if one.own else "nothing"
    texts = [text for text in re.split(BLOCKS, one.own) if text]
    said = dict.fromkeys(spell(factory).partition("(")[0] for text in texts for factory in parse(text))
    return " + ".join(f"`{name}`" for name in said)


def _missed(one: Architecture) -> str:
    return f"{one.name} ({one.family}): {one.why}"


def refreshed(text: str, found: list[Architecture]) -> str:
    before, rest = text.split(START)
    return before + START + table(found) + END + rest.split(END)[1]


def read(path: str) -> list[Architecture]:
    return [Architecture(**one) for one in json.loads(Path(path).read_text())["models"]]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(refreshed(text, read(sys.argv[1]) if len(sys.argv) > 1 else list(architectures())))
