"""What an encoding costs: time and memory of a training step, beside the same model without any encoding."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from whereformer.lab.data import Data, Share
from whereformer.lab.experiment import Experiment
from whereformer.lab.trainee import build, optimizer_of

WARM_UP = 3  # rounds
ROUNDS = 30
LEAST_ROUNDS = 10  # where ROUNDS take more than SECONDS
SECONDS = 10.0


@dataclass(frozen=True)
class StepCost:
    step_time: float  # median over rounds of the ratio to no encoding
    memory: float  # ratio to no encoding of the peak in a training step: weights, optimizer and activations


def measure(
    experiment: Experiment, data: Data, device: torch.device, *, seconds: float = SECONDS
) -> dict[str, StepCost]:
    """The costs of each encoding of the experiment, on one batch and, on a CPU, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encodings = list(dict.fromkeys(("none", *experiment.encodings)))
        batch = next(data.train(0, 0, Share()))
        images, labels = (tensor.to(device) for tensor in batch)
        steps = [_Step(experiment, encoding, data, images, labels) for encoding in encodings]
        peaks = [step.peak() for step in steps]
        ratios = _interleaved(steps, device, seconds)
    finally:
        torch.set_num_threads(threads)
    costs = zip(encodings, ratios, peaks, strict=True)
    return {
        encoding: StepCost(ratio, peak / peaks[0])
        for encoding, ratio, peak in costs
        if encoding in experiment.encodings
    }


class _Step:
    """A training step of one model on one batch."""

    def __init__(self, experiment: Experiment, encoding: str, data: Data, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.model = build(experiment, encoding, 0, data).to(images.device)
        self.optimizer = optimizer_of(experiment, self.model)
        self.autocast = torch.autocast(
            images.device.type,
            torch.float16 if experiment.precision == "fp16" else torch.bfloat16,
            enabled=experiment.precision != "no",
        )

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()

    def peak(self) -> int:
        """Bytes held at the worst moment of a step: what lives on between steps, and what the step adds."""
        self()
        self.optimizer.zero_grad()
        added = (_peak_cuda if self.images.is_cuda else _peak_cpu)(self)
        return added + _bytes(self.model, self.optimizer)


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    moments = (
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *moments))


def _peak_cuda(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_cpu(step: Callable[[], None]) -> int:
    """From the allocator's events, as the profiler records them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints two lines at each start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _interleaved(steps: list[_Step], device: torch.device, seconds: float) -> list[float]:
    """The median over rounds of each step's time over the first one's; every round runs every step once."""
    for _ in range(WARM_UP):
        for step in steps:
            step()
    rounds: list[list[float]] = []
    began = perf_counter()
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < ROUNDS and perf_counter() - began < seconds):
        rounds.append([_timed(step, device) for step in steps])
    return [median(times[i] / times[0] for times in rounds) for i in range(len(steps))]


def _timed(step: Callable[[], None], device: torch.device) -> float:
    began = perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - began
