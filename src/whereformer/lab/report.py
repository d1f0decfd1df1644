"""What a comparison shows, and what it does not: the numbers, the sentences, the table and the page."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from whereformer.lab import plots, record
from whereformer.lab.data import Data
from whereformer.lab.experiment import Experiment
from whereformer.lab.pool import Task
from whereformer.lab.record import Run

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with the standard deviation, which one seed alone does not have."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + ("" if self.sd is None else f" ± {self.sd:.1f}")


@dataclass(frozen=True)
class Difference:
    """A mean difference over paired seeds, and half the width of its confidence interval (None for one seed)."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float], baseline: Sequence[float], finest: float) -> "Difference":
        """Student's t on differences, seed by seed; no narrower than the `finest` difference there can be."""
        from scipy.stats import t

        differences = [value - base for value, base in zip(values, baseline, strict=True)]
        middle, count = mean(differences), len(differences)
        if count < 2:
            return cls(middle, None)
        half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * stdev(differences) / count**0.5
        return cls(middle, max(half, finest))

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is above or below zero; 0 if it is not, or if there is none."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" + ("" if self.half is None else f" ± {self.half:.1f}")


@dataclass(frozen=True)
class Row:
    """One encoding. Accuracies in %, differences in percentage points."""

    encoding: str
    accuracies: list[float]  # after the last epoch, one per seed
    accuracy: Spread
    difference: Difference | None  # to the baseline; None for the baseline itself
    parameters_added: int  # to the model without encoding
    macs: int  # per image
    step_time: float  # relative to the model without encoding
    memory: float  # relative to the model without encoding
    accuracy_by_size: dict[str, Spread]  # image size in pixels -> accuracy


@dataclass(frozen=True)
class Comparison:
    experiment: Experiment
    rows: list[Row]
    sentences: list[str]
    out: Path

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out)}

    def table(self) -> list[list[str]]:
        """The header and one line of text cells per encoding."""
        experiment = self.experiment
        largest = experiment.sizes[-1]
        larger, trained = (f"{n}×{n}" for n in (largest // experiment.patch_size, _grid(experiment)))
        header = [
            "encoding",
            f"accuracy\n{trained}, %",
            "minus base\n± 95 % CI",
            "params\nadded",
            "MACs,\nM",
            "step\ntime",
            "peak\nmemory",
            f"accuracy\n{larger}, %",
        ]
        lines = [
            [
                row.encoding,
                str(row.accuracy),
                "base" if row.difference is None else str(row.difference),
                f"{row.parameters_added:,}",
                f"{row.macs / 1e6:,.2f}",
                f"{row.step_time:.2f}×",
                f"{row.memory:.2f}×",
                str(row.accuracy_by_size[str(largest)]),
            ]
            for row in self.rows
        ]
        return [header, *lines]


def report(
    experiment: Experiment,
    out: Path,
    data: Data,
    runs: Mapping[Task, Run],
    counts: Mapping[str, Mapping[str, int]],
    costs: Mapping[str, Mapping[str, float]],
) -> Comparison:
    """Reads the finished runs and writes comparison.json, figures/ and report.html into `out`."""
    rows = _rows(experiment, runs, counts, costs, finest=100 / data.test_count)
    comparison = Comparison(experiment, rows, sentences(experiment, rows, data.test_count), out)
    record.write_json(out / "comparison.json", comparison.to_dict())
    figures = plots.draw(experiment, out, data, runs)
    record.write(out / "report.html", page(comparison, figures))
    return comparison


def _rows(experiment: Experiment, runs: Mapping[Task, Run], counts: Any, costs: Any, finest: float) -> list[Row]:
    results = {task: run.result() or {} for task, run in runs.items()}
    accuracies = {e: [results[e, seed]["accuracy"] for seed in experiment.seeds] for e in experiment.encodings}
    return [
        Row(
            encoding=encoding,
            accuracies=values,
            accuracy=Spread.of(values),
            difference=None
            if encoding == experiment.baseline
            else Difference.of(values, accuracies[experiment.baseline], finest),
            **counts[encoding],
            **costs[encoding],
            accuracy_by_size={
                str(size): Spread.of(
                    [results[encoding, s]["accuracy_by_size"][str(size)] for s in experiment.seeds]
                )
                for size in experiment.sizes
            },
        )
        for encoding, values in accuracies.items()
    ]


def sentences(experiment: Experiment, rows: Sequence[Row], test_count: int) -> list[str]:
    """What the table shows and what it does not, read off the rows."""
    base, seeds = experiment.baseline, len(experiment.seeds)
    differences = {row.encoding: row.difference for row in rows if row.difference is not None}
    by_sign = {sign: [name for name, d in differences.items() if d.sign == sign] for sign in (1, -1, 0)}
    shown = []
    if differences and seeds == 1:
        shown.append(f"With one seed there are no intervals: any difference to {base!r} may be chance.")
    elif differences:
        parts = [
            f"{_listed(by_sign[sign])} {verdict}"
            for sign, verdict in (
                (1, "came out higher"),
                (-1, "came out lower"),
                (0, "cannot be told apart from it (their intervals include zero)"),
            )
            if by_sign[sign]
        ]
        shown.append(f"Against {base!r}, over {seeds} paired seeds: {'; '.join(parts)}.")
    scope = (
        f"Accuracies are those after the last epoch on {test_count:,} test images: one data set, one model, one"
        " recipe; how the order comes out with others is not shown."
    )
    if differences and seeds > 1:
        scope += (
            " Each interval holds by itself, for the choice of seed and not for that of test images; "
            f"only differences to {base!r} have one."
        )
    return [*shown, scope]


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["peg"]), _listed(["learned", "peg", "irpe"])
    ("'peg'", "'learned', 'peg' and 'irpe'")
    """
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} and {last}" if most else last


def _grid(experiment: Experiment) -> int:
    return experiment.image_size // experiment.patch_size


def page(comparison: Comparison, figures: Mapping[str, Path]) -> str:
    """The whole report as one HTML file; `figures` maps captions to PNG files, which go inside."""
    header, *lines = comparison.table()
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    images = "\n".join(
        f"<figure><img alt='' src='data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}'>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, path in figures.items()
    )
    return _PAGE.format(
        title=html.escape(f"Position encodings on {comparison.experiment.data}"),
        head=head,
        body=body,
        sentences="\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in comparison.sentences),
        figures=images,
        experiment=html.escape(comparison.experiment.to_json()),
    )


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
<div><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
{sentences}
{figures}
<h2>Experiment</h2>
<pre>{experiment}</pre>
</html>
"""
