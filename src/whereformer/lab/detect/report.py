"""What a comparison in detection shows, and what it does not: rows of the paper's Table 6, over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whereformer.lab import record
from whereformer.lab.detect import figures
from whereformer.lab.detect.evaluate import ROW
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.load import Detection
from whereformer.lab.detect.results import RECALLS, SIZES
from whereformer.lab.differences import Difference, Spread, about_intervals, against
from whereformer.lab.page import page
from whereformer.lab.pool import Task
from whereformer.lab.record import Run

SHOWN = (*ROW, *RECALLS)


@dataclass(frozen=True)
class Row:
    """One encoding, over seeds; numbers in %, None where there is nothing to find.

    Args:
        encoding: its text.
        APs: of each seed.
        scores: AP, AP50 ... of all categories.
        difference: of AP, to the baseline's; None for the baseline, and where there is no AP.
        per_category: AP of each.
        seconds: of training, mean over seeds.
    """

    encoding: str
    APs: list[float | None]
    scores: dict[str, Spread | None]
    difference: Difference | None
    per_category: dict[str, Spread | None]
    seconds: float


@dataclass(frozen=True)
class DetectionComparison:
    """Rows, what they say in sentences, and the folder that all lies in."""

    experiment: DetectionExperiment
    rows: list[Row]
    boxes: dict[str, int]
    sentences: list[str]
    reports: list[dict[str, Any]]
    out: Path

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out)}

    def table(self) -> list[list[str]]:
        """The header and a line of text cells for each encoding."""
        header = ["encoding", "AP", "minus base\n± 95 % CI", *SHOWN[1:]]
        lines = [
            [
                row.encoding,
                _cell(row.scores["AP"]),
                "base" if row.encoding == self.experiment.baseline else _cell(row.difference),
                *(_cell(row.scores[name]) for name in SHOWN[1:]),
            ]
            for row in self.rows
        ]
        return [header, *lines]

    def by_category(self) -> list[list[str]]:
        """The header and a line for each category: AP with each encoding."""
        header = ["category", "boxes", *(row.encoding for row in self.rows)]
        lines = [
            [name, f"{count:,}", *(_cell(row.per_category[name]) for row in self.rows)]
            for name, count in self.boxes.items()
        ]
        return [header, *lines]


def report(
    experiment: DetectionExperiment, out: Path, data: Detection, runs: Mapping[Task, Run]
) -> DetectionComparison:
    """Reads the finished runs and writes comparison.json, figures/ and report.html into `out`."""
    results = {task: run.result() or {} for task, run in runs.items()}
    metrics = {task: result["metrics"] for task, result in results.items()}
    rows = _rows(experiment, results)
    first = next(iter(metrics.values()))
    comparison = DetectionComparison(
        experiment,
        rows,
        {name: one["boxes"] for name, one in first["per_category"].items()},
        sentences(experiment, rows, len(data.validation), data.held_out),
        [one.to_dict() for one in data.reports],
        out,
    )
    record.write_json(out / "comparison.json", comparison.to_dict())
    drawn = figures.draw(experiment, out, data, runs)
    tables = [comparison.table(), comparison.by_category()]
    said = [*comparison.sentences, *(line for one in data.reports for line in one.lines())]
    title = f"Position encodings in detection, on {experiment.data}"
    record.write(out / "report.html", page(title, tables, said, drawn, experiment.to_json()))
    return comparison


def _rows(experiment: DetectionExperiment, results: Mapping[Task, Any]) -> list[Row]:
    rows = []
    for encoding in experiment.encodings:
        of_seeds = [results[encoding, seed] for seed in experiment.seeds]
        metrics = [result["metrics"] for result in of_seeds]
        per_category = metrics[0]["per_category"]
        rows.append(
            Row(
                encoding,
                [_percent(one["AP"]) for one in metrics],
                {name: _spread([one[name] for one in metrics]) for name in SHOWN},
                None,
                {name: _spread([one["per_category"][name]["AP"] for one in metrics]) for name in per_category},
                sum(result["seconds"] for result in of_seeds) / len(of_seeds),
            )
        )
    base = next(row.APs for row in rows if row.encoding == experiment.baseline)
    return [_compared(row, base) if row.encoding != experiment.baseline else row for row in rows]


def _compared(row: Row, base: Sequence[float | None]) -> Row:
    values, others = ([ap for ap in aps if ap is not None] for aps in (row.APs, base))
    if len(values) != len(row.APs) or len(others) != len(base):
        return row
    return replace(row, difference=Difference.of(values, others, 0.0))


def sentences(experiment: DetectionExperiment, rows: Sequence[Row], images: int, held_out: bool) -> list[str]:
    """What the table shows and what it does not, read off the rows."""
    differences = {row.encoding: row.difference for row in rows if row.difference is not None}
    base, seeds = experiment.baseline, len(experiment.seeds)
    held = ", which were held out of the only set there is" if held_out else ""
    return [
        *against(base, differences, seeds),
        f"AP, in %, is that after the last epoch on {images:,} images{held}: one data set, one model, one recipe;"
        " how the order comes out with others is not shown." + about_intervals(base, differences, seeds),
        SIZES[experiment.areas],
    ]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _spread(values: Sequence[float | None]) -> Spread | None:
    there = [100 * value for value in values if value is not None]
    return Spread.of(there) if len(there) == len(values) else None


def _cell(value: object) -> str:
    return "–" if value is None else str(value)
