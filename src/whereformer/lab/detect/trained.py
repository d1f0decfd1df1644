"""Detectors that `whereformer detect train` has trained."""

import json
from pathlib import Path
from typing import Any

from whereformer.adapters import load_checkpoint
from whereformer.adapters.files import open_checkpoint
from whereformer.errors import InputError, check_one_of
from whereformer.lab.detect.boxes import Category
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.model import build
from whereformer.lab.detect.train import CATEGORIES_KEY, EXPERIMENT_KEY

WHICH = ("last", "best")


def weights_of_run(source: Path, which: str) -> Path | None:
    """The file of weights in the folder of a run, or that file itself; None: it is neither.

    Raises:
        InputError: the run is not finished; or it is the folder of several runs.
    """
    check_one_of("weights", which, WHICH)
    if source.is_file():
        ours = source.suffix == ".safetensors" and EXPERIMENT_KEY in open_checkpoint(source).metadata
        return source if ours else None
    if (file := source / f"{which}.safetensors").is_file():
        return file
    if runs := sorted(source.glob("runs/*/seed-*")):
        raise InputError(
            f"detector={str(source)!r} holds {len(runs)} runs, expected one of them, such as {str(runs[0])!r}"
        )
    if (source / "experiment.json").is_file():
        raise InputError(f"detector={str(source)!r}: the run is not finished, {file.name} is not there yet")
    return None


def trained(file: Path) -> tuple[Any, list[Category], DetectionExperiment, dict[str, str]]:
    """The model that a run's file of weights holds, its categories, the experiment of that run alone, and what it
    is.

    Raises:
        InputError: the file does not say what it holds, or it does not fit that.
    """
    said = open_checkpoint(file).metadata
    try:
        categories = [Category(int(number), str(name)) for number, name in json.loads(said[CATEGORIES_KEY])]
    except (KeyError, TypeError, ValueError):
        raise InputError(f"detector={str(file)!r} does not name its categories") from None
    experiment = DetectionExperiment.from_json(said[EXPERIMENT_KEY])
    (encoding,), (seed,) = experiment.encodings, experiment.seeds
    model = load_checkpoint(build(experiment, encoding, seed, len(categories), filled=False), file)
    facts = {
        "weights": f"{file.stem} of a run of {experiment.epochs} epochs, seed {seed}, on {experiment.data!r}",
        "encoding": encoding,
        "model": f"{experiment.model}, backbone {experiment.backbone!r}",
    }
    return model.eval(), categories, experiment, facts
