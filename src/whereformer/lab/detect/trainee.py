"""What a run in detection trains: the detector, its optimizer, and the moving average of its weights."""

import math
from dataclasses import asdict
from time import monotonic
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from whereformer.errors import InputError
from whereformer.lab import epochs
from whereformer.lab.data import seed_all
from whereformer.lab.detect.batches import to_train_on
from whereformer.lab.detect.evaluate import Metrics, evaluate
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.load import Detection
from whereformer.lab.detect.loss import WithLoss, mean
from whereformer.lab.detect.model import build
from whereformer.lab.detect.objects import learn_objects
from whereformer.lab.detect.predict import predictions
from whereformer.lab.epochs import Line
from whereformer.lab.pool import OnEpoch
from whereformer.lab.record import State

TELL_EVERY = 1.0  # seconds


class Trainee:
    """What a run trains; see `epochs.Trainee`.

    Args:
        fresh: whether the run begins here; what it is restored to needs no start.
    """

    def __init__(
        self,
        experiment: DetectionExperiment,
        encoding: str,
        seed: int,
        data: Detection,
        accelerator: Accelerator,
        *,
        fresh: bool,
    ) -> None:
        self.experiment, self.data, self.accelerator = experiment, data, accelerator
        self.encoding, self.seed = encoding, seed
        self.share = epochs.share_of(experiment.batch_size, accelerator)
        self.detector = build(experiment, encoding, seed, len(data.train.categories)).to(accelerator.device)
        if fresh and experiment.backbone_epochs and not experiment.weights:
            learn_objects(self.detector.model.backbone.model, data.train, experiment.backbone_epochs, seed)
        self.average = (
            AveragedModel(self.detector, multi_avg_fn=get_ema_multi_avg_fn(experiment.ema))
            if experiment.ema is not None
            else None
        )
        self.model, self.optimizer = accelerator.prepare(
            WithLoss(self.detector), optimizer_of(experiment, self.detector)
        )
        self.metrics: Metrics | None = None  # of the last test

    @property
    def kept(self) -> Any:
        """What is tested and kept: the moving average, or the model itself."""
        return self.detector if self.average is None else self.average.module

    def epoch(self, epoch: int, on_epoch: OnEpoch) -> Line:
        """The means of the losses and, if it is tested, the metrics of all classes and sizes."""
        line: Line = self._trained(epoch, on_epoch)
        if (epoch + 1) % self.experiment.evaluate_every == 0 or epoch + 1 == self.experiment.epochs:
            self.metrics = self.tested()
            line |= asdict(self.metrics.overall)
        return line

    def score(self, line: Line) -> float:
        """The AP, or less than any if there was no test, or nothing to find."""
        ap = line.get("AP")
        return -math.inf if ap is None else ap

    def _trained(self, epoch: int, on_epoch: OnEpoch) -> dict[str, float]:
        experiment, seed = self.experiment, self.seed
        seed_all(seed, epoch, self.share.rank)
        self.model.train()
        steps = len(self.data.train) // experiment.batch_size
        totals, told = {}, monotonic()
        batches = to_train_on(
            self.data.train,
            experiment.augmented,
            experiment.batch_size,
            seed=seed,
            epoch=epoch,
            share=self.share,
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

    def tested(self) -> Metrics:
        """The metrics of the images to test on, each of which one process looks at."""
        experiment, truth = self.experiment, self.data.validation
        rows = predictions(
            self.kept,
            truth,
            experiment.augmented,
            experiment.batch_size,
            self.accelerator.device,
            share=self.share,
            workers=experiment.loader_workers,
        )
        places = {picture.id: place for place, picture in enumerate(truth.pictures)}
        rows = sorted(gather_object(rows), key=lambda row: places[row["image_id"]])
        metrics: list[Any] = [None]
        if self.accelerator.is_main_process:
            metrics = [evaluate(truth, rows, experiment.areas)]
        return broadcast_object_list(metrics)[0]

    def state(self) -> State:
        average = self.average.state_dict() if self.average is not None else None
        return {**epochs.state_of(self.detector, self.optimizer, self.accelerator), "average": average}

    def restore(self, state: State) -> None:
        epochs.restore(state, self.detector, self.optimizer, self.accelerator)
        if self.average is not None:
            self.average.load_state_dict(state["average"])


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
