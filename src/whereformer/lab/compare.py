"""All runs of an experiment, then what each encoding costs, then the report."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from whereformer.lab import cost, record
from whereformer.lab.data import Data, load
from whereformer.lab.experiment import Experiment
from whereformer.lab.measure import measure
from whereformer.lab.report import Comparison, report
from whereformer.lab.runs import accelerator_for, run_all
from whereformer.lab.train import doing, ready
from whereformer.lab.trainee import build


def compare(
    experiment: Experiment, out: Path, *, workers: int | None = None, console: Console | None = None
) -> Comparison | None:
    """Runs what is not in the folder `out` yet, and reports there.

    The runs go as `run_all` says, and their progress goes to `console`.

    Returns:
        the comparison; None in all processes of a distributed launch but the main one.
    """
    accelerator = accelerator_for(experiment.precision)
    main = accelerator.is_main_process
    data = load(experiment)
    counts = _counts(experiment, data)  # builds every model: what cannot be built is refused before anything else
    with record.claimed(out, experiment) if main else nullcontext():
        do = doing(experiment, data, accelerator)
        runs = run_all(experiment, out, accelerator, do, ready, workers=workers, console=console)
        if not main:
            return None
        if console:
            console.print("Measuring step time and memory, drawing figures ...", style="dim")
        costs = _costs(experiment, out, data, accelerator.device)
        return report(experiment, out, data, runs, counts, costs)


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
