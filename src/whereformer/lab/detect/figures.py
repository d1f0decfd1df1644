"""The figures of a comparison in detection: curves, and what the detectors find on a few images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from whereformer.lab.canvas import canvas, colours, deviation, saved
from whereformer.lab.detect import draw as drawing
from whereformer.lab.detect.detector import Detector
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.load import Detection
from whereformer.lab.detect.results import spread
from whereformer.lab.pool import Task
from whereformer.lab.record import Run

SHEET = 8  # images


def draw(experiment: DetectionExperiment, out: Path, data: Detection, runs: Mapping[Task, Run]) -> dict[str, Path]:
    """Draws all figures there are to draw: caption -> PNG file."""
    folder = out / "figures"
    over = "mean over seeds, and one standard deviation to each side."
    found = {
        f"AP on the images to test on, after each epoch that was tested: {over}": saved(
            folder / "ap_by_epoch.png", curves(experiment, runs, "AP", 100, "AP (%)")
        ),
        f"Training loss, mean of each epoch: {over}": saved(
            folder / "loss_by_epoch.png", curves(experiment, runs, "loss", 1, "loss")
        ),
    }
    seed = experiment.seeds[0]
    some = data.validation.subset(spread(len(data.validation), SHEET))
    for encoding in experiment.encodings:
        run = runs[encoding, seed]
        rows = Detector.load(run.folder).predict(some)
        sheet = drawing.sheet(drawing.panels(some, rows, range(len(some))))
        found[
            f"{encoding}, seed {seed}: what is there (white dashes, dots around crowds) and what was found with a"
            f" score from {drawing.LEAST:g} on (in colour, with the score in %)."
        ] = drawing.write(run.folder / "figures" / "predictions.png", sheet)
    return found


def curves(experiment: DetectionExperiment, runs: Mapping[Task, Run], name: str, scale: float, label: str) -> Any:
    """What lines of the logs say under a name, by epoch, for each encoding."""
    with canvas(figsize=(7.5, 4.2)) as figure:
        axes = figure.subplots()
        for encoding, colour in zip(experiment.encodings, colours(len(experiment.encodings)), strict=True):
            logs = [[line for line in runs[encoding, s].log() if name in line] for s in experiment.seeds]
            epochs = [line["epoch"] for line in logs[0]]
            values = np.array([[line[name] for line in log] for log in logs], dtype=float) * scale  # None: NaN
            middle, sd = values.mean(0), deviation(values)
            axes.plot(epochs, middle, color=colour, label=encoding, lw=1.6, marker="o", ms=3)
            axes.fill_between(epochs, np.maximum(middle - sd, 0), middle + sd, color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
        return figure
