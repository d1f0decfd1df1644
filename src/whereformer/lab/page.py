"""A report as one HTML file."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

Table = Sequence[Sequence[str]]  # a header, and lines


def page(
    title: str, tables: Sequence[Table], sentences: Sequence[str], figures: Mapping[str, Path], experiment: str
) -> str:
    """All of it; `figures` maps captions to PNG files, which go inside."""
    images = "\n".join(
        f"<figure><img alt='' src='data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}'>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, path in figures.items()
    )
    return _PAGE.format(
        title=html.escape(title),
        tables="\n".join(map(_table, tables)),
        sentences="\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences),
        figures=images,
        experiment=html.escape(experiment),
    )


def _table(table: Table) -> str:
    header, *lines = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f"<div><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.6rem; font-weight: 600 }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .35rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd }}
th {{ white-space: normal; vertical-align: bottom; font-weight: 600; border-bottom-color: #888 }}
th:first-child, td:first-child {{ text-align: left; font-family: ui-monospace, monospace; font-size: .9em }}
figure {{ margin: 2.5rem 0 }}
img {{ max-width: 100% }}
figcaption {{ color: #555; max-width: 48rem }}
pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .85rem }}
</style>
<h1>{title}</h1>
{tables}
{sentences}
{figures}
<h2>Experiment</h2>
<pre>{experiment}</pre>
</html>
"""
