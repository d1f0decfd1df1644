"""One run: (experiment, encoding, seed) -> result."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from whereformer.adapters.checkpoint import metadata
from whereformer.lab.data import Data, load
from whereformer.lab.epochs import CHECKPOINT_EVERY, learn, weights_of
from whereformer.lab.experiment import Experiment
from whereformer.lab.pool import Do, OnEpoch
from whereformer.lab.record import Run
from whereformer.lab.runs import accelerator_for
from whereformer.lab.trainee import Trainee


def ready(experiment: Experiment, out: Path) -> Do:
    """Loads the data, once for all runs of a process."""
    return doing(experiment, load(experiment), accelerator_for(experiment.precision))


def doing(experiment: Experiment, data: Data, accelerator: Accelerator) -> Do:
    """What does one run of an experiment."""

    def do(encoding: str, seed: int, run: Run, on_epoch: OnEpoch) -> dict[str, Any]:
        return train(experiment, encoding, seed, data, run, accelerator, on_epoch)

    return do


def train(
    experiment: Experiment,
    encoding: str,
    seed: int,
    data: Data,
    run: Run,
    accelerator: Accelerator,
    on_epoch: OnEpoch = lambda epochs: None,
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> dict[str, Any]:
    """Trains, or goes on where the run's folder says that it stopped; `on_epoch` hears how many epochs are done.

    All randomness of an epoch follows from (seed, epoch, process), so a run that was interrupted gives the same
    numbers as one that was not.
    """
    run.start(experiment.single(encoding, seed))
    trainee = Trainee(experiment, encoding, seed, data, accelerator)
    log, best = learn(trainee, experiment.epochs, run, run.load(), on_epoch, checkpoint_every)
    result = {
        "encoding": encoding,
        "seed": seed,
        "accuracy": log[-1]["accuracy"],
        "best_accuracy": max(line["accuracy"] for line in log),
        "accuracy_by_size": {str(size): trainee.accuracy(size) for size in experiment.sizes},
        "seconds": sum(line["seconds"] for line in log),
    }
    last = weights_of(trainee.kept)
    run.finish(result, log, {"last": last, "best": best or last}, metadata(trainee.kept))
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return result
