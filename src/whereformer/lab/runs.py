"""The runs of a study: those that are not there yet are run, and progress is shown."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from whereformer.errors import InputError
from whereformer.lab.pool import Do, OnEpoch, Ready, Task, run_in_pool
from whereformer.lab.record import Run, run_folder
from whereformer.lab.study import Study


def accelerator_for(precision: str) -> Accelerator:
    try:
        return Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=precision)
    except ValueError as error:
        raise InputError(f"precision={precision!r} is not accepted here: {error}") from error


def run_all(
    study: Study,
    out: Path,
    accelerator: Accelerator,
    do: Do,
    ready: Ready,
    *,
    workers: int | None = None,
    console: Console | None = None,
) -> dict[Task, Run]:
    """Runs what is not in the folder `out` yet, which the caller has claimed.

    On a CPU the runs go to a pool of `workers` processes (default: one per core); on a GPU, and under torchrun or
    `accelerate launch`, they go one after the other. Progress goes to `console`.

    Args:
        do: does one run in this process.
        ready: makes the same in each process of a pool; a function of a module, as they must find it.
    """
    main = accelerator.is_main_process
    runs = {task: Run(run_folder(out, *task), writes=main) for task in study.runs}
    todo = [task for task, run in runs.items() if run.result() is None]
    accelerator.wait_for_everyone()
    with _Ticker(study, todo, console if main else None) as ticker:
        if accelerator.device.type == "cpu" and accelerator.num_processes == 1:
            run_in_pool(study, out, todo, workers or _cores(), ready, ticker.epoch, ticker.result)
        else:
            for task in todo:
                on_epoch: OnEpoch = lambda epochs, task=task: ticker.epoch(task, epochs)  # noqa: E731
                ticker.result(task, do(*task, runs[task], on_epoch))
    return runs


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Counter:
    """A progress bar for what is counted before the runs begin; nothing without a terminal."""

    def __init__(self, console: Console | None) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        disable = console is None or not console.is_terminal
        self.bar = Progress(*columns, console=console, transient=True, disable=disable)

    def __enter__(self) -> "Counter":
        self.bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bar.stop()

    def of(self, what: str) -> Callable[[int, int], None]:
        """What hears how many of how many are done."""
        line = self.bar.add_task(what, visible=False)
        return lambda done, total: self.bar.update(line, completed=done, total=total, visible=True)


class _Ticker:
    """The progress bar, in epochs; without a terminal, a line for each run."""

    def __init__(self, study: Study, todo: list[Task], console: Console | None) -> None:
        self.study = study
        self.done = dict.fromkeys(todo, 0.0)  # epochs of each run
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
        self.line = self.bar.add_task("training", total=len(todo) * study.epochs)

    def __enter__(self) -> "_Ticker":
        self.bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bar.stop()

    def epoch(self, task: Task, epochs: float) -> None:
        self.done[task] = epochs
        encoding, seed = task
        self.bar.update(self.line, completed=sum(self.done.values()), description=f"{encoding}, seed {seed}")

    def result(self, task: Task, result: dict[str, Any]) -> None:
        self.epoch(task, self.study.epochs)
        self.results += 1
        if self.console and not self.console.is_terminal:
            encoding, seed = task
            done = f"{self.results}/{len(self.done)}"
            text = f"{done}  {encoding}, seed {seed}: {self.study.words(result)} ({result['seconds']:.0f} s)"
            self.console.print(text, markup=False, highlight=False)
