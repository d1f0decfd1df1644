"""Promises about graphs: torch.compile and torch.export. They take seconds each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whereformer.attention import attention, encode
from whereformer.grid import Grid
from whereformer.testing.subject import BATCH, DIM, HEADS, ROUNDINGS, Subject, hold, random, same

SIZES = ((3, 4), (5, 2), (6, 7), (4, 8), (7, 3), (2, 9))
RECOMPILES = 3


class _Model(nn.Module):
    """Finds out from the size of its input where tokens are: [b, dim, (frames,) height, width] to tokens."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.encoding = subject.make()
        self.start = nn.Parameter(random(subject.home.prefix, DIM, seed=7))

    def forward(self, image: Tensor) -> Tensor:
        *frames, height, width = image.shape[2:]
        grid = Grid(height, width, self.start.shape[0], *frames)
        patches = image.flatten(2).mT
        x = torch.cat([self.start.expand(patches.shape[0], -1, -1), patches], 1)
        x = encode(x, grid, [self.encoding])
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out = attention(q, q.roll(1, -1), q, grid, [self.encoding])
        return x + out.transpose(1, 2).flatten(2)


def _results(model: _Model, forward: Callable[[Tensor], Tensor], image: Tensor) -> dict[str, Tensor]:
    sources = {"image": image} | {name: p for name, p in model.named_parameters() if p.requires_grad}
    out = forward(image)
    weight = random(*out.shape, seed=6)
    gradients = torch.autograd.grad((out * weight).sum(), list(sources.values()))
    return {"output": out.detach()} | {f"gradient of {n}": g for n, g in zip(sources, gradients, strict=True)}


def _image(grid: Grid) -> Tensor:
    return random(BATCH, DIM, *grid.size, seed=0).requires_grad_()


def compiles(subject: Subject) -> None:
    """compiles whole, is the same compiled at six sizes, and is compiled anew for at most three of them"""
    model, home = _Model(subject), subject.home
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counted)
    with torch.no_grad():
        for height, width in SIZES:
            image = _image(subject.grid(height, width))
            where = f"{subject.grid(height, width)}, compiled"
            same({"output": compiled(image)}, {"output": model(image)}, where, ROUNDINGS)
    hold(len(graphs) <= 1 + RECOMPILES, f"{len(graphs)} graphs for sizes {SIZES}")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, expected = (_results(model, forward, _image(home)) for forward in (compiled, model))
    same(got, expected, f"{home}, compiled", ROUNDINGS)
    torch.compiler.reset()


def exports(subject: Subject) -> None:
    """can be exported with a free height, width and batch, and is the same at sizes it was not exported at"""
    model = _Model(subject)
    free = {0: torch.export.Dim("batch", min=1, max=64)}
    axes = len(subject.home.size)
    free |= {axes: torch.export.Dim("height", min=2, max=64), axes + 1: torch.export.Dim("width", min=2, max=64)}
    with torch.no_grad():
        exported = torch.export.export(model, (_image(subject.home),), dynamic_shapes=(free,)).module()
        for height, width, images in ((3, 4, 2), (5, 2, 1), (7, 7, 3)):
            image = random(images, DIM, *subject.grid(height, width).size, seed=0)
            where = f"{images} of {subject.grid(height, width)}, exported"
            same({"output": exported(image)}, {"output": model(image)}, where, ROUNDINGS)
