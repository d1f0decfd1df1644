"""How figures look, and how they are written."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from whereformer.lab import record

COLOURS = (
    "#4c4c4c",
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#8c6d31",
    "#7b4fa3",
    "#a0a000",
)

STYLE: dict[Any, Any] = {
    "figure.dpi": 144,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}


def saved(path: Path, figure: Any) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    record.write(path, buffer.getvalue())
    return path


@contextmanager
def canvas(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """A figure that belongs to no window and no global state."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        yield Figure(*args, layout="constrained", **kwargs)


def colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def deviation(curves: np.ndarray) -> np.ndarray:
    """Over the first axis; zero for a single curve."""
    return curves.std(0, ddof=1) if len(curves) > 1 else np.zeros(curves.shape[1:])
