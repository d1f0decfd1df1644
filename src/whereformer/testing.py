"""The promises that every encoding makes, so that encodings living elsewhere can be held to them by one line.

>>> from whereformer.encodings import SinCos2D
>>> check_encoding(SinCos2D, compile=False)
"""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whereformer import backends
from whereformer.attention import attention
from whereformer.catalog import Factory, spell
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import Forms
from whereformer.grid import Grid

DIM, HEADS, BATCH = 24, 3, 2
HOME = Grid(3, 4, prefix=1)
AWAY = Grid(5, 2, prefix=1)

ROUNDINGS = 512
"""Roundings between input and output of equal computations in another order: sums over features and tokens."""
FORM_ROUNDINGS = 8
"""Roundings to the tokens' dtype on the way to one form or output: sums inside are kept in float32."""


def check_encoding(factory: Factory, *, name: str | None = None, compile: bool = True) -> None:
    """Hold an encoding to every promise.

    Args:
        factory: `factory(dim, num_heads, grid)` builds the encoding: its class, or a `functools.partial` of it.
            It is asked for 24 features in 1, 2, 3 and 6 heads, of which it may refuse all but 3.
        name: what to call the encoding in messages.
        compile: whether to check torch.compile too, the slowest promise.

    Raises:
        AssertionError: a promise is broken; the message says which, on which grid, and how far off.
    """
    for promise in PROMISES:
        if promise is compiles and not compile:
            continue
        try:
            promise(factory)
        except Exception as error:
            broken = f"{name or spell(factory)} breaks the promise that it {promise.__doc__}"
            detail = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{broken}: {detail}") from error


# ---------------------------------------------------------------------------------------------------------------
# The promises. Each is a sentence that begins with "it".


def any_grid(factory: Factory) -> None:
    """works on any grid, with any number of prefix tokens, in any number of heads it accepts when built"""
    sizes = [(3, 4), (4, 4), (5, 2), (1, 6), (6, 1), (1, 1)]
    for prefix in (0, 1, 2):
        for home in (Grid(3, 4, prefix), Grid(1, 1, prefix)):
            encoding = _make(factory, home)
            for height, width in sizes:
                _check_shapes(encoding, Grid(height, width, prefix))
    for heads in (1, 2, 6):
        try:
            encoding = _make(factory, HOME, heads)
        except InputError:  # too few features, or not a multiple of what it needs
            continue
        _check_shapes(encoding, AWAY)


def _check_shapes(encoding: PositionEncoding, grid: Grid) -> None:
    where = f"{grid}, built for {encoding.grid} and {encoding.num_heads} heads"
    inputs = _inputs(encoding, grid)
    seen = _run(encoding, grid, inputs)
    for what, like in (("tokens", inputs.x), ("attention", inputs.q)):
        _hold(seen[what].shape == like.shape, f"{what} on {where} is {tuple(seen[what].shape)}")
        _hold(seen[what].dtype == like.dtype, f"{what} on {where} is {seen[what].dtype}, given {like.dtype}")
    for what, value in seen.items():
        _hold(bool(value.isfinite().all()), f"{what} on {where} is not finite")


def tells_the_truth(factory: Factory) -> None:
    """tells what it does: its moments, its blocks, its cost; and has no parameter that does nothing"""
    encoding = _make(factory, HOME)
    inputs = _inputs(encoding, HOME)
    said = _said(encoding, inputs, HOME)
    spoken = {what.split()[0] for what in said}
    if torch.equal(said["tokens"], inputs.x):
        spoken.remove("tokens")
    told = set(encoding.moments())
    _hold(told == spoken, f"moments() tells {sorted(told)}, but on {HOME} it speaks at {sorted(spoken)}")
    blocks = list(encoding.blocks(12))
    _hold(len(set(blocks)) == len(blocks), f"blocks(12) has a block twice: {blocks}")
    _hold(set(blocks) <= set(range(12)), f"blocks(12) is {blocks}")
    macs = encoding.macs(HOME)
    _hold(isinstance(macs, int) and macs >= 0, f"macs({HOME}) is {macs!r}")
    gradients = _run(encoding, HOME)
    for name, parameter in encoding.named_parameters():
        if parameter.requires_grad:
            moved = bool(gradients[f"gradient of {name}"].any())
            _hold(moved, f"parameter {name} has no gradient on {HOME}")


def keeps_only_parameters(factory: Factory) -> None:
    """has nothing but its parameters in its state_dict, and no buffer that follows the size of its input"""
    encoding = _make(factory, HOME)
    buffers = {name: buffer.shape for name, buffer in encoding.named_buffers()}
    for grid in (HOME, AWAY):
        _run(encoding, grid)
        extra = set(encoding.state_dict()) ^ {name for name, _ in encoding.named_parameters()}
        _hold(not extra, f"after {grid} its state_dict and its parameters differ in {sorted(extra)}")
        now = {name: buffer.shape for name, buffer in encoding.named_buffers()}
        _hold(now == buffers, f"after {grid} its buffers changed from {buffers} to {now}")


def counts_tokens(factory: Factory) -> None:
    """refuses a wrong number of tokens with an InputError that names the numbers"""
    encoding = _make(factory, HOME)
    for wrong in (1, HOME.patches, HOME.tokens + 1):
        inputs = _inputs(encoding, Grid(1, wrong))
        calls: list[Callable[[], object]] = [lambda i=inputs: attention(i.q, i.k, i.v, HOME, [encoding])]
        if "tokens" in encoding.moments():
            calls.append(lambda i=inputs: encoding.tokens(i.x, HOME))
        for call in calls:
            where = f"{wrong} tokens on {HOME}"
            try:
                call()
            except InputError as error:
                named = str(wrong) in str(error) and str(HOME.tokens) in str(error)
                _hold(named, f"the message for {where} does not name {wrong} and {HOME.tokens}: {error}")
            else:
                raise AssertionError(f"{where} go through")


def knows_its_prefix(factory: Factory) -> None:
    """serves prefix tokens that it was not built for, or refuses them with an InputError"""
    encoding = _make(factory, Grid(3, 4))
    for grid in (Grid(3, 4, prefix=2), Grid(2, 5, prefix=1)):
        try:
            _check_shapes(encoding, grid)
        except InputError:
            continue


def spares_prefix_tokens(factory: Factory) -> None:
    """adds to prefix tokens nothing, or rows of their own: the same whatever the grid and the patches"""
    for prefix in (0, 2):
        encoding = _make(factory, Grid(3, 4, prefix))
        added = []
        for height, width in ((3, 4), (4, 2)):
            grid = Grid(height, width, 2)
            x = _inputs(encoding, grid).x.detach()
            try:
                x_new = encoding.tokens(x, grid)
            except InputError:
                _hold(prefix == 0, f"{grid} is refused, though built for as many prefix tokens")
                continue
            where = f"{grid}, built for {encoding.grid}"
            if prefix == 0 or not list(encoding.parameters()):
                untouched = torch.equal(x_new[:, :2], x[:, :2])
                _hold(untouched, f"prefix tokens on {where} are touched, though they have no rows")
            other = torch.cat([x[:, :2] + 1, x[:, 2:]], 1)
            alone = torch.equal(encoding.tokens(other, grid)[:, 2:], x_new[:, 2:])
            _hold(alone, f"patches on {where} depend on prefix tokens")
            added.append({"what is added to prefix tokens": x_new[:, :2] - x[:, :2]})
        for one in added[1:]:
            _same(one, added[0], f"grids of two sizes, built for {encoding.grid}", roundings=4)


def keeps_to_masks(factory: Factory) -> None:
    """gives queries with nothing to attend to only what its values say of no weights, and finite gradients"""
    encoding = _make(factory, HOME)
    for grid in (HOME, AWAY, Grid(1, 1, 1)):
        inputs = _inputs(encoding, grid)
        for kind, mask, idle in _masks(encoding, grid):
            where = f"{grid} under a mask that is {kind}"
            seen = _run(encoding, grid, inputs, mask=mask)
            for what, value in seen.items():
                _hold(bool(value.isfinite().all()), f"{what} on {where} is not finite")
            no_weights = inputs.q.new_zeros(*inputs.q.shape[:-1], grid.tokens)
            rest = torch.zeros_like(inputs.q)
            for term in encoding.values(inputs.v, grid, grid):
                rest = rest + term.dense(no_weights)
            idle = idle.expand(*inputs.q.shape[:-1], 1)
            got, expected = (t.masked_fill(~idle, 0) for t in (seen["attention"], rest))
            _same({"an idle query's attention": got}, {"an idle query's attention": expected}, where, ROUNDINGS)


def backends_agree(factory: Factory) -> None:
    """is the same on every backend that can serve it, in values and in every gradient"""
    for home, grids in ((HOME, (HOME, AWAY)), (Grid(3, 4), (Grid(4, 3), Grid(1, 1)))):
        encoding = _make(factory, home)
        for grid in grids:
            masks = [("absent", None), *((kind, mask) for kind, mask, _ in _masks(encoding, grid))]
            for kind, mask in masks:
                expected = _run(encoding, grid, mask=mask)
                for backend in ("auto", *backends.FASTEST_FIRST):
                    if backend != "auto" and backends.FASTEST_FIRST[backend].cannot(_forms(encoding, grid)):
                        continue
                    got = _run(encoding, grid, mask=mask, backend=backend)
                    _same(got, expected, f"{grid} on backend {backend!r}, mask {kind}", ROUNDINGS)


def sees_one_image(factory: Factory) -> None:
    """treats each image of a batch as if it were alone"""
    encoding = _make(factory, HOME)
    for grid in (HOME, AWAY):
        inputs = _inputs(encoding, grid)
        together = _forward(encoding, inputs, grid)
        for image in range(BATCH):
            one = slice(image, image + 1)
            alone = _forward(encoding, Inputs(*(t[one] for t in inputs)), grid)
            expected = {what: value[one] for what, value in together.items()}
            _same(alone, expected, f"{grid}, alone", ROUNDINGS)


def keeps_dtypes(factory: Factory) -> None:
    """keeps the dtype of tokens, within its rounding, under autocast too; angles and positions stay exact"""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for grid in (HOME, Grid(1, 300, prefix=1)):  # bfloat16 cannot count to 300
            encoding = _make(factory, HOME).to(dtype)
            inputs = Inputs(*(t.detach().to(dtype) for t in _inputs(encoding, grid)))
            wide = copy.deepcopy(encoding).float()
            wide_inputs = Inputs(*(t.float() for t in inputs))
            truth = _Truth(encoding, inputs, grid)
            truth.check(encoding, inputs, f"{grid} in {dtype}")
            truth.check(wide, inputs, f"{grid} in {dtype}, parameters in float32")
            if dtype != torch.float32:
                with torch.autocast("cpu", dtype):
                    truth.check(wide, wide_inputs, f"{grid} under autocast to {dtype}")


class _Truth:
    """What an encoding of some dtype says in float64, and how far its own rounding may lead away."""

    def __init__(self, encoding: PositionEncoding, inputs: "Inputs", grid: Grid) -> None:
        exact = copy.deepcopy(encoding).double()
        exact_inputs = Inputs(*(t.double() for t in inputs))
        self.grid = grid
        self.said = _said(exact, exact_inputs, grid)
        self.out = _forward(exact, exact_inputs, grid)["attention"]
        unit, sums = (torch.finfo(dtype).eps / 2 for dtype in (inputs.q.dtype, torch.float32))
        self.error = FORM_ROUNDINGS * unit + grid.tokens * sums
        # A weight changes, relative to itself, by twice what a logit changes.
        _, q, k, v = exact_inputs
        logits = _size(q.abs() @ k.abs().mT) * q.shape[-1] ** -0.5
        logits += sum(_size(value) for what, value in self.said.items() if what.startswith("biases"))
        self.out_error = self.error * (1 + 2 * logits) * (_size(v) + _size(self.out))

    def check(self, encoding: PositionEncoding, inputs: "Inputs", where: str) -> None:
        said = _said(encoding, inputs, self.grid)
        kept = said["tokens"].dtype == inputs.x.dtype
        _hold(kept, f"tokens on {where} turn into {said['tokens'].dtype}")
        for what, value in self.said.items():
            _within(said[what], value, self.error * _size(value), f"{what} on {where}")
        plain = attention(inputs.q, inputs.k, inputs.v, self.grid).dtype
        for backend in ("reference", "auto"):
            out = _forward(encoding, inputs, self.grid, backend=backend)["attention"]
            what = f"attention on {where}, backend {backend!r}"
            _hold(out.dtype == plain, f"{what}, is {out.dtype}, but {plain} without encodings")
            _within(out, self.out, self.out_error, what)


def forgets_sizes(factory: Factory) -> None:
    """gives on each of several sizes in turn what a fresh one with the same state gives"""
    encoding = _make(factory, HOME)
    for height, width in ((3, 4), (4, 3), (1, 5), (3, 4), (2, 2), (1, 5)):
        grid = Grid(height, width, HOME.prefix)
        _same(_run(encoding, grid), _run(_twin(factory, encoding), grid), f"{grid}, after other sizes")


def sees_updates(factory: Factory) -> None:
    """sees parameters changed in place, or loaded, at once and without train() or eval()"""
    encoding = _make(factory, HOME)
    for grid in (HOME, AWAY):
        with torch.no_grad():
            _forward(encoding, _inputs(encoding, grid), grid)
            for parameter in encoding.parameters():
                parameter.add_(1)
        _same(_run(encoding, grid), _run(_twin(factory, encoding), grid), f"{grid}, after an update in place")
        encoding.load_state_dict({name: -value for name, value in encoding.state_dict().items()})
        _same(_run(encoding, grid), _run(_twin(factory, encoding), grid), f"{grid}, after load_state_dict")


def changes_nothing(factory: Factory) -> None:
    """changes no attribute of its own in forward, and is not kept alive by anything"""
    encoding = _make(factory, HOME).train()
    before = _snapshot(encoding)
    for grid in (HOME, AWAY):
        _run(encoding, grid)
        changed = sorted(name for name, state in _snapshot(encoding).items() if state != before.get(name))
        _hold(not changed, f"{', '.join(changed)} changed on {grid}")
    alive = weakref.ref(encoding)
    del encoding
    gc.collect()
    _hold(alive() is None, f"it is still alive after use on {HOME} and {AWAY} and `del`")


def can_be_copied(factory: Factory) -> None:
    """can be copied, pickled and saved after forward and backward, and the copy is the same"""
    encoding = _make(factory, HOME).train()
    for grid in (HOME, AWAY):
        outputs = _forward(encoding, _inputs(encoding, grid), grid)
        torch.stack([value.sum() for value in outputs.values()]).sum().backward()
    expected = _run(encoding.eval(), AWAY)
    file = io.BytesIO()
    torch.save(encoding, file)
    file.seek(0)
    copies = {
        "copy.deepcopy": copy.deepcopy(encoding),
        "pickle": pickle.loads(pickle.dumps(encoding)),
        "torch.save": torch.load(file, weights_only=False),
    }
    for way, other in copies.items():
        _same(_run(other, AWAY), expected, f"{AWAY}, copied by {way}")


def can_start_without_memory(factory: Factory) -> None:
    """can be built on the meta device, given memory, and loaded"""
    encoding = _make(factory, HOME)
    with torch.device("meta"):
        empty = factory(DIM, HEADS, HOME)
    empty = empty.double().to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)  # what memory may hold
    empty.load_state_dict(encoding.state_dict())
    for grid in (HOME, AWAY):
        _same(_run(empty, grid), _run(encoding, grid), f"{grid}, built on the meta device")


def trains_after_inference(factory: Factory) -> None:
    """trains after it was used in inference_mode"""
    encoding = _make(factory, HOME)
    for grid in (HOME, AWAY):
        expected = _run(_twin(factory, encoding), grid)
        with torch.inference_mode():
            _forward(encoding, _inputs(encoding, grid), grid)
        _same(_run(encoding, grid), expected, f"{grid}, after inference_mode")


def compiles(factory: Factory) -> None:
    """compiles whole, and is the same compiled at two sizes"""
    encoding = _make(factory, HOME)
    torch.compiler.reset()
    forward = torch.compile(_forward, fullgraph=True, backend="aot_eager")
    for grid in (HOME, AWAY):
        got = _run(encoding, grid, backend="auto", forward=forward)
        _same(got, _run(encoding, grid), f"{grid}, compiled", ROUNDINGS)
    torch.compiler.reset()


PROMISES: tuple[Callable[[Factory], None], ...] = (
    any_grid,
    tells_the_truth,
    keeps_only_parameters,
    counts_tokens,
    knows_its_prefix,
    spares_prefix_tokens,
    keeps_to_masks,
    backends_agree,
    sees_one_image,
    keeps_dtypes,
    sees_updates,
    forgets_sizes,
    can_be_copied,
    trains_after_inference,
    changes_nothing,
    can_start_without_memory,
    compiles,
)


# ---------------------------------------------------------------------------------------------------------------
# What the promises share.


class Inputs(NamedTuple):
    x: Tensor
    """Tokens before a block: [batch, tokens, dim]."""
    q: Tensor
    """[batch, heads, tokens, head_dim], not yet scaled; k and v alike."""
    k: Tensor
    v: Tensor


def _random(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def _make(factory: Factory, grid: Grid, heads: int = HEADS) -> PositionEncoding:
    """In float64, not training, its parameters random: tables that start at zero would say nothing."""
    encoding = factory(DIM, heads, grid).double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(encoding.parameters()):
            parameter.copy_(_random(*parameter.shape, seed=seed))
    return encoding


def _twin(factory: Factory, encoding: PositionEncoding) -> PositionEncoding:
    twin = factory(encoding.dim, encoding.num_heads, encoding.grid).double().train(encoding.training)
    twin.load_state_dict(encoding.state_dict())
    return twin


def _inputs(encoding: PositionEncoding, grid: Grid) -> Inputs:
    heads = (BATCH, encoding.num_heads, grid.tokens, encoding.head_dim)
    shapes = ((BATCH, grid.tokens, encoding.dim), heads, heads, heads)
    return Inputs(*(_random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)))


def _masks(encoding: PositionEncoding, grid: Grid) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Kinds of mask: a name, the mask, and which queries are idle [..., queries, 1]."""
    allowed = torch.ones(BATCH, 1, 1, grid.tokens, dtype=torch.bool)
    allowed[1, ..., grid.tokens // 2 :] = False
    yield "boolean padding", allowed, ~allowed.any(-1, keepdim=True)
    allowed = _random(BATCH, encoding.num_heads, grid.tokens, grid.tokens, seed=4) > 0
    allowed[:, 0, -1] = False
    idle = ~allowed.any(-1, keepdim=True)
    yield "boolean with idle queries", allowed, idle
    added = _random(*allowed.shape, seed=5)
    yield "additive with idle queries", added.masked_fill(~allowed, -torch.inf), idle


def _forms(encoding: PositionEncoding, grid: Grid, inputs: Inputs | None = None) -> Forms:
    _, q, k, v = _inputs(encoding, grid) if inputs is None else inputs
    q = q * q.shape[-1] ** -0.5
    return Forms(
        tuple(encoding.rotations(grid, q.device)),
        tuple(encoding.biases(q, k, grid, grid)),
        tuple(encoding.values(v, grid, grid)),
    )


def _said(encoding: PositionEncoding, inputs: Inputs, grid: Grid) -> dict[str, Tensor]:
    """What it says at each moment."""
    forms = _forms(encoding, grid, inputs)
    weights = torch.full((*inputs.q.shape[:-1], grid.tokens), 1 / grid.tokens, dtype=inputs.q.dtype)
    said = {"tokens": encoding.tokens(inputs.x, grid)}
    said |= {f"rotations {i} of q": rotate(inputs.q) for i, rotate in enumerate(forms.rotations)}
    said |= {f"biases {i}": bias.dense() for i, bias in enumerate(forms.biases)}
    said |= {f"values {i}": term.dense(weights) for i, term in enumerate(forms.values)}
    return said


def _forward(
    encoding: PositionEncoding, inputs: Inputs, grid: Grid, mask: Tensor | None = None, backend: str = "reference"
) -> dict[str, Tensor]:
    out = attention(inputs.q, inputs.k, inputs.v, grid, [encoding], mask=mask, backend=backend)
    return {"tokens": encoding.tokens(inputs.x, grid), "attention": out}


def _run(
    encoding: PositionEncoding,
    grid: Grid,
    inputs: Inputs | None = None,
    *,
    mask: Tensor | None = None,
    backend: str = "reference",
    forward: Callable[..., dict[str, Tensor]] = _forward,
) -> dict[str, Tensor]:
    """Tokens, attention, and the gradients of a weighted sum of both."""
    inputs = _inputs(encoding, grid) if inputs is None else inputs
    outputs = forward(encoding, inputs, grid, mask, backend)
    weights = [_random(*value.shape, seed=6) for value in outputs.values()]
    sources = inputs._asdict() | {n: p for n, p in encoding.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        list(outputs.values()), list(sources.values()), weights, allow_unused=True, materialize_grads=True
    )
    outputs = {what: value.detach() for what, value in outputs.items()}
    return outputs | {f"gradient of {name}": g for name, g in zip(sources, gradients, strict=True)}


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


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _size(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _same(got: dict[str, Tensor], expected: dict[str, Tensor], where: str, roundings: int = 0) -> None:
    for what, value in expected.items():
        bound = roundings * torch.finfo(value.dtype).eps * max(1.0, _size(value))
        _within(got[what], value, bound, f"{what} on {where}")


def _within(got: Tensor, expected: Tensor, bound: float, what: str) -> None:
    _hold(got.shape == expected.shape, f"{what} is {tuple(got.shape)}, not {tuple(expected.shape)}")
    error = _size(got.double() - expected.double())
    _hold(error <= bound, f"{what} is off by {error:.3g}, allowed {bound:.3g}")
