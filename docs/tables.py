"""Write the table of encodings into the README; with --check, only say whether it is up to date."""

import re
import sys
from pathlib import Path

from whereformer.catalog import FAMILIES
from whereformer.facts import FAMILY, authors

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- encodings -->\n", "<!-- /encodings -->"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, but for what stands in backticks."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_\[\]<>|~#$])", r"\\\1", p) for p in parts)


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def families() -> str:
    parts = []
    for family, names in FAMILIES.items():
        rows = [
            [
                f"[`{name}`](docs/encodings/{name}.md)",
                escaped(cls.formula),
                authors(cls.paper).replace(" ", "\u00a0"),
            ]
            for name, cls in names.items()
        ]
        if not names:
            continue
        parts.append(f"**{family.capitalize()}** ({FAMILY[family]})")
        parts.append(table(["name", "says", "source"], rows))
    return "\n\n".join(parts) + "\n"


def refreshed(text: str) -> str:
    before, rest = text.split(START)
    return before + START + families() + END + rest.split(END)[1]


if __name__ == "__main__":
    text = README.read_text()
    if "--check" not in sys.argv:
        README.write_text(refreshed(text))
    elif text != refreshed(text):
        sys.exit("README.md: the table of encodings is out of date; run python docs/tables.py")
