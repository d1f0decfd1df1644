"""All runs of an experiment, then what each encoding costs, then the report."""

import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from whereformer.lab import cost, record
from whereformer.lab.data import Data, load
from whereformer.lab.experiment import Experiment
from whereformer.lab.measure import measure
from whereformer.lab.pool import Task, run_in_pool
from whereformer.lab.record import Run, run_folder
from whereformer.lab.report import Comparison, report
from whereformer.lab.train import accelerator_for, build, train


def compare(
    experiment: Experiment, out: Path, *, workers: int | None = None, console: Console | None = None
) -> Comparison | None:
    """Runs what is not in the folder `out` yet, and reports there.

    On a CPU the runs go to a pool of `workers` processes (default: one per core); on a GPU, and under torchrun or
    `accelerate launch`, they go one after the other. Progress goes to `console`.

    Returns:
        the comparison; None in all processes of a distributed launch but the main one.
    """
    accelerator = accelerator_for(experiment)
    main = accelerator.is_main_process
    data = load(experiment)
    counts = _counts(experiment, data)  # builds every model: what cannot be built is refused before anything else
    with record.claimed(out, experiment) if main else nullcontext():
        runs = {task: Run(run_folder(out, *task), writes=main) for task in experiment.runs}
        todo = [task for task, run in runs.items() if run.result() is None]
        accelerator.wait_for_everyone()
        with _Ticker(experiment, todo, console if main else None) as ticker:
            if accelerator.device.type == "cpu" and accelerator.num_processes == 1:
                run_in_pool(experiment, out, todo, workers or _cores(), ticker.epoch, ticker.result)
            else:
                for task in todo:
                    on_epoch = lambda epochs, task=task: ticker.epoch(task, epochs)  # noqa: E731
                    ticker.result(task, train(experiment, *task, data, runs[task], accelerator, on_epoch))
        if not main:
            return None
        if console:
            console.print("Measuring step time and memory, drawing figures ...", style="dim")
        costs = _costs(experiment, out, data, accelerator.device)
        return report(experiment, out, data, runs, counts, costs)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _counts(experiment: Experiment, data: Data) -> dict[str, dict[str, int]]:
    """Parameters, beyond those of the model without encoding, and multiply-adds per image, of each encoding."""
    size = experiment.image_size
    counts: dict[str, dict[str, int]] = {}
    for spec in dict.fromkeys(("none", *experiment.encodings)):
        model = build(experiment, spec, 0, data)
        counts[spec] = {"parameters_added": cost.parameters(model), "macs": cost.macs(model, size, size)}
    bare = counts["none"]["parameters_added"]
    for count in counts.values():
        count["parameters_added"] -= bare
    return counts


def _costs(experiment: Experiment, out: Path, data: Data, device: Any) -> dict[str, dict[str, float]]:
    """Measured once: all encodings in one go, since they are measured against each other."""
    path = out / "costs.json"
    if path.exists() and (there := record.read_json(path)).keys() >= set(experiment.encodings):
        return there
    costs = {encoding: asdict(value) for encoding, value in measure(experiment, data, device).items()}
    record.write_json(path, costs)
    return costs


class _Ticker:
    """The progress bar, in epochs; without a terminal, a line for each run."""

    def __init__(self, experiment: Experiment, todo: list[Task], console: Console | None) -> None:
        self.epochs = experiment.epochs
        self.done = dict.fromkeys(todo, 0)  # epochs of each run
        self.results = 0
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            transient=True,
            disable=console is None or not todo or not console.is_terminal,
        )
        self.line = self.bar.add_task("training", total=len(todo) * experiment.epochs)

    def __enter__(self) -> "_Ticker":
        self.bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bar.stop()

    def epoch(self, task: Task, epochs: int) -> None:
        self.done[task] = epochs
        encoding, seed = task
        self.bar.update(self.line, completed=sum(self.done.values()), description=f"{encoding}, seed {seed}")

    def result(self, task: Task, result: dict[str, Any]) -> None:
        self.epoch(task, self.epochs)
        self.results += 1
        if self.console and not self.console.is_terminal:
            encoding, seed = task
            done = f"{self.results}/{len(self.done)}"
            text = f"{done}  {encoding}, seed {seed}: {result['accuracy']:.1f} % ({result['seconds']:.0f} s)"
            self.console.print(text, markup=False, highlight=False)
