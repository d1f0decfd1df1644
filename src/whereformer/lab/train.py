"""One run: (experiment, encoding, seed) -> result."""

import math
import random
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import Tensor, nn
from torch.nn import functional as F

from whereformer.adapters import equip
from whereformer.adapters.checkpoint import metadata
from whereformer.errors import InputError
from whereformer.lab import models
from whereformer.lab.data import Data, Share, load, seed_of
from whereformer.lab.experiment import Experiment
from whereformer.lab.pool import Do, OnEpoch
from whereformer.lab.record import Run, State
from whereformer.lab.runs import accelerator_for

CHECKPOINT_EVERY = 5.0  # seconds


def build(experiment: Experiment, encoding: str, seed: int, data: Data) -> nn.Module:
    """The model; the weights that all encodings share are equal for equal seeds."""
    seed_all(seed)
    model = models.create(
        experiment.model,
        img_size=experiment.image_size,
        patch_size=experiment.patch_size,
        in_chans=data.channels,
        num_classes=data.classes,
        dynamic_img_size=True,
        **experiment.model_args,
    )
    return equip(model, encoding)


def optimizer_of(experiment: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    fused: dict[str, Any] = {"fused": True} if experiment.optimizer in ("adam", "adamw") else {}
    try:
        return create_optimizer_v2(
            model,
            experiment.optimizer,
            lr=experiment.learning_rate,
            weight_decay=experiment.weight_decay,
            **fused,
        )
    except (ValueError, AssertionError) as error:
        raise InputError(f"optimizer={experiment.optimizer!r} cannot be built: {error}") from error


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
    share = Share(accelerator.process_index, accelerator.num_processes)
    if experiment.batch_size % share.world:
        raise InputError(f"batch_size={experiment.batch_size}, expected a multiple of the {share.world} processes")
    model, optimizer = _prepared(experiment, encoding, seed, data, accelerator)
    plain = accelerator.unwrap_model(model)
    steps = data.train_count // experiment.batch_size
    schedule = _schedule(experiment, optimizer, steps)

    state = run.load() or {"epoch": 0, "best": None, "log": []}
    if state["epoch"]:
        _restore(state, plain, optimizer, accelerator)
        on_epoch(state["epoch"])
    best, log, saved_at = state["best"], state["log"], monotonic()

    for epoch in range(state["epoch"], experiment.epochs):
        began = monotonic()
        seed_all(seed, epoch, share.rank)
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for step, (images, labels) in enumerate(data.train(seed, epoch, share)):
            schedule.step_update(epoch * steps + step)
            logits = model(images.to(accelerator.device))
            loss = F.cross_entropy(logits, labels.to(accelerator.device))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        loss = float(accelerator.reduce(total, "mean")) / steps  # pyright: ignore[reportArgumentType]
        accuracy = accuracy_of(plain, data, experiment.image_size, accelerator)
        log.append(
            {
                "epoch": epoch + 1,
                "loss": loss if math.isfinite(loss) else None,
                "accuracy": accuracy,
                "seconds": monotonic() - began,
            }
        )
        if accuracy > max((line["accuracy"] for line in log[:-1]), default=-1):
            best = weights_of(plain)
        on_epoch(epoch + 1)
        if epoch + 1 == experiment.epochs or monotonic() - saved_at > checkpoint_every:
            run.save(_state(epoch + 1, plain, optimizer, accelerator, best, log))
            saved_at = monotonic()

    result = {
        "encoding": encoding,
        "seed": seed,
        "accuracy": log[-1]["accuracy"],
        "best_accuracy": max(line["accuracy"] for line in log),
        "accuracy_by_size": {str(size): accuracy_of(plain, data, size, accelerator) for size in experiment.sizes},
        "seconds": sum(line["seconds"] for line in log),
    }
    run.finish(result, log, {"last": weights_of(plain), "best": best or {}}, metadata(plain))
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return result


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Data, size: int, accelerator: Accelerator) -> float:
    """Accuracy in % on the test images at `size` x `size` pixels, each image counted once."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=accelerator.device)  # right, seen
    for images, labels in data.test(size, Share(accelerator.process_index, accelerator.num_processes)):
        predicted = model(images.to(accelerator.device)).argmax(-1)
        counts += torch.stack([(predicted == labels.to(accelerator.device)).sum(), counts.new_tensor(len(labels))])
    right, seen = accelerator.reduce(counts, "sum").tolist()  # pyright: ignore[reportAttributeAccessIssue]
    return 100 * right / seen


def seed_all(*numbers: int) -> None:
    seed = seed_of(*numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _prepared(
    experiment: Experiment, encoding: str, seed: int, data: Data, accelerator: Accelerator
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(experiment, encoding, seed, data).to(accelerator.device)
    return accelerator.prepare(model, optimizer_of(experiment, model))


def _schedule(experiment: Experiment, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Linear warm-up and a cosine to zero, as a function of the number of updates done."""
    schedule, _ = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=experiment.epochs,
        warmup_epochs=experiment.warmup_epochs,
        warmup_lr=experiment.learning_rate / 100,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return schedule


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}


def _state(
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    best: dict[str, Tensor] | None,
    log: list[dict[str, Any]],
) -> State:
    return {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
        "best": best,
        "log": log,
    }


def _restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if accelerator.scaler:
        accelerator.scaler.load_state_dict(state["scaler"])
