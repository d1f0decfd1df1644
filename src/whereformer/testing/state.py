"""Promises about state: what is kept, saved, copied, updated, forgotten."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.testing.subject import (
    DIM,
    HEADS,
    Inputs,
    Subject,
    forward,
    hold,
    inputs_on,
    run,
    said_by,
    same,
)


def tells_the_truth(subject: Subject) -> None:
    """tells what it does: its moments, its blocks, its cost; and has no parameter that does nothing"""
    encoding, home = subject.make(), subject.home
    inputs = inputs_on(encoding, home)
    said = said_by(encoding, inputs, home)
    spoken = {what.split()[0] for what in said}
    if torch.equal(said["tokens"], inputs.x):
        spoken.remove("tokens")
    told = set(encoding.moments())
    hold(told == spoken, f"moments() tells {sorted(told)}, but on {home} it speaks at {sorted(spoken)}")
    blocks = list(encoding.blocks(12))
    hold(len(set(blocks)) == len(blocks), f"blocks(12) has a block twice: {blocks}")
    hold(set(blocks) <= set(range(12)), f"blocks(12) is {blocks}")
    macs = encoding.macs(home)
    hold(isinstance(macs, int) and macs >= 0, f"macs({home}) is {macs!r}")
    gradients = run(encoding, home)
    for name, parameter in encoding.named_parameters():
        if parameter.requires_grad:
            hold(bool(gradients[f"gradient of {name}"].any()), f"parameter {name} has no gradient on {home}")


def keeps_only_parameters(subject: Subject) -> None:
    """has nothing but its parameters in its state_dict, and no buffer that follows the size of its input"""
    encoding = subject.make()
    buffers = {name: buffer.shape for name, buffer in encoding.named_buffers()}
    for grid in (subject.home, subject.away):
        run(encoding, grid)
        extra = set(encoding.state_dict()) ^ {name for name, _ in encoding.named_parameters()}
        hold(not extra, f"after {grid} its state_dict and its parameters differ in {sorted(extra)}")
        now = {name: buffer.shape for name, buffer in encoding.named_buffers()}
        hold(now == buffers, f"after {grid} its buffers changed from {buffers} to {now}")


def keeps_nothing_derived(subject: Subject) -> None:
    """keeps no numbers that could be computed again: parameters that are frozen are drawn at random"""
    first, second = (_built(subject, seed) for seed in (1, 2))
    for (name, parameter), other in zip(first.named_parameters(), second.parameters(), strict=True):
        if not parameter.requires_grad:
            hold(not torch.equal(parameter, other), f"parameter {name} is frozen, and the same whatever the seed")


def starts_anew(subject: Subject) -> None:
    """fills all of its parameters anew by reset_parameters(), whatever they hold"""
    fresh, used = _built(subject, seed=1), subject.make().float()
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.fill_(torch.nan)
    for encoding in (fresh, used):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            encoding.reset_parameters()
    same(dict(used.named_parameters()), dict(fresh.named_parameters()), f"{subject.home}, started anew")


def _built(subject: Subject, seed: int) -> PositionEncoding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return subject.factory(DIM, HEADS, subject.home)


def repeats_itself(subject: Subject) -> None:
    """gives the same bits when it is called again, not training"""
    encoding = subject.make()
    for grid in (subject.home, subject.away):
        same(run(encoding, grid), run(encoding, grid), f"{grid}, called again")


def forgets_sizes(subject: Subject) -> None:
    """gives on each of several sizes in turn what a fresh one with the same state gives"""
    encoding = subject.make()
    for height, width in ((3, 4), (4, 3), (1, 5), (3, 4), (2, 2), (1, 5)):
        grid = subject.grid(height, width)
        same(run(encoding, grid), run(subject.twin(encoding), grid), f"{grid}, after other sizes")


def sees_updates(subject: Subject) -> None:
    """sees parameters changed in place, or loaded, at once and without train() or eval()"""
    encoding = subject.make()
    for grid in (subject.home, subject.away):
        with torch.no_grad():
            forward(encoding, inputs_on(encoding, grid), grid)
            for parameter in encoding.parameters():
                parameter.add_(1)
        same(run(encoding, grid), run(subject.twin(encoding), grid), f"{grid}, after an update in place")
        encoding.load_state_dict({name: -value for name, value in encoding.state_dict().items()})
        same(run(encoding, grid), run(subject.twin(encoding), grid), f"{grid}, after load_state_dict")


def changes_nothing(subject: Subject) -> None:
    """changes no attribute of its own in forward, and is not kept alive by anything"""
    encoding = subject.make().train()
    before = _snapshot(encoding)
    for grid in (subject.home, subject.away):
        run(encoding, grid)
        changed = sorted(name for name, state in _snapshot(encoding).items() if state != before.get(name))
        hold(not changed, f"{', '.join(changed)} changed on {grid}")
    alive = weakref.ref(encoding)
    del encoding, before
    if alive() is not None:
        gc.collect()
    hold(alive() is None, f"it is still alive after use on {subject.home} and {subject.away} and `del`")


def can_be_copied(subject: Subject) -> None:
    """can be copied, pickled and saved after forward and backward, and the copy is the same"""
    encoding, away = subject.make().train(), subject.away
    for grid in (subject.home, away):
        outputs = forward(encoding, inputs_on(encoding, grid), grid)
        torch.stack([value.sum() for value in outputs.values()]).sum().backward()
    expected = run(encoding.eval(), away)
    file = io.BytesIO()
    torch.save(encoding, file)
    file.seek(0)
    copies = {
        "copy.deepcopy": copy.deepcopy(encoding),
        "pickle": pickle.loads(pickle.dumps(encoding)),
        "torch.save": torch.load(file, weights_only=False),
    }
    for way, other in copies.items():
        same(run(other, away), expected, f"{away}, copied by {way}")


def can_start_without_memory(subject: Subject) -> None:
    """can be built on the meta device, given memory, and loaded"""
    encoding = subject.make()
    with torch.device("meta"):
        empty = subject.factory(DIM, HEADS, subject.home)
    empty = empty.double().to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)  # what memory may hold
    empty.load_state_dict(encoding.state_dict())
    for grid in (subject.home, subject.away):
        same(run(empty, grid), run(encoding, grid), f"{grid}, built on the meta device")


def moves(subject: Subject) -> None:
    """follows its parameters and its input to another device and dtype, and back"""
    encoding, home = subject.make(), subject.home
    expected = run(encoding, home)
    there = copy.deepcopy(encoding).to("meta")
    inputs = inputs_on(encoding, home).map(lambda t: t.detach().to("meta"))
    for what, value in forward(there, inputs, home, backend="auto").items():
        hold(value.is_meta, f"{what} on {home}, moved to the meta device, is on {value.device}")
    forward(encoding.float(), Inputs(*(t.float() for t in inputs_on(encoding, home))), home)
    encoding = encoding.double()
    encoding.load_state_dict(subject.make().state_dict())
    same(run(encoding, home), expected, f"{home}, after a forward in float32")


def trains_after_inference(subject: Subject) -> None:
    """trains after it was used in inference_mode"""
    encoding = subject.make()
    for grid in (subject.home, subject.away):
        expected = run(subject.twin(encoding), grid)
        with torch.inference_mode():
            forward(encoding, inputs_on(encoding, grid), grid)
        same(run(encoding, grid), expected, f"{grid}, after inference_mode")


def _snapshot(module: nn.Module) -> dict[str, object]:
    """The attributes of a module and its parts, such that equal snapshots mean: nothing was touched."""
    parts = dict(module.named_modules(remove_duplicate=False))
    names = [(name, part, attribute) for name, part in parts.items() for attribute in vars(part)]
    return {f"{name}.{attribute}".lstrip("."): _touch(getattr(part, attribute)) for name, part, attribute in names}


def _touch(value: Any) -> object:
    match value:
        case Tensor():
            return id(value), value._version, tuple(value.shape)
        case nn.Module():
            return id(value)
        case dict():
            return [(key, _touch(item)) for key, item in value.items()]
        case list() | tuple() | set():
            return [_touch(item) for item in value]
    return id(value), repr(value)
