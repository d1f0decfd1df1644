"""All runs of an experiment in detection, then the report."""

from pathlib import Path

from rich.console import Console

from whereformer.lab.detect.experiment import DetectionExperiment
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
    done = train_all(experiment, out, workers=workers, console=console)
    if done is None:
        return None
    if console:
        console.print("Looking at images, drawing figures ...", style="dim")
    return report(experiment, out, *done)
