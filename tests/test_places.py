"""Where tokens are: videos, kept patches, points, several images in one tensor, windows, two grids."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock, window_partition
from torch import Tensor

from loops import attend, close, leaf, same_gradients
from whereformer import (
    AxisBias,
    Buckets,
    DenseBias,
    Grid,
    InputError,
    MatrixRotation,
    OffsetBias,
    Packed,
    Padded,
    Points,
    Rotation,
    Windows,
    attention,
    encode,
)
from whereformer.encodings import IRPE, PEG, Learned, SinCos2D
from whereformer.index import Separable

GRID = Grid(3, 4, prefix=1)
KEPT = torch.tensor([[7, 0, 3, 10], [2, 11, 5, 4]])
VIDEO = Grid(2, 3, prefix=2, frames=3)


def test_a_video_is_counted_frame_by_frame() -> None:
    assert (VIDEO.axes, VIDEO.size, VIDEO.patches, VIDEO.tokens) == (3, (3, 2, 3), 18, 20)
    assert VIDEO.coords().tolist() == [list(p) for p in itertools.product(range(3), range(2), range(3))]
    assert repr(VIDEO) == "Grid(height=2, width=3, prefix=2, frames=3)"


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(GRID, GRID), (GRID, Grid(2, 5)), (VIDEO, VIDEO), (VIDEO, Grid(3, 1, frames=2))],
)
def test_offsets_are_query_minus_key(queries: Grid, keys: Grid) -> None:
    pairs = queries.pairs(keys)
    q, k, span = queries.coords(), keys.coords(), queries.span(keys)
    assert pairs.shape == (queries.patches, keys.patches, queries.axes)
    for i, j in itertools.product(range(queries.patches), range(keys.patches)):
        offset = [a - b for a, b in zip(q[i].tolist(), k[j].tolist(), strict=True)]
        assert pairs[i, j].tolist() == offset
        place = tuple(o + n - 1 for o, n in zip(offset, keys.size, strict=True))
        assert span[place].tolist() == offset


@pytest.mark.parametrize("grid", [GRID, VIDEO], ids=repr)
def test_kept_patches_are_those_of_the_grid(grid: Grid) -> None:
    kept = grid.keep(KEPT)
    assert (kept.patches, kept.tokens, kept.size) == (4, grid.prefix + 4, grid.size)
    assert torch.equal(kept.coords(), grid.coords()[KEPT])
    assert torch.equal(kept.raster(), KEPT)
    whole = grid.pairs(grid)
    for queries, keys in itertools.product((grid, kept), repeat=2):
        expected = torch.stack(
            [
                whole[KEPT[b] if queries is kept else slice(None)][:, KEPT[b] if keys is kept else slice(None)]
                for b in range(2)
            ]
        )
        assert torch.equal(queries.pairs(keys).expand_as(expected), expected)


def test_kept_patches_of_which_some_are_kept() -> None:
    some = GRID.keep(KEPT).keep(torch.tensor([[3, 0]]))
    assert torch.equal(some.raster(), KEPT[:, [3, 0]])
    floating = Points(3, 4, at=torch.rand(1, 5, 2))
    chosen = floating.keep(torch.tensor([[4], [1]]))
    assert torch.equal(chosen.coords(), floating.coords()[0, [[4], [1]]])


def test_points_beyond_the_grid_are_fine_for_functions_of_coordinates() -> None:
    """And gradients come back to them."""
    at = torch.tensor([[[-5.5, 100.25], [2.0, 1.0]]], dtype=torch.float64, requires_grad=True)
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    out = encode(x, Points(3, 4, at=at), [SinCos2D(8, 2, GRID)])
    angles = at.detach().float()[..., None] / 10000.0 ** (torch.arange(2) / 2)
    waves = torch.cat([f(angles[:, :, a]) for a in (1, 0) for f in (torch.sin, torch.cos)], -1)
    torch.testing.assert_close(out.detach().float(), waves)
    (gradient,) = torch.autograd.grad(out.sum(), at)
    assert gradient.abs().min() > 0


@pytest.mark.parametrize("grid", [GRID, Grid(3, 4)], ids=repr)
def test_all_patches_may_be_dropped(grid: Grid) -> None:
    kept = grid.keep(torch.zeros(2, 0, dtype=torch.int64))
    encodings = [Learned(8, 2, grid), PEG(8, 2, grid), IRPE(8, 2, grid, on="qkv")]
    assert encode(torch.zeros(2, grid.prefix, 8), kept, encodings).shape == (2, grid.prefix, 8)
    assert attention(*[torch.zeros(2, 2, grid.prefix, 4)] * 3, kept, encodings).shape == (2, 2, grid.prefix, 4)


def test_kept_patches_and_packs_compile_whole() -> None:
    """The places are made inside, from tensors: as many graphs as it takes, and no break."""
    before, inside = [Learned(8, 2, GRID), SinCos2D(8, 2, GRID), PEG(8, 2, GRID)], [IRPE(8, 2, GRID, on="qkv")]

    def forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        pack = Packed((GRID.keep(first), Grid(4, 5, 1).keep(second)))
        x = encode(x, pack, before)
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return attention(q, q, q, pack, inside)

    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for kept in ((5, 3), (3, 8)):
        first, second = (torch.rand(2, n).argsort()[:, :k] for n, k in zip((12, 20), kept, strict=True))
        x = torch.randn(2, sum(kept) + 2, 8)
        torch.testing.assert_close(compiled(x, first, second), forward(x, first, second))


@pytest.mark.parametrize("grid", [GRID, VIDEO], ids=repr)
@pytest.mark.parametrize("between", [(), (3,)])
def test_tokens_to_image_and_back(grid: Grid, between: tuple[int, ...]) -> None:
    x = torch.randn(2, *between, grid.tokens, 5)
    image = grid.lay(x)
    assert image.shape == (2, *between, *grid.size, 5)
    assert torch.equal(grid.pick(image), x[..., grid.prefix :, :])
    kept = grid.keep(KEPT)
    index = (KEPT + grid.prefix).reshape(2, *[1] * len(between), 4, 1).expand(2, *between, 4, 5)
    part = torch.cat([x[..., : grid.prefix, :], x.gather(-2, index)], -2)
    sparse = kept.lay(part)
    assert torch.equal(kept.pick(sparse), part[..., grid.prefix :, :])
    assert torch.equal(kept.pick(image), part[..., grid.prefix :, :])
    assert (sparse.ne(0).any(-1).flatten(1 + len(between)).sum(-1) == 4).all(), "the others are zeros"


IRPES = [
    IRPE(8, 2, GRID, on="qkv", ratio=1.0),
    IRPE(8, 2, GRID, method="quantization", quant="rank", shared=False),
    IRPE(8, 2, GRID, mode="bias", method="cross", on="qk", shared=False),
]


def randomized(encoding: IRPE) -> IRPE:
    for table in encoding.double().tables.values():
        torch.nn.init.normal_(table)
    return encoding


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("encoding", IRPES, ids=IRPE.extra_repr)
def test_dropping_then_attending_is_attending_with_the_dropped_masked(encoding: IRPE, backend: str) -> None:
    randomized(encoding)
    q, k, v = (leaf(2, 2, GRID.tokens, 4) for _ in range(3))
    index = torch.cat([torch.zeros(2, 1, dtype=torch.long), KEPT + 1], 1)
    allowed = torch.zeros(2, 1, 1, GRID.tokens, dtype=torch.bool).scatter(-1, index[:, None, None], True)

    def rows(x: Tensor) -> Tensor:
        return x.gather(2, index[:, None, :, None].expand(2, 2, -1, 4))

    masked = rows(attention(q, k, v, GRID, [encoding], mask=allowed))
    dropped = attention(rows(q), rows(k), rows(v), GRID.keep(KEPT), [encoding], backend=backend)
    same_gradients(dropped, masked, {"q": q, "k": k, "v": v} | dict(encoding.named_parameters()))


@pytest.mark.parametrize("make", [Learned, SinCos2D], ids=lambda cls: cls.__name__)
def test_dropping_then_encoding_is_encoding_then_dropping(make: type[Learned] | type[SinCos2D]) -> None:
    encoding = make(8, 2, GRID).double()
    x = leaf(2, GRID.tokens, 8)
    for grid in (GRID, Grid(5, 3, prefix=1)):
        x = leaf(2, grid.tokens, 8)
        index = torch.cat([torch.zeros(2, 1, dtype=torch.long), KEPT + 1], 1)[..., None].expand(-1, -1, 8)
        expected = encode(x, grid, [encoding]).gather(1, index)
        got = encode(x.gather(1, index), grid.keep(KEPT), [encoding])
        same_gradients(got, expected, {"x": x} | dict(encoding.named_parameters()))


def test_a_convolution_sees_zeros_where_patches_were_dropped() -> None:
    encoding = PEG(8, 2, GRID).double()
    x = leaf(2, 5, 8)
    image = torch.zeros(2, 8, 3, 4, dtype=torch.float64)
    for b, n in itertools.product(range(2), range(4)):
        y, x_ = divmod(KEPT[b, n].item(), 4)
        image[b, :, int(y), int(x_)] = x[b, 1 + n]
    here = torch.nn.functional.conv2d(image, encoding.weight, encoding.bias, padding=1, groups=8).flatten(2).mT
    patches = x[:, 1:] + here.gather(1, KEPT[..., None].expand(-1, -1, 8))
    expected = torch.cat([x[:, :1], patches], 1)
    same_gradients(encode(x, GRID.keep(KEPT), [encoding]), expected, {"x": x} | dict(encoding.named_parameters()))


class Distance(SinCos2D):
    """A function of the offset, anywhere."""

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return x

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        def bias(offsets: Tensor) -> Tensor:
            slopes = torch.tensor([1.0, 0.5], dtype=q.dtype)
            return -slopes.reshape(2, *[1] * (offsets.ndim - 1)) * offsets.to(q.dtype).square().sum(-1)

        return (OffsetBias.of(bias, queries, keys),)


@pytest.mark.parametrize("kind", ["grid", "kept", "points"])
def test_a_function_of_offsets_on_two_grids(kind: str) -> None:
    keys = Grid(2, 5, prefix=2)
    floating = torch.tensor([[[0.5, 1.25], [2.0, -1.0]], [[0.0, 0.0], [1.0, 3.5]]])
    queries = {"grid": GRID, "kept": GRID.keep(KEPT), "points": Points(3, 4, 1, at=floating)}[kind]
    q, (k, v) = leaf(2, 2, queries.tokens, 4), (leaf(2, 2, keys.tokens, 4) for _ in range(2))
    got = attention(q, k, v, queries, [Distance(8, 2, GRID)], keys=keys)
    at = queries.coords().expand(2, -1, -1)

    def bias(i: int, j: int) -> Tensor:
        if i < queries.prefix or j < keys.prefix:
            return torch.zeros(2, 2, dtype=torch.float64)
        y, x = divmod(j - keys.prefix, keys.width)
        squared = (at[:, i - 1, 0] - y) ** 2 + (at[:, i - 1, 1] - x) ** 2
        return -squared.double()[:, None] * torch.tensor([1.0, 0.5], dtype=torch.float64)

    same_gradients(got, attend(q, k, v, bias), {"q": q, "k": k, "v": v})


def test_irpe_between_two_grids() -> None:
    """Both count from one origin: the pairs are those of a grid that holds both."""
    queries, keys, both = Grid(3, 2), Grid(2, 4), Grid(3, 4)
    encoding = randomized(IRPE(8, 2, both, on="qkv", ratio=1.0))
    at = [[y * 4 + x for y in range(g.height) for x in range(g.width)] for g in (queries, keys)]
    q, k, v = (leaf(1, 2, 12, 4) for _ in range(3))
    allowed = torch.zeros(12, dtype=torch.bool).scatter(0, torch.tensor(at[1]), True)
    expected = attention(q, k, v, both, [encoding], mask=allowed)[:, :, at[0]]
    got = attention(q[:, :, at[0]], k[:, :, at[1]], v[:, :, at[1]], queries, [encoding], keys=keys)
    same_gradients(got, expected, {"q": q, "k": k, "v": v} | dict(encoding.named_parameters()))


def test_forms_on_kept_patches_are_gathered() -> None:
    kept = GRID.keep(KEPT)
    table, rows, columns = leaf(2, 5, 7), leaf(2, 2, 5, 3), leaf(2, 2, 5, 4)
    whole = OffsetBias(table, GRID, GRID).dense()
    index = torch.cat([torch.zeros(2, 1, dtype=torch.long), KEPT + 1], 1)
    expected = torch.stack([whole[:, i][:, :, i] for i in index])
    close(OffsetBias(table, kept, kept).dense(), expected)
    axis = AxisBias(rows, columns, GRID).dense()
    close(AxisBias(rows, columns, kept).dense(), torch.stack([axis[b][..., index[b]] for b in range(2)]))
    buckets = Separable(None, IRPES[0].index)
    ids = Buckets(buckets, GRID, GRID).dense()
    assert torch.equal(Buckets(buckets, kept, kept).dense(), torch.stack([ids[i][:, i] for i in index]))


def test_a_rotation_by_matrices() -> None:
    angles = leaf(2, 12, 2)
    c, s = angles.cos(), angles.sin()
    blocks = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    matrices = torch.zeros(2, 12, 4, 4, dtype=torch.float64)
    for n in range(2):
        matrices[..., 2 * n : 2 * n + 2, 2 * n : 2 * n + 2] = blocks[:, :, n]
    x = leaf(3, 2, 13, 4)
    same_gradients(MatrixRotation(matrices)(x), Rotation(angles)(x), {"x": x, "angles": angles})
    batch = MatrixRotation(matrices.expand(3, -1, -1, -1, -1))
    close(batch(x), Rotation(angles.expand(3, -1, -1, -1))(x))
    close(Rotation(angles, scale=1.5)(x)[..., 1:, :], 1.5 * Rotation(angles)(x)[..., 1:, :])


IMAGES: list[Callable[[], Packed | Padded]] = [
    lambda: Packed((Grid(2, 3, prefix=1), Grid(4, 1), Grid(2, 3, prefix=2))),
    lambda: Padded((Grid(2, 3, prefix=1), Grid(4, 1, prefix=1))),
    lambda: Padded((Grid(2, 3), Grid(4, 1)), Grid(5, 4)),
]


@pytest.mark.parametrize("make", IMAGES)
def test_in_company_as_alone(make: Callable[[], Packed | Padded]) -> None:
    images = make()
    encodings = [
        PEG(8, 2, GRID).double(),
        Learned(8, 2, Grid(3, 4), prefix_rows=False).double(),
        randomized(IRPE(8, 2, GRID, on="qkv", ratio=1.0)),
    ]
    batch = 2
    x, q, k, v = leaf(batch, images.tokens, 8), *(leaf(batch, 2, images.tokens, 4) for _ in range(3))
    mask = torch.randn(batch, 1, images.tokens, images.tokens) > -1
    tokens, out = encode(x, images, encodings), attention(q, k, v, images, encodings, mask=mask)
    real = torch.zeros(batch, images.tokens, dtype=torch.bool)
    for (rows, at), grid in zip(images.parts(), images.grids, strict=True):
        close(tokens[rows][:, at], encode(x[rows][:, at], grid, encodings))
        alone = attention(
            *(t[rows][:, :, at] for t in (q, k, v)), grid, encodings, mask=mask[rows][:, :, at][..., at]
        )
        close(out[rows][:, :, at], alone)
        real[rows] = real[rows].index_fill(1, at, True)
    assert not tokens[~real].any()
    assert not out.transpose(1, 2)[~real].any()


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (5, 6), (3, 3)])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_windows_are_those_of_swin(size: tuple[int, int], shift: int) -> None:
    block = SwinTransformerBlock(4, size, num_heads=1, window_size=4, shift_size=shift, dynamic_mask=True)
    window = tuple(min(4, n) for n in size)
    shifts = tuple(shift if n > 4 else 0 for n in size)
    assert tuple(block.shift_size) == shifts
    windows = Windows(Grid(*size), window, shifts)
    x = torch.randn(2, math.prod(size), 4)
    padded = torch.nn.functional.pad(
        x.unflatten(1, size), (0, 0, 0, -size[1] % window[1], 0, -size[0] % window[0])
    )
    cut = window_partition(padded.roll([-s for s in shifts], (1, 2)), window).flatten(1, 2)
    assert torch.equal(windows.split(x), cut)
    assert torch.equal(windows.merge(windows.split(x)), x)
    theirs = block.get_attn_mask(x=padded) if any(shifts) else None
    ours = windows.mask(2, padding=False)
    count = math.prod(windows.counts)
    assert ours.shape == (2 * count, 1, math.prod(window), math.prod(window))
    expected = torch.ones_like(ours[:count, 0]) if theirs is None else theirs == 0
    assert torch.equal(ours[:, 0], expected.repeat(2, 1, 1))


def test_padding_of_windows_is_not_attended_to() -> None:
    windows = Windows(Grid(3, 5), (2, 3), (1, 1))
    real = windows.split(torch.ones(1, 15, 1))[..., 0] > 0
    expected = windows.mask(1, padding=False)[:, 0] & real[:, None]
    assert torch.equal(windows.mask(1)[:, 0], expected)
    assert not expected.all()


def test_windows_of_a_video() -> None:
    grid = Grid(4, 6, frames=3)
    windows = Windows(grid, (2, 2, 3), (1, 1, 0))
    x = torch.arange(grid.patches).reshape(1, -1, 1)
    split = windows.split(x)
    assert split.shape == (8, 12, 1)
    assert torch.equal(windows.merge(split), x)
    assert windows.one == Grid(2, 3, frames=2)
    one = Windows(grid, (2, 2, 3)).split(x)[1, :, 0].tolist()
    assert one == [t * 24 + y * 6 + x for t, y, x in itertools.product(range(2), range(2), range(3, 6))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Grid(2, 3, frames=0), "frames=0"),
        (lambda: GRID.keep(torch.tensor([1, 2])), r"index \(2,\) torch.int64, expected \[batch or 1, kept\]"),
        (lambda: GRID.keep(torch.tensor([[12]])), "index from 12 to 12, but .* 0 to 11"),
        (lambda: Points(3, 4, at=torch.zeros(1, 2, 3)), r"at \(1, 2, 3\), expected \[batch or 1, points, 2\]"),
        (lambda: Points(3, 4, at=torch.zeros(1, 2, 2)).raster(), "lies between patches"),
        (lambda: Points(3, 4, at=torch.tensor([[[2, 3], [0, 4]]])), r"at from \[0, 3\] to \[2, 4\], .* \(3, 4\)"),
        (lambda: Points(3, 4, at=torch.tensor([[[2, 3], [-1, 0]]])), r"at from \[-1, 0\]"),
        (lambda: GRID.keep(KEPT).keep(torch.tensor([[4]])), "index from 4 to 4, but .* 0 to 3"),
        (lambda: encode(torch.zeros(3, 5, 8), GRID.keep(KEPT), []), "x has a batch of 3, but .* has one of 2"),
        (lambda: attention(*[torch.zeros(1, 2, 5, 4)] * 3, GRID.keep(KEPT)), "q has a batch of 1, .* one of 2"),
        (lambda: encode(torch.zeros(3, 13, 8), Padded((GRID, GRID)), []), "batch of 3, but Padded has 2 images"),
        (lambda: attention(*[torch.zeros(1, 2, 13, 4)] * 3, Padded((GRID, GRID))), "batch of 1, but Padded has 2"),
        (lambda: encode(torch.zeros(3, 13, 8), (3, 4), []), r"grid=\(3, 4\), expected a whereformer.Grid"),  # type: ignore[arg-type]
        (lambda: encode(torch.zeros(13, 8), GRID, []), r"x is \(13, 8\), expected tokens"),
        (lambda: GRID.offsets(VIDEO), "expected two images or two videos"),
        (lambda: IRPE(8, 2, VIDEO), "IRPE: .*frames=3.*defined on images"),
        (lambda: Packed(()), "no grids"),
        (lambda: Padded((GRID, Grid(2, 2))), "same prefix"),
        (lambda: Padded((GRID, VIDEO)), "images alone or videos alone"),
        (lambda: Packed((GRID, GRID)).split(torch.zeros(1, 25, 2)), "25 tokens, but .* has 26"),
        (lambda: Windows(GRID, (2, 2)), "without prefix tokens"),
        (lambda: Windows(Grid(4, 4), (2, 2), (2, 0)), r"shift=\(2, 0\)"),
        (lambda: Windows(Grid(4, 4), (2, 0)), r"window=\(2, 0\)"),
        (lambda: Windows(Grid(4, 4), 2), "window=2, expected 2 positive integers"),  # type: ignore[arg-type]
        (lambda: Windows(Grid(4, 4), (2, 2), (0.5, 0)), r"shift=\(0.5, 0\)"),  # type: ignore[arg-type]
        (lambda: Windows(Grid(4, 4), (2, 2)).merge(torch.zeros(3, 4, 2)), r"merge: \(3, 4, 2\), .* 4 windows"),
        (lambda: attention(*[torch.zeros(1, 1, 13, 4)] * 3, Packed((GRID,)), mask=3), "mask=3"),  # type: ignore[arg-type]
        (
            lambda: attention(*[torch.zeros(1, 1, 13, 4)] * 3, GRID, keys=Packed((GRID,))),
            "as many images on both sides",
        ),
        (
            lambda: attention(*[torch.zeros(1, 1, 13, 4)] * 3, Packed((GRID,)), mask=torch.ones(2, 1, 1, 13)),
            "mask .* broadcasts to",
        ),
        (
            lambda: attention(*[torch.zeros(1, 2, 13, 4)] * 3, GRID, [OneGrid(8, 2, GRID)], keys=Grid(12, 1, 1)),
            "OneGrid says nothing .* two grids",
        ),
    ],
)
def test_what_cannot_be(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


class OneGrid(SinCos2D):
    crosses = False
