"""What runs of all kinds share: epoch after epoch, from where a run's folder says that it stopped."""

import math
from time import monotonic
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from whereformer.errors import InputError
from whereformer.lab.data import Share
from whereformer.lab.pool import OnEpoch
from whereformer.lab.record import Run, State

CHECKPOINT_EVERY = 5.0  # seconds

Line = dict[str, Any]
"""What the log says of an epoch."""

Weights = dict[str, Tensor]


class Trainee(Protocol):
    """What a run trains: a model, its optimizer, and whatever else changes with them."""

    @property
    def kept(self) -> nn.Module:
        """Whose weights are tested and kept."""
        ...

    def epoch(self, epoch: int, on_epoch: OnEpoch) -> Line:
        """Trains for an epoch, and tests if that is due."""
        ...

    def score(self, line: Line) -> float:
        """By what the best epoch is chosen; −∞ without a test."""
        ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...


def share_of(batch_size: int, accelerator: Accelerator) -> Share:
    """Of each batch, what this process takes.

    Raises:
        InputError: a batch cannot be shared evenly.
    """
    share = Share(accelerator.process_index, accelerator.num_processes)
    if batch_size % share.world:
        raise InputError(f"batch_size={batch_size}, expected a multiple of the {share.world} processes")
    return share


def learn(
    trainee: Trainee,
    epochs: int,
    run: Run,
    state: State | None,
    on_epoch: OnEpoch,
    checkpoint_every: float,
) -> tuple[list[Line], Weights | None]:
    """Goes on from `state`, what the run's folder holds; None: begins. `on_epoch` hears how many epochs are done.

    Returns:
        the log, and the weights of its best epoch; None if no epoch has a score.
    """
    done, log, best = 0, [], None
    if state is not None:
        trainee.restore(state)
        done, log, best = state["epoch"], state["log"], state["best"]
        on_epoch(done)
    saved_at = monotonic()
    while done < epochs:
        began = monotonic()
        line = {"epoch": done + 1, **trainee.epoch(done, on_epoch)}
        done += 1
        if trainee.score(line) > max(map(trainee.score, log), default=-math.inf):
            best = weights_of(trainee.kept)
        log.append({**line, "seconds": monotonic() - began})
        on_epoch(done)
        if done == epochs or monotonic() - saved_at > checkpoint_every:
            run.save({"epoch": done, "best": best, "log": log, **trainee.state()})
            saved_at = monotonic()
    return log, best


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> State:
    """What a trainee's state has at least."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
    }


def restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
    """The reverse of `state_of`."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if accelerator.scaler:
        accelerator.scaler.load_state_dict(state["scaler"])
