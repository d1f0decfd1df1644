"""What a comparison shows, and what it does not: the numbers, the sentences and the table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whereformer.lab import plots, record
from whereformer.lab.data import Data
from whereformer.lab.differences import Difference, Spread, about_intervals, against
from whereformer.lab.experiment import Experiment
from whereformer.lab.page import page
from whereformer.lab.pool import Task
from whereformer.lab.record import Run


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
    title = f"Position encodings on {experiment.data}"
    html = page(title, [comparison.table()], comparison.sentences, figures, experiment.to_json())
    record.write(out / "report.html", html)
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
    differences = {row.encoding: row.difference for row in rows if row.difference is not None}
    return [
        *against(experiment.baseline, differences, len(experiment.seeds)),
        f"Accuracies are those after the last epoch on {test_count:,} test images: one data set, one model, one"
        " recipe; how the order comes out with others is not shown."
        + about_intervals(experiment.baseline, differences, len(experiment.seeds)),
    ]


def _grid(experiment: Experiment) -> int:
    return experiment.image_size // experiment.patch_size
