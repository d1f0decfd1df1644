"""What a run in classification trains: the model, its optimizer, and the schedule of its learning rate."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn
from torch.nn import functional as F

from whereformer.adapters import equip
from whereformer.errors import InputError
from whereformer.lab import epochs, models
from whereformer.lab.data import Data, seed_all
from whereformer.lab.epochs import Line
from whereformer.lab.experiment import Experiment
from whereformer.lab.pool import OnEpoch
from whereformer.lab.record import State


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


class Trainee:
    """What a run trains; see `epochs.Trainee`."""

    def __init__(
        self, experiment: Experiment, encoding: str, seed: int, data: Data, accelerator: Accelerator
    ) -> None:
        self.experiment, self.data, self.accelerator, self.seed = experiment, data, accelerator, seed
        self.share = epochs.share_of(experiment.batch_size, accelerator)
        model = build(experiment, encoding, seed, data).to(accelerator.device)
        self.model, self.optimizer = accelerator.prepare(model, optimizer_of(experiment, model))
        self.steps = data.train_count // experiment.batch_size
        self.schedule = _schedule(experiment, self.optimizer, self.steps)

    @property
    def kept(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def epoch(self, epoch: int, on_epoch: OnEpoch) -> Line:
        seed_all(self.seed, epoch, self.share.rank)
        self.model.train()
        device = self.accelerator.device
        total = torch.zeros((), device=device)
        for step, (images, labels) in enumerate(self.data.train(self.seed, epoch, self.share)):
            self.schedule.step_update(epoch * self.steps + step)
            loss = F.cross_entropy(self.model(images.to(device)), labels.to(device))
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach()
        loss = float(self.accelerator.reduce(total, "mean")) / self.steps  # pyright: ignore[reportArgumentType]
        accuracy = self.accuracy(self.experiment.image_size)
        return {"loss": loss if math.isfinite(loss) else None, "accuracy": accuracy}

    def score(self, line: Line) -> float:
        return line["accuracy"]

    @torch.no_grad()
    def accuracy(self, size: int) -> float:
        """In %, on the test images at `size` x `size` pixels, each image counted once."""
        model, device = self.kept.eval(), self.accelerator.device
        counts = torch.zeros(2, dtype=torch.int64, device=device)  # right, seen
        for images, labels in self.data.test(size, self.share):
            predicted = model(images.to(device)).argmax(-1)
            counts += torch.stack([(predicted == labels.to(device)).sum(), counts.new_tensor(len(labels))])
        right, seen = self.accelerator.reduce(counts, "sum").tolist()  # pyright: ignore[reportAttributeAccessIssue]
        return 100 * right / seen

    def state(self) -> State:
        return epochs.state_of(self.kept, self.optimizer, self.accelerator)

    def restore(self, state: State) -> None:
        epochs.restore(state, self.kept, self.optimizer, self.accelerator)


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
