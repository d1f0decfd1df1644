"""One run in detection: (experiment, encoding, seed) -> result; and all runs of an experiment."""

import json
import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from rich.console import Console
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from whereformer.adapters.checkpoint import metadata
from whereformer.errors import InputError
from whereformer.lab import record
from whereformer.lab.data import Share
from whereformer.lab.detect.batches import to_train_on
from whereformer.lab.detect.boxes import Category
from whereformer.lab.detect.evaluate import Metrics, evaluate
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.load import Detection
from whereformer.lab.detect.loss import WithLoss, mean
from whereformer.lab.detect.model import build
from whereformer.lab.detect.predict import predictions
from whereformer.lab.detect.source import drawn, opened
from whereformer.lab.pool import Do, OnEpoch, Task
from whereformer.lab.record import Run
from whereformer.lab.runs import Counter, accelerator_for, run_all
from whereformer.lab.train import CHECKPOINT_EVERY, seed_all, weights_of

TELL_EVERY = 1.0  # seconds
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
    share = Share(accelerator.process_index, accelerator.num_processes)
    if experiment.batch_size % share.world:
        raise InputError(f"batch_size={experiment.batch_size}, expected a multiple of the {share.world} processes")
    trainee = _Trainee(experiment, encoding, seed, data, accelerator)

    state = run.load() or {"epoch": 0, "best": None, "log": []}
    if state["epoch"]:
        trainee.restore(state)
        on_epoch(state["epoch"])
    best, log, saved_at = state["best"], state["log"], monotonic()
    metrics = None

    for epoch in range(state["epoch"], experiment.epochs):
        began, done = monotonic(), epoch + 1
        line = {"epoch": done, **trainee.epoch(epoch, share, on_epoch)}
        if done % experiment.evaluate_every == 0 or done == experiment.epochs:
            metrics = trainee.tested(share)
            line |= asdict(metrics.overall)
            if _score(line) > max(map(_score, log), default=-math.inf):
                best = weights_of(trainee.tested_model)
        log.append({**line, "seconds": monotonic() - began})
        on_epoch(done)
        if done == experiment.epochs or monotonic() - saved_at > checkpoint_every:
            run.save({"epoch": done, "best": best, "log": log, **trainee.state()})
            saved_at = monotonic()

    metrics = metrics or trainee.tested(share)  # it was killed between the last epoch and the result
    scores = {line["epoch"]: _score(line) for line in log if "AP" in line}
    top = max(scores, key=lambda epoch: scores[epoch])
    result = {
        "encoding": encoding,
        "seed": seed,
        "metrics": metrics.to_dict(),
        "best_AP": log[top - 1]["AP"],
        "best_epoch": top,
        "seconds": sum(line["seconds"] for line in log),
    }
    last = weights_of(trainee.tested_model)
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


def rate(experiment: DetectionExperiment, update: int, steps: int) -> float:
    """The part of the learning rates that counts after so many updates, of which an epoch has `steps`."""
    warm = min(1.0, (update + 1) / experiment.warmup) if experiment.warmup else 1.0
    if experiment.schedule == "cosine":
        return warm * (1 + math.cos(math.pi * update / (steps * experiment.epochs))) / 2
    return warm * (0.1 if experiment.drop is not None and update >= experiment.drop * steps else 1.0)


def optimizer_of(experiment: DetectionExperiment, detector: Any) -> torch.optim.Optimizer:
    """AdamW, with a learning rate of its own for the backbone, and decay of all weights, as the paper has it."""
    backbone = {id(parameter) for parameter in detector.model.backbone.parameters()}
    groups = [
        {
            "params": [p for p in detector.parameters() if p.requires_grad and (id(p) in backbone) == inside],
            "lr": learning_rate,
            "initial_lr": learning_rate,
        }
        for inside, learning_rate in ((False, experiment.learning_rate), (True, experiment.backbone_learning_rate))
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, weight_decay=experiment.weight_decay, fused=True)


class _Trainee:
    """What a run trains: the model, its optimizer, and the moving average of its weights, if there is one."""

    def __init__(
        self,
        experiment: DetectionExperiment,
        encoding: str,
        seed: int,
        data: Detection,
        accelerator: Accelerator,
    ) -> None:
        self.experiment, self.data, self.accelerator = experiment, data, accelerator
        self.encoding, self.seed = encoding, seed
        self.detector = build(experiment, encoding, seed, len(data.train.categories)).to(accelerator.device)
        self.average = (
            AveragedModel(self.detector, multi_avg_fn=get_ema_multi_avg_fn(experiment.ema))
            if experiment.ema is not None
            else None
        )
        self.model, self.optimizer = accelerator.prepare(
            WithLoss(self.detector), optimizer_of(experiment, self.detector)
        )

    @property
    def tested_model(self) -> Any:
        """What is tested and kept: the moving average, or the model itself."""
        return self.detector if self.average is None else self.average.module

    def epoch(self, epoch: int, share: Share, on_epoch: OnEpoch) -> dict[str, float]:
        """One epoch of training: the mean of the losses."""
        experiment, seed = self.experiment, self.seed
        seed_all(seed, epoch, share.rank)
        self.model.train()
        steps = len(self.data.train) // experiment.batch_size
        totals, told = {}, monotonic()
        batches = to_train_on(
            self.data.train,
            experiment.augmented,
            experiment.batch_size,
            seed=seed,
            epoch=epoch,
            share=share,
            workers=experiment.loader_workers,
        )
        for step, batch in enumerate(batches):
            factor = rate(experiment, epoch * steps + step, steps)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            losses = self.model(send_to_device(batch, self.accelerator.device))
            seen = {name: mean(loss.detach()) for name, loss in losses.items()}
            if not torch.isfinite(seen["loss"]):
                raise InputError(
                    f"{self.encoding}, seed {seed}: the loss is not finite in epoch {epoch + 1}, step {step + 1};"
                    " try a smaller learning_rate, a warmup, a clip, or another precision. The epochs before it"
                    " are kept"
                )
            self._step(losses["loss"])
            totals = {name: totals.get(name, 0) + loss for name, loss in seen.items()}
            if monotonic() - told > TELL_EVERY and step + 1 < steps:
                on_epoch(epoch + (step + 1) / steps)
                told = monotonic()
        return {name: float(total) / steps for name, total in totals.items()}

    def _step(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)
        if self.experiment.clip is not None:
            self.accelerator.clip_grad_norm_(self.detector.parameters(), self.experiment.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.detector)

    def tested(self, share: Share) -> Metrics:
        """The metrics of the images to test on, each of which one process looks at."""
        experiment, truth = self.experiment, self.data.validation
        rows = predictions(
            self.tested_model,
            truth,
            experiment.augmented,
            experiment.batch_size,
            self.accelerator.device,
            share=share,
            workers=experiment.loader_workers,
        )
        places = {picture.id: place for place, picture in enumerate(truth.pictures)}
        rows = sorted(gather_object(rows), key=lambda row: places[row["image_id"]])
        metrics: list[Any] = [None]
        if self.accelerator.is_main_process:
            metrics = [evaluate(truth, rows, experiment.areas)]
        return broadcast_object_list(metrics)[0]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.detector.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "average": self.average.state_dict() if self.average is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])


def _score(line: dict[str, Any]) -> float:
    """By what the best epoch is chosen: the AP, or less than any if there was no test, or nothing to find."""
    ap = line.get("AP")
    return -math.inf if ap is None else ap
