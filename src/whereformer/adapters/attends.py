"""Find out which modules of a model attend over a grid, by watching one forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum"}
"""Where scores come from: q kᵀ."""


@torch.no_grad()
def attending(model: nn.Module, images: Tensor) -> set[type[nn.Module]]:
    """The classes of the modules that attend over a grid when the model sees these images.

    A module attends over a grid if it takes a softmax over scores of several queries for several keys, products of
    what it was given, or calls torch's scaled_dot_product_attention on these; of modules within each other the
    innermost counts that is not one of torch's own. Where the scores are sums over the tokens, they are scores of
    channels for channels, and the attention is none over a grid.
    """
    with _stack() as stack, _Watch(stack) as watch:
        model(images)
    return watch.found


@dataclass
class _Frame:
    """One call of a module: the first of what it was given, and the scores made in it, kept alive as ids are."""

    module: nn.Module
    given: Any
    scores: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def _stack() -> Iterator[list[_Frame]]:
    """The modules that are being called, outermost first."""
    stack: list[_Frame] = []

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        stack.append(_Frame(module, given[0] if given else None))

    def after(*_: Any) -> None:
        stack.pop()

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


class _Watch(TorchFunctionMode):
    def __init__(self, stack: list[_Frame]) -> None:
        super().__init__()
        self.stack = stack
        self.found: set[type[nn.Module]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [a for a in args if isinstance(a, Tensor)]
        if func is F.scaled_dot_product_attention:
            query, key = (*args, *kwargs.values())[:2]
            if min(query.shape[-2], key.shape[-2]) > 1:
                self._meet(query, key.shape[-2], None)
        elif name in PRODUCTS:
            given = len(tensors) == 2 and not any(isinstance(a, nn.Parameter) for a in tensors)
            if given and min(out.shape[-2:]) > 1:
                self._meet(tensors[0], out.shape[-1], out)
        elif (frame := self._made_in(tensors)) is not None:
            if name == "softmax":
                self.found.add(type(self._inner().module))
            elif isinstance(out, Tensor):
                frame.scores[id(out)] = out
        return out

    def _meet(self, query: Tensor, keys: int, scores: Tensor | None) -> None:
        """Queries meet so many keys: attention at once, or scores to become weights; unless they are channels."""
        frame = self._inner()
        x, summed = frame.given, query.shape[-1]
        if isinstance(x, Tensor) and x.ndim in (3, 4):
            tokens = {prod(x.shape[1:-1])} if x.ndim == 3 else {prod(x.shape[1:-1]), prod(x.shape[2:])}
            if summed in tokens and keys not in tokens:
                return
        if scores is None:
            self.found.add(type(frame.module))
        else:
            frame.scores[id(scores)] = scores

    def _made_in(self, tensors: list[Tensor]) -> _Frame | None:
        """The call in which one of these became scores, which it no longer is when that call has ended."""
        found = (f for f in reversed(self.stack) for tensor in tensors if id(tensor) in f.scores)
        return next(found, None)

    def _inner(self) -> _Frame:
        return next(f for f in reversed(self.stack) if not type(f.module).__module__.startswith("torch."))
