"""Write the table of encodings into the README; with --check, only say whether it is up to date."""

import sys
from pathlib import Path

from whereformer.catalog import entries

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- encodings -->\n", "<!-- /encodings -->"


def table() -> str:
    lines = ["| name | says | when | source |", "| --- | --- | --- | --- |"]
    for entry in entries():
        moments = ", ".join(entry.moments) or "never"
        lines.append(f"| `{entry.name}` | {entry.formula} | {moments} | {entry.paper} |")
    return "\n".join(lines) + "\n"


def refreshed(text: str) -> str:
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    text = README.read_text()
    if "--check" not in sys.argv:
        README.write_text(refreshed(text))
    elif text != refreshed(text):
        sys.exit("README.md: the table of encodings is out of date; run python docs/tables.py")
