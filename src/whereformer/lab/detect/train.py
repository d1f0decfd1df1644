"""One run in detection: (experiment, encoding, seed) -> result; and all runs of an experiment."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from torch import nn

from whereformer.adapters.checkpoint import metadata
from whereformer.lab import record
from whereformer.lab.detect.boxes import Category
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.load import Detection
from whereformer.lab.detect.model import build
from whereformer.lab.detect.source import drawn, opened
from whereformer.lab.detect.trainee import Trainee
from whereformer.lab.epochs import CHECKPOINT_EVERY, learn, weights_of
from whereformer.lab.pool import Do, OnEpoch, Task
from whereformer.lab.record import Run
from whereformer.lab.runs import Counter, accelerator_for, run_all

CATEGORIES_KEY, EXPERIMENT_KEY = "whereformer.categories", "whereformer.experiment"
"""The metadata of a run's weights: names the categories, [[id, name], ...], and says how the model is built."""


def train_all(
    experiment: DetectionExperiment, out: Path, *, workers: int | None = None, console: Console | None = None
) -> tuple[Detection, dict[Task, Run]] | None:
    """Runs what is not in the folder `out` yet, as `run_all` says.

    Returns:
        the data and the runs; None in all processes of a distributed launch but the main one.
    """
    accelerator = accelerator_for(experiment.precision)
    main = accelerator.is_main_process
    with record.claimed(out, experiment) if main else nullcontext():
        with Counter(console if main else None) as counter:
            if main:
                drawn(experiment, out, counter.of("images drawn"))
            accelerator.wait_for_everyone()
            data = opened(experiment, out, counter.of("images looked at"))
        for encoding in experiment.encodings:  # what cannot be built is refused before anything else
            build(experiment, encoding, 0, len(data.train.categories))
        if main and console:
            for report in data.reports:
                console.print(str(report), markup=False, highlight=False, soft_wrap=True, style="dim")
        do = doing(experiment, data, accelerator)
        runs = run_all(experiment, out, accelerator, do, ready, workers=workers, console=console)
    return (data, runs) if main else None


def ready(experiment: DetectionExperiment, out: Path) -> Do:
    """Reads the data, once for all runs of a process."""
    return doing(experiment, opened(experiment, out), accelerator_for(experiment.precision))


def doing(experiment: DetectionExperiment, data: Detection, accelerator: Accelerator) -> Do:
    """What does one run of an experiment."""

    def do(encoding: str, seed: int, run: Run, on_epoch: OnEpoch) -> dict[str, Any]:
        return train(experiment, encoding, seed, data, run, accelerator, on_epoch)

    return do


def train(
    experiment: DetectionExperiment,
    encoding: str,
    seed: int,
    data: Detection,
    run: Run,
    accelerator: Accelerator,
    on_epoch: OnEpoch = lambda epochs: None,
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> dict[str, Any]:
    """Trains, or goes on where the run's folder says that it stopped; `on_epoch` hears how many epochs are done.

    All randomness of an epoch follows from (seed, epoch, process), so a run that was interrupted gives the same
    numbers as one that was not.

    Raises:
        InputError: the loss is not finite.
    """
    run.start(experiment.single(encoding, seed))
    state = run.load()
    trainee = Trainee(experiment, encoding, seed, data, accelerator, fresh=state is None)
    log, best = learn(trainee, experiment.epochs, run, state, on_epoch, checkpoint_every)
    metrics = trainee.metrics or trainee.tested()  # it was killed between the last epoch and the result
    scores = {line["epoch"]: trainee.score(line) for line in log if "AP" in line}
    top = max(scores, key=lambda epoch: scores[epoch])
    result = {
        "encoding": encoding,
        "seed": seed,
        "metrics": metrics.to_dict(),
        "best_AP": log[top - 1]["AP"],
        "best_epoch": top,
        "seconds": sum(line["seconds"] for line in log),
    }
    last = weights_of(trainee.kept)
    about = about_weights(experiment.single(encoding, seed), data.train.categories, trainee.detector)
    run.finish(result, log, {"last": last, "best": best or last}, about)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return result


def about_weights(
    experiment: DetectionExperiment, categories: tuple[Category, ...], model: nn.Module
) -> dict[str, str]:
    """What a file of weights says about itself."""
    return {
        **metadata(model),
        CATEGORIES_KEY: json.dumps([[one.id, one.name] for one in categories]),
        EXPERIMENT_KEY: experiment.to_json(),
    }
