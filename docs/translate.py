"""Write the table of losses into translate.md; with --check, only say whether it is up to date."""

import sys
from pathlib import Path

import torch

from whereformer import Grid, PositionEncoding, parse
from whereformer.translation import translate

PAGE = Path(__file__).with_name("translate.md")
START, END = "<!-- losses -->\n", "<!-- /losses -->"
GRID = Grid(8, 8, prefix=1)
PAIRS = [
    ("swin", "beit"),
    ("swin", "irpe(mode='bias', shared=False)"),
    ("swin", "irpe(mode='bias', shared=False, ratio=1.5)"),
    ("swin", "irpe(mode='bias', shared=False, method='cross', ratio=20)"),
    ("swin", "irpe(mode='bias', shared=False, method='euclidean', ratio=20)"),
    ("swin", "irpe(mode='bias')"),
    ("swin", "levit"),
    ("swin", "t5"),
    ("decomposed", "irpe(method='cross', ratio=20)"),
    ("decomposed", "irpe"),
    ("decomposed", "vit_relative"),
    ("sincos2d", "vit2d"),
    ("sincos2d", "learned"),
    ("rope_axial", "rope_mixed"),
]


def smooth(encoding: PositionEncoding) -> PositionEncoding:
    """Tables like trained ones: they fall with distance, more to one side, and differ by head or by feature."""
    for parameter in encoding.parameters():
        axes = 2 if parameter.ndim == 3 else 1
        places = parameter.shape[1:] if axes == 2 else parameter.shape[:1]
        at = torch.stack(torch.meshgrid(*(torch.arange(n) - n // 2 for n in places), indexing="ij"), -1).double()
        count = parameter.shape[0] if axes == 2 else parameter.shape[1]
        numbers = torch.arange(1, count + 1).double()
        fall = -at.norm(dim=-1)[..., None] / numbers.sqrt()
        table = fall + (at[..., :1] / 3 + numbers).sin()
        parameter.data.copy_(table.movedim(-1, 0) if axes == 2 else table)
    return encoding


def losses() -> str:
    lines = ["| from | to | lost |", "| --- | --- | --- |"]
    for names in PAIRS:
        torch.manual_seed(0)
        (source,), (target,) = (parse(name) for name in names)
        found = translate(smooth(source(48, 3, GRID).double()), target(48, 3, GRID).double())
        lines.append(f"| `{names[0]}` | `{names[1]}` | {100 * found.lost:.1f} % |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    before, rest = text.split(START)
    new = before + START + losses() + END + rest.split(END)[1]
    if "--check" not in sys.argv:
        PAGE.write_text(new)
    elif text != new:
        sys.exit("docs/translate.md: the table of losses is out of date; run python docs/translate.py")
