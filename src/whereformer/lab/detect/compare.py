"""All runs of an experiment in detection, then the report."""

from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.load import Detection
from whereformer.lab.detect.report import DetectionComparison, report
from whereformer.lab.detect.train import train_all


def compare(
    experiment: DetectionExperiment, out: Path, *, workers: int | None = None, console: Console | None = None
) -> DetectionComparison | None:
    """Trains what is not in the folder `out` yet, and reports there.

    What the data holds, and what is wrong with it, goes to `console` before anything is trained; so does progress.

    Returns:
        the comparison; None in all processes of a distributed launch but the main one.
    """
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    terminal = console is not None and console.is_terminal
    bar = Progress(*columns, console=console, transient=True, disable=not terminal)

    def on_image(done: int, count: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=count)

    def on_data(data: Detection) -> None:
        bar.stop()
        if console:
            for one in data.reports:
                console.print(str(one), markup=False, highlight=False, soft_wrap=True)

    task = bar.add_task("images", total=None)
    try:
        done = train_all(experiment, out, workers=workers, console=console, on_image=on_image, on_data=on_data)
    finally:
        bar.stop()
    if done is None:
        return None
    if console:
        console.print("Looking at images, drawing figures ...", style="dim")
    return report(experiment, out, *done)
