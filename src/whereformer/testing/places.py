"""Promises about places: grids, prefix tokens, kept patches, several images, two grids, offsets."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from whereformer.attention import attention, encode
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import Rotation
from whereformer.grid import Grid
from whereformer.images import Packed, Padded
from whereformer.testing.subject import (
    BATCH,
    DIM,
    HEADS,
    ROUNDINGS,
    Inputs,
    Subject,
    finite,
    forward,
    hold,
    inputs_on,
    masks,
    on_every_backend,
    run,
    same,
    with_gradients,
    within,
)


def any_grid(subject: Subject) -> None:
    """works on any grid, with any number of prefix tokens, in any number of heads it accepts when built"""
    sizes = [(3, 4), (4, 4), (5, 2), (1, 6), (6, 1), (1, 1)]
    for prefix in (0, 1, 2):
        for home in (subject.grid(3, 4, prefix), subject.grid(1, 1, prefix)):
            encoding = subject.make(home)
            for height, width in sizes:
                _serves(encoding, subject.grid(height, width, prefix))
    for heads in (1, 2, 6):
        try:
            encoding = subject.make(heads=heads)
        except InputError:  # too few features, or not a multiple of what it needs
            continue
        _serves(encoding, subject.away)


def _serves(encoding: PositionEncoding, grid: Grid, keys: Grid | None = None) -> None:
    where = f"{grid}, built for {encoding.grid} and {encoding.num_heads} heads"
    where += "" if keys is None else f", with keys on {keys}"
    inputs = inputs_on(encoding, grid, keys)
    seen = run(encoding, grid, keys, inputs=inputs)
    for what, like in (("tokens", inputs.x), ("attention", inputs.q)):
        hold(seen[what].shape == like.shape, f"{what} on {where} is {tuple(seen[what].shape)}")
        hold(seen[what].dtype == like.dtype, f"{what} on {where} is {seen[what].dtype}, given {like.dtype}")
    finite(seen, where)


def is_built_where_it_says(subject: Subject) -> None:
    """is defined on images or videos or both, as its `axes` tell, and refuses the other as it is built"""
    axes, factory = subject.make().axes, subject.factory
    plain = (
        factory.func if isinstance(factory, functools.partial) else factory
    )  # an option may be for one of the two
    for number, grid in ((2, Grid(3, 4, 1)), (3, Grid(3, 4, 1, frames=2))):
        refused = []
        for build, heads in itertools.product((factory, plain), (HEADS, 2, 1)):  # it may need more features a head
            try:
                build(DIM, heads, grid)
            except InputError as error:
                refused.append(error)
        if number in axes:
            hold(len(refused) < 6, f"axes are {axes}, but {grid} is refused: {refused[-1:]}")
        else:
            hold(len(refused) == 6, f"axes are {axes}, but {grid} is accepted")


def counts_tokens(subject: Subject) -> None:
    """refuses a wrong number of tokens with an InputError that names the numbers"""
    encoding, home = subject.make(), subject.home
    for wrong in (1, home.patches, home.tokens + 1):
        inputs = inputs_on(encoding, Grid(1, wrong))
        calls: list[Callable[[], object]] = [lambda i=inputs: attention(i.q, i.k, i.v, home, [encoding])]
        if "tokens" in encoding.moments():
            calls.append(lambda i=inputs: encoding.tokens(i.x, home))
        for call in calls:
            where = f"{wrong} tokens on {home}"
            try:
                call()
            except InputError as error:
                named = str(wrong) in str(error) and str(home.tokens) in str(error)
                hold(named, f"the message for {where} does not name {wrong} and {home.tokens}: {error}")
            else:
                raise AssertionError(f"{where} go through")


def knows_its_prefix(subject: Subject) -> None:
    """serves prefix tokens that it was not built for, or refuses them with an InputError"""
    encoding = subject.make(subject.grid(3, 4, 0))
    for grid in (subject.grid(3, 4, 2), subject.grid(2, 5, 1)):
        try:
            _serves(encoding, grid)
        except InputError:
            continue


def spares_prefix_tokens(subject: Subject) -> None:
    """adds to prefix tokens nothing, or rows of their own: the same whatever the grid and the patches"""
    for prefix in (0, 2):
        encoding = subject.make(subject.grid(3, 4, prefix))
        added = []
        for height, width in ((3, 4), (4, 2)):
            grid = subject.grid(height, width, 2)
            x = inputs_on(encoding, grid).x.detach()
            try:
                x_new = encoding.tokens(x, grid)
            except InputError:
                hold(prefix == 0, f"{grid} is refused, though built for as many prefix tokens")
                continue
            where = f"{grid}, built for {encoding.grid}"
            if prefix == 0 or not list(encoding.parameters()):
                untouched = torch.equal(x_new[:, :2], x[:, :2])
                hold(untouched, f"prefix tokens on {where} are touched, though they have no rows")
            other = torch.cat([x[:, :2] + 1, x[:, 2:]], 1)
            alone = torch.equal(encoding.tokens(other, grid)[:, 2:], x_new[:, 2:])
            hold(alone, f"patches on {where} depend on prefix tokens")
            added.append({"what is added to prefix tokens": x_new[:, :2] - x[:, :2]})
        for one in added[1:]:
            same(one, added[0], f"grids of two sizes, built for {encoding.grid}", roundings=4)


def keeps_to_masks(subject: Subject) -> None:
    """gives queries with nothing to attend to only what its values say of no weights, and finite gradients"""
    encoding = subject.make()
    for grid in (subject.home, subject.away, subject.grid(1, 1)):
        inputs = inputs_on(encoding, grid)
        for kind, mask, idle in masks(encoding, grid):
            where = f"{grid} under a mask that is {kind}"
            seen = run(encoding, grid, inputs=inputs, mask=mask)
            finite(seen, where)
            no_weights = inputs.q.new_zeros(*inputs.q.shape[:-1], grid.tokens)
            rest = torch.zeros_like(inputs.q)
            for term in encoding.values(inputs.v, grid, grid):
                rest = rest + term.dense(no_weights)
            idle = idle.expand(*inputs.q.shape[:-1], 1)
            got, expected = (t.masked_fill(~idle, 0) for t in (seen["attention"], rest))
            same({"an idle query's attention": got}, {"an idle query's attention": expected}, where, ROUNDINGS)


def sees_one_image(subject: Subject) -> None:
    """treats each image of a batch as if it were alone"""
    encoding = subject.make()
    for grid in (subject.home, subject.away):
        inputs = inputs_on(encoding, grid)
        together = forward(encoding, inputs, grid)
        for image in range(BATCH):
            one = slice(image, image + 1)
            alone = forward(encoding, inputs.map(lambda t, one=one: t[one]), grid)
            same(alone, {what: value[one] for what, value in together.items()}, f"{grid}, alone", ROUNDINGS)


def keeps_images_apart(subject: Subject) -> None:
    """gives each of several images in one tensor what it gets alone, whatever padding holds"""
    encoding = subject.make()
    grids = (subject.away, subject.home)
    for images in (Padded(grids, subject.grid(6, 5)), Packed(grids)):
        where = f"{images}"
        sources = inputs_on(encoding, Grid(1, images.tokens))
        real = images.merge([torch.ones_like(part) for part in images.split(sources.x)])[..., :1] > 0
        inputs = sources.map(lambda t, real=real: t.where(real if t.ndim == 3 else real[:, None], 1e4))
        got = {
            "tokens": encode(inputs.x, images, [encoding]),
            "attention": attention(*inputs[1:], images, [encoding]),
        }
        alone = [
            forward(encoding, Inputs(*(images.split(t)[n] for t in sources)), grid) for n, grid in enumerate(grids)
        ]
        expected = {what: images.merge([image[what] for image in alone]) for what in got}
        got, expected = (with_gradients(encoding, sources, results) for results in (got, expected))
        same(got, expected, where, ROUNDINGS)


def serves_kept_patches(subject: Subject) -> None:
    """gives kept patches what they get where the dropped ones are zeros that nothing attends to"""
    encoding = subject.make()
    for grid in (subject.home, subject.away):
        order = torch.stack([torch.randperm(grid.patches, generator=_seeded(image)) for image in range(BATCH)])
        for index in (order[:, :5], order[:1, :4], order[:, :0]):
            kept = grid.keep(index)
            where = f"{kept}, a choice for {'each image' if index.shape[0] > 1 else 'all images'}"
            prefix = torch.arange(grid.prefix).expand(BATCH, -1)
            tokens = torch.cat([prefix, index.expand(BATCH, -1) + grid.prefix], 1)
            sources = inputs_on(encoding, kept)
            whole = sources.map(lambda t, grid=grid, tokens=tokens: _scattered(t, tokens, grid.tokens))
            mask = torch.zeros(BATCH, grid.tokens, dtype=torch.bool).scatter(1, tokens, True)[:, None, None]
            there = forward(encoding, whole, grid, mask=mask)
            expected = {what: _gathered(value, tokens) for what, value in there.items()}
            expected = with_gradients(encoding, sources, expected)
            for backend in ("reference", "auto"):
                got = run(encoding, kept, inputs=sources, backend=backend)
                same(got, expected, f"{where}, backend {backend!r}", ROUNDINGS, torch.float32)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _along(x: Tensor, tokens: Tensor) -> Tensor:
    """`tokens` [b, n], with the axes of x [b, ..., n, d]."""
    index = tokens.reshape(tokens.shape[0], *[1] * (x.ndim - 3), tokens.shape[1], 1)
    return index.expand(*x.shape[:-2], -1, x.shape[-1])


def _scattered(x: Tensor, tokens: Tensor, count: int) -> Tensor:
    return x.new_zeros(*x.shape[:-2], count, x.shape[-1]).scatter(-2, _along(x, tokens), x)


def _gathered(x: Tensor, tokens: Tensor) -> Tensor:
    return x.gather(-2, _along(x, tokens))


def crosses_grids(subject: Subject) -> None:
    """serves queries and keys on two grids alike on every backend, or tells `crosses = False` and refuses them"""
    encoding, home = subject.make(), subject.home
    for keys in (subject.away, subject.grid(1, 1), subject.grid(2, 4, 0)):
        where = f"{home}, with keys on {keys}"
        inputs = inputs_on(encoding, home, keys)
        if not encoding.crosses:
            try:
                attention(*inputs[1:], home, [encoding], keys=keys)
            except InputError:
                continue
            raise AssertionError(f"crosses is False, but {where} goes through")
        try:
            _serves(encoding, home, keys)
        except InputError as error:
            hold(keys.prefix != home.prefix, f"{where} is refused, though crosses is True: {error}")
            continue
        *_, (kind, added, _) = masks(encoding, home, keys)
        for what, mask in (("absent", None), (kind, added)):
            on_every_backend(subject, encoding, home, keys, mask, where=f"{where}, mask {what}")
    if encoding.crosses:
        _some_queries(encoding, home)


def _some_queries(encoding: PositionEncoding, grid: Grid) -> None:
    """Queries that were kept attend to all keys as if all queries were there."""
    index = torch.tensor([[7, 2, 9]])
    kept, tokens = grid.keep(index), torch.cat([torch.arange(grid.prefix)[None], index + grid.prefix], 1)
    inputs = inputs_on(encoding, grid)
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    tokens = tokens.expand(BATCH, -1)
    expected = _gathered(attention(q, k, v, grid, [encoding]), tokens)
    got = attention(_gathered(q, tokens), k, v, kept, [encoding], keys=grid)
    same({"attention": got}, {"attention": expected}, f"{kept}, with keys on all of {grid}", ROUNDINGS)


def tells_if_it_goes_by_offset(subject: Subject) -> None:
    """depends in attention on offsets alone: a move of all tokens changes nothing; or tells `by_offset = False`"""
    home = subject.grid(3, 4, 0)  # prefix tokens have no place, and do not move along
    encoding = subject.make_wide(home)
    large = Grid(8, 10, 0, None if subject.frames is None else subject.frames + 1)
    move = (1, 3, 5)[-large.axes :]
    here, there = (_block(large, home, start) for start in ((0,) * large.axes, move))
    inputs = inputs_on(encoding, here)
    first, second = (forward(encoding, inputs, points)["attention"] for points in (here, there))
    where = f"{here}, moved by {move}"
    if encoding.by_offset:
        same({"attention": second}, {"attention": first}, where, ROUNDINGS, torch.float32)
    else:
        hold(not _equal(first, second), f"by_offset is False, but attention on {where} stays the same")


def _block(large: Grid, small: Grid, start: tuple[int, ...]) -> Grid:
    numbers = large.raster().reshape(large.size)
    part = numbers[tuple(slice(s, s + n) for s, n in zip(start, small.size, strict=True))]
    return large.keep(part.reshape(1, -1))


def _equal(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0, atol=ROUNDINGS * torch.finfo(torch.float32).eps)


def tells_if_it_keeps_norms(subject: Subject) -> None:
    """keeps the norm of what its rotations turn, but for their `scale`; or tells `keeps_norms = False`"""
    encoding = subject.make_wide(subject.home)
    kept = True
    for grid in (subject.home, subject.away):
        q = inputs_on(encoding, grid).q.detach()
        for rotate in encoding.rotations(grid, q.device):
            plain = dataclasses.replace(rotate, scale=1.0) if isinstance(rotate, Rotation) else rotate
            found, expected = plain(q).norm(dim=-1), q.norm(dim=-1)
            kept = kept and _equal(found, expected)
            if encoding.keeps_norms:
                bound = ROUNDINGS * torch.finfo(torch.float32).eps * max(1.0, expected.max().item())
                within(found, expected, bound, f"the norm of what is turned on {grid}")
    hold(encoding.keeps_norms or not kept, "keeps_norms is False, but the norms stay the same")
