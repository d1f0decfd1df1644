"""Encodings of the tokens: sincos2d, learned, peg; against formulas and against timm."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models.twins import PosConv
from torch import Tensor

from loops import close, leaf, same_gradients
from whereformer import Grid, InputError
from whereformer.encodings import PEG, Learned, NoPositions, SinCos2D
from whereformer.encodings.sincos import Layout
from whereformer.resample import resample

LAYOUTS: tuple[Any, ...] = get_args(Layout)
HALVES = (torch.bfloat16, torch.float16)


def added(encoding: SinCos2D | Learned, grid: Grid) -> Tensor:
    """What an encoding adds to zeros: [patches, dim]."""
    return encoding.tokens(torch.zeros(1, grid.tokens, encoding.dim), grid)[0, grid.prefix :]


# none


def test_none_adds_nothing() -> None:
    x = torch.randn(2, 7, 8)
    assert NoPositions(8, 2, Grid(2, 3, prefix=1)).tokens(x, Grid(2, 3, prefix=1)) is x


# sincos2d


@pytest.mark.parametrize(("height", "width"), [(14, 14), (3, 7), (1, 5)])
def test_sincos_layouts_are_timms(height: int, width: int) -> None:
    """MAE's is MoCo's with the axes' halves exchanged. Angles up to 13 in float32: a few roundings of 13."""
    grid = Grid(height, width)
    plain, interleaved = (
        build_sincos2d_pos_embed([height, width], dim=24, interleave_sin_cos=interleave)
        for interleave in (False, True)
    )
    peers: list[tuple[Any, Tensor]] = [
        ("timm", plain),
        ("moco", interleaved),
        ("mae", interleaved.roll(12, -1)),
    ]
    for layout, expected in peers:
        close(SinCos2D(24, 3, grid, layout=layout).table(grid), expected, roundings=4 * max(height, width))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [10000.0, 20.0])
def test_sincos_is_its_formula(layout: Any, temperature: float) -> None:
    """Channel by channel in float64; float32 rounds angles up to 300."""
    grid, dim = Grid(3, 300), 16
    count = dim // 4
    omegas = [temperature ** -(k / (count - 1 if layout == "big_vision" else count)) for k in range(count)]
    rows = []
    for y, x in itertools.product(range(grid.height), range(grid.width)):
        sin_y, cos_y = [math.sin(w * y) for w in omegas], [math.cos(w * y) for w in omegas]
        sin_x, cos_x = [math.sin(w * x) for w in omegas], [math.cos(w * x) for w in omegas]
        rows.append(
            {
                "mae": [*sin_x, *cos_x, *sin_y, *cos_y],
                "big_vision": [*sin_x, *cos_x, *sin_y, *cos_y],
                "moco": [*sin_y, *cos_y, *sin_x, *cos_x],
                "timm": [*sin_y, *sin_x, *cos_y, *cos_x],
                "detr": [
                    *itertools.chain(*zip(sin_y, cos_y, strict=True)),
                    *itertools.chain(*zip(sin_x, cos_x, strict=True)),
                ],
            }[layout]
        )
    found = SinCos2D(dim, 2, grid, layout=layout, temperature=temperature).table(grid)
    error = (found.double() - torch.tensor(rows, dtype=torch.float64)).abs().max()
    assert error <= 4 * torch.finfo(torch.float32).eps * 300


def test_sincos_numbers_of_mae() -> None:
    table = SinCos2D(8, 1, Grid(2, 2)).table(Grid(2, 2))
    right = torch.tensor([0.84147, 0.0099998, 0.54030, 0.99995, 0, 0, 1, 1])
    torch.testing.assert_close(table[1], right, rtol=0, atol=5e-6)
    torch.testing.assert_close(table[2], torch.cat([right[4:], right[:4]]), rtol=0, atol=5e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sincos_knows_rows_from_columns(layout: Any) -> None:
    """Token k of 3 x 4 lies in row k // 4 and column k % 4, as the channels of frequency 1 tell."""
    grid = Grid(3, 4)
    table = SinCos2D(16, 1, grid, layout=layout).table(grid)
    sin_x, cos_x, sin_y, cos_y = {
        "mae": (0, 4, 8, 12),
        "big_vision": (0, 4, 8, 12),
        "moco": (8, 12, 0, 4),
        "timm": (4, 12, 0, 8),
        "detr": (8, 9, 0, 1),
    }[layout]
    columns = torch.atan2(table[:, sin_x], table[:, cos_x]).remainder(2 * math.pi).round()
    rows = torch.atan2(table[:, sin_y], table[:, cos_y]).remainder(2 * math.pi).round()
    assert columns.tolist() == [k % 4 for k in range(12)]
    assert rows.tolist() == [k // 4 for k in range(12)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sincos_of_the_transposed_grid_has_its_axes_swapped(layout: Any) -> None:
    encoding = SinCos2D(16, 1, Grid(3, 5), layout=layout)
    wide = encoding.table(Grid(3, 5)).unflatten(0, (3, 5))
    tall = encoding.table(Grid(5, 3)).unflatten(0, (5, 3)).transpose(0, 1)
    swap = {
        "mae": [*range(8, 16), *range(8)],
        "big_vision": [*range(8, 16), *range(8)],
        "moco": [*range(8, 16), *range(8)],
        "detr": [*range(8, 16), *range(8)],
        "timm": [*range(4, 8), *range(4), *range(12, 16), *range(8, 12)],
    }[layout]
    assert torch.equal(wide, tall[..., swap])


def test_sincos_layouts_are_permutations_of_one_another() -> None:
    grid = Grid(4, 5)
    tables = [SinCos2D(16, 1, grid, layout=layout).table(grid) for layout in LAYOUTS if layout != "big_vision"]
    channels = [sorted(table.T.tolist()) for table in tables]
    assert all(other == channels[0] for other in channels)
    assert len({tuple(table.flatten().tolist()) for table in tables}) == len(tables)


def test_sincos_keeps_nothing_and_trains_nothing() -> None:
    encoding = SinCos2D(16, 1, Grid(3, 5))
    grids = [Grid(20, 20), Grid(10, 10), Grid(16, 25), Grid(25, 16)]
    training = [added(encoding.train(), grid) for grid in grids]
    evaluation = [added(encoding.eval(), grid) for grid in reversed(grids)]
    assert all(torch.equal(a, b) for a, b in zip(training, reversed(evaluation), strict=True))
    assert not encoding.state_dict()
    assert not list(encoding.parameters())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sincos_of_half_tokens_is_rounded_once(dtype: torch.dtype) -> None:
    grid = Grid(2, 300)
    encoding = SinCos2D(16, 1, grid).to(dtype)
    found = encoding.tokens(torch.zeros(1, 600, 16, dtype=dtype), grid)[0]
    assert torch.equal(found, encoding.table(grid).to(dtype))


@pytest.mark.parametrize(
    ("dim", "options", "message"),
    [
        (10, {}, "dim=10, expected a multiple of 4"),
        (4, {"layout": "big_vision"}, "dim=4.*at least 8"),
        (8, {"layout": "vit"}, "layout='vit', expected one of .*'mae'"),
        (8, {"temperature": 0}, "temperature=0"),
    ],
)
def test_sincos_refuses(dim: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SinCos2D(dim, 1, Grid(2, 2), **options)


# resample

MODES = [(mode, antialias) for mode in ("bicubic", "bilinear") for antialias in (True, False)]


def interpolate(table: Tensor, size: tuple[int, int], mode: str, antialias: bool) -> Tensor:
    image = table.permute(2, 0, 1)[None]
    return F.interpolate(image, size, mode=mode, antialias=antialias)[0].permute(1, 2, 0)


@pytest.mark.parametrize(("mode", "antialias"), MODES)
@pytest.mark.parametrize("size", [(20, 9), (7, 28), (37, 37), (5, 5), (2, 3), (14, 20)])
def test_resample_is_torchs_interpolation(mode: str, antialias: bool, size: tuple[int, int]) -> None:
    """Up and down; two sums of <= 14 products in float32, whose weights are rounded from positions up to 14."""
    table = torch.randn(14, 14, 3)
    found = resample(table, size, mode=mode, antialias=antialias)
    close(found, interpolate(table, size, mode, antialias), roundings=4 * 14)


@pytest.mark.parametrize("source", [7, 14, 16, 24, 37])
def test_resample_gives_the_size_that_was_asked_for(source: int) -> None:
    table = torch.randn(source, source, 1)
    for height in range(1, 129):
        assert resample(table, (height, 129 - height)).shape == (height, 129 - height, 1)


@pytest.mark.parametrize(("mode", "antialias"), MODES)
def test_resample_to_the_same_grid_changes_nothing(mode: str, antialias: bool) -> None:
    table = torch.randn(5, 7, 3)
    assert torch.equal(resample(table, (5, 7), mode=mode, antialias=antialias), table)


def test_resample_keeps_rows_rows_and_columns_columns() -> None:
    """Row and column numbers of 4 x 16, to 8 x 8 and back: rows vary along columns alone, and the reverse."""
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(16.0), indexing="ij")
    there = resample(torch.stack([y, x], -1), (8, 8), mode="bilinear")
    back = resample(there, (4, 16), mode="bilinear")
    for table in (there, back):
        assert table[..., 0].std(1).max() < 16 * torch.finfo(torch.float32).eps * 4
        assert table[..., 1].std(0).max() < 16 * torch.finfo(torch.float32).eps * 16
        assert (table[..., 0].diff(dim=0) > 0).all()
        assert (table[..., 1].diff(dim=1) >= 0).all()


@pytest.mark.parametrize(("mode", "antialias"), MODES)
def test_resample_to_one_column_is_the_transpose_of_one_row(mode: str, antialias: bool) -> None:
    """torch's own antialiased interpolation is wrong at an output width of 1."""
    for old, new in ((8, 4), (12, 5), (3, 7)):
        for wide in (1, 3):
            table = torch.randn(old, wide, 2)
            column = resample(table, (new, 1), mode=mode, antialias=antialias)
            row = resample(table.transpose(0, 1), (1, new), mode=mode, antialias=antialias)
            close(column, row.transpose(0, 1), roundings=16)


def test_resample_of_eight_numbers_to_four() -> None:
    found = resample(torch.arange(8.0).view(8, 1, 1), (4, 1), mode="bilinear").flatten()
    torch.testing.assert_close(found, torch.tensor([0.714, 2.5, 4.5, 6.286]), rtol=0, atol=5e-4)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("mode", "antialias"), MODES)
def test_resample_in_half_precision_rounds_once(
    mode: str, antialias: bool, dtype: torch.dtype, autocast: bool
) -> None:
    table = torch.randn(14, 14, 3).to(dtype)
    expected = resample(table.float(), (9, 20), mode=mode, antialias=antialias).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = resample(table, (9, 20), mode=mode, antialias=antialias)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("mode", "antialias"), MODES)
def test_resample_in_float64_is_exact(mode: str, antialias: bool) -> None:
    table = torch.randn(14, 14, 3, dtype=torch.float64)
    found = resample(table, (9, 20), mode=mode, antialias=antialias)
    assert found.dtype == torch.float64
    close(found, interpolate(table, (9, 20), mode, antialias), roundings=4 * 14)


# learned


@pytest.mark.parametrize(("home", "grid"), [((14, 14), (20, 9)), ((14, 14), (10, 10)), ((4, 6), (7, 3))])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_learned_on_another_grid_is_timms(home: tuple[int, int], grid: tuple[int, int], prefix: int) -> None:
    encoding = Learned(8, 2, Grid(*home, prefix))
    torch.nn.init.normal_(encoding.table)
    expected = resample_abs_pos_embed(
        encoding.table[None], list(grid), old_size=list(home), num_prefix_tokens=prefix
    )[0]
    found = encoding.tokens(torch.zeros(1, expected.shape[0], 8), Grid(*grid, prefix))[0]
    close(found, expected, roundings=4 * 14)
    assert torch.equal(found[:prefix], encoding.table[:prefix]), "prefix rows are not resampled"


@pytest.mark.parametrize(("prefix", "rows"), [(0, 0), (1, 1), (1, 0), (2, 2), (5, 5), (5, 0)])
def test_learned_counts_prefix_tokens_and_prefix_rows_apart(prefix: int, rows: int) -> None:
    encoding = Learned(8, 2, Grid(3, 4, prefix), prefix_rows=rows > 0)
    assert encoding.table.shape == (12 + rows, 8)
    for grid in (Grid(3, 4, prefix), Grid(5, 2, prefix)):
        x = torch.zeros(1, grid.tokens, 8)
        out = encoding.tokens(x, grid)[0]
        expected = encoding.table[:prefix] if rows else torch.zeros(prefix, 8)
        assert torch.equal(out[:prefix], expected)
        assert (out[prefix:] != 0).all()


def test_learned_adds_its_rows_and_not_the_tokens_again() -> None:
    """On the home grid exactly, through the same path as on any other."""
    grid = Grid(3, 4, prefix=1)
    encoding, x = Learned(8, 2, grid), torch.randn(2, 13, 8)
    assert torch.equal(encoding.tokens(x, grid), x + encoding.table)


def test_learned_on_a_grid_of_as_many_patches_is_resampled() -> None:
    encoding = Learned(8, 2, Grid(2, 8))
    torch.nn.init.normal_(encoding.table)
    found = added(encoding, Grid(4, 4)).unflatten(0, (4, 4))
    home = encoding.table.unflatten(0, (2, 8))
    assert not torch.equal(found.flatten(0, 1), encoding.table)
    close(found, interpolate(home, (4, 4), "bicubic", True), roundings=4 * 8)


def test_learned_has_a_row_for_each_token_and_none_for_others() -> None:
    grid = Grid(3, 4, prefix=2)
    encoding = Learned(8, 2, grid)
    for token in range(grid.tokens):
        encoding.table.grad = None
        encoding.tokens(torch.zeros(1, grid.tokens, 8), grid)[0, token].sum().backward()
        assert encoding.table.grad is not None
        assert encoding.table.grad.any(-1).nonzero().flatten().tolist() == [token]


def test_learned_starts_truncated_normal() -> None:
    """40,000 samples: the standard deviation of their deviation is 0.35 %; at 2 sigma nothing is cut visibly."""
    table = Learned(200, 2, Grid(10, 20), std=0.02).table
    assert abs(table.std().item() / 0.02 - 1) < 5 * 0.0035
    assert abs(table.mean().item()) < 5 * 0.02 / 200


def test_learned_refuses_another_number_of_prefix_tokens() -> None:
    encoding = Learned(8, 2, Grid(3, 4, prefix=1))
    with pytest.raises(InputError, match=r"rows for 1 prefix tokens, but .*prefix=2"):
        encoding.tokens(torch.zeros(1, 14, 8), Grid(3, 4, prefix=2))


# peg


@pytest.mark.parametrize(("height", "width"), [(6, 6), (3, 7), (1, 1)])
def test_peg_is_timms(height: int, width: int) -> None:
    encoding, peer = PEG(8, 2, Grid(6, 6)), PosConv(8, 8)
    peer.proj[0].load_state_dict(encoding.state_dict())  # type: ignore[union-attr]
    x = torch.randn(2, height * width, 8)
    close(encoding.tokens(x, Grid(height, width)), peer(x, [height, width]), roundings=16)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("prefix", [0, 2])
def test_peg_is_its_sum_over_neighbours(kernel_size: int, prefix: int) -> None:
    grid = Grid(3, 4, prefix)
    encoding = PEG(8, 2, grid, kernel_size=kernel_size).double()
    torch.nn.init.normal_(encoding.bias)
    x = leaf(2, grid.tokens, 8)
    reach = kernel_size // 2
    rows = [x[:, n] for n in range(prefix)]
    for y, c in itertools.product(range(3), range(4)):
        row = x[:, prefix + 4 * y + c] + encoding.bias
        for dy, dx in itertools.product(range(-reach, reach + 1), repeat=2):
            if 0 <= y + dy < 3 and 0 <= c + dx < 4:
                near = x[:, prefix + 4 * (y + dy) + c + dx]
                row = row + encoding.weight[:, 0, dy + reach, dx + reach] * near
        rows.append(row)
    sources = {"x": x, **dict(encoding.named_parameters())}
    same_gradients(encoding.tokens(x, grid), torch.stack(rows, 1), sources)


def test_peg_starts_as_in_twins() -> None:
    """9,216 samples: the standard deviation of their deviation is 0.74 %."""
    encoding = PEG(1024, 2, Grid(6, 6))
    assert abs(encoding.weight.std().item() / (2 / 9) ** 0.5 - 1) < 5 * 0.0074
    assert not encoding.bias.any()
    assert sum(p.numel() for p in PEG(192, 3, Grid(14, 14)).parameters()) == 1728 + 192


def test_peg_stands_after_blocks() -> None:
    grid = Grid(6, 6)
    assert list(PEG(8, 2, grid).blocks(12)) == [1]
    assert list(PEG(8, 2, grid, after=(0, 1, 2, 3, 4)).blocks(12)) == [1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="after=11, but of 12 blocks"):
        PEG(8, 2, grid, after=11).blocks(12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": ()}, r"after=\(\)"),
        ({"after": -2}, "after=-2"),
        ({"after": (0, 0)}, "names a block twice"),
        ({"after": True}, "after=True"),
        ({"after": (0.5,)}, "after="),
        ({"kernel_size": 4}, "kernel_size=4, expected an odd"),
        ({"kernel_size": 0}, "kernel_size=0"),
        ({"kernel_size": 3.0}, "kernel_size=3.0"),
    ],
)
def test_peg_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PEG(8, 2, Grid(6, 6), **options)


@pytest.mark.parametrize("cls", [NoPositions, Learned, SinCos2D, PEG])
@pytest.mark.parametrize(
    ("dim", "heads", "grid", "message"),
    [
        (0, 1, Grid(2, 2), "dim=0, expected a positive integer"),
        (8, 0, Grid(2, 2), "num_heads=0"),
        (8, 3, Grid(2, 2), "dim=8 is not a multiple of num_heads=3"),
        (8, 2, (2, 2), r"grid=\(2, 2\), expected a whereformer.Grid"),
        (8.0, 2, Grid(2, 2), "dim=8.0"),
    ],
)
def test_encodings_refuse(cls: type, dim: Any, heads: Any, grid: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"{cls.__name__}: {message}"):
        cls(dim, heads, grid)
