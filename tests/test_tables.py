"""Learned tables that are not one row a token: vit2d, detr_learned, navit, pix2struct, flexivit, abs_win; against
their equations and against other implementations."""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.hiera import Hiera
from timm.models.hieradet_sam2 import HieraDet
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor

from loops import close, leaf, same_gradients
from whereformer import Grid, InputError, PositionEncoding, encode, parse
from whereformer.encodings import AbsWin, DETRLearned, FlexiViT, Learned, NaViT, Pix2Struct, ViT2D
from whereformer.grid import Points

REFERENCE = load_file(Path(__file__).parent / "data" / "absolute" / "reference.safetensors")
"""Tables resized by what big_vision calls: FlexiViT's jax.image.resize, NaFlex's jax.image.scale_and_translate."""

IMAGES = [Grid(3, 5), Grid(4, 2, prefix=1), Grid(1, 7, prefix=2)]
VIDEO = Grid(2, 3, 1, frames=4)


def added(encoding: PositionEncoding, grid: Grid) -> Tensor:
    """What an encoding adds to patches: [patches, dim]."""
    dtype = next(encoding.parameters()).dtype
    return encoding.tokens(torch.zeros(1, grid.tokens, encoding.dim, dtype=dtype), grid)[0, grid.prefix :]


def holds(encoding: PositionEncoding, grid: Grid, row: Callable[..., Tensor]) -> None:
    """Tokens, and all gradients, are those of x_n + row(place of n), prefix tokens untouched."""
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    x = leaf(2, grid.tokens, encoding.dim)
    rows = [x[:, n] for n in range(grid.prefix)]
    for n, place in enumerate(itertools.product(*map(range, grid.size)), start=grid.prefix):
        rows.append(x[:, n] + row(*place))
    sources = {"x": x, **dict(encoding.named_parameters())}
    same_gradients(encoding.tokens(x, grid), torch.stack(rows, 1), sources)


def linearly(table: Tensor, place: int, length: int, antialias: bool = False) -> Tensor:
    """Row `place` of a table stretched to `length` rows, the ends held: a triangle around the place's centre."""
    scale = table.shape[0] / length
    centre, width = (place + 0.5) * scale - 0.5, max(scale, 1.0) if antialias else 1.0
    if not antialias:
        centre = min(max(centre, 0.0), table.shape[0] - 1)
    weights = [max(0.0, 1 - abs(n - centre) / width) for n in range(table.shape[0])]
    return torch.stack([w / sum(weights) * row for w, row in zip(weights, table, strict=True)]).sum(0)


def cubically(table: Tensor, place: int, length: int, antialias: bool) -> Tensor:
    """Keys' cubic, a = −1/2 antialiased and −3/4 not: torch's two; the ends held if not antialiased."""
    scale = table.shape[0] / length
    centre, width = (place + 0.5) * scale - 0.5, max(scale, 1.0) if antialias else 1.0
    a = -0.5 if antialias else -0.75

    def weight(d: float) -> float:
        d = abs(d)
        if d <= 1:
            return (a + 2) * d**3 - (a + 3) * d**2 + 1
        return a * (d**3 - 5 * d**2 + 8 * d - 4) if d < 2 else 0.0

    if antialias:
        found = {n: weight((n - centre) / width) for n in range(table.shape[0])}
    else:
        found = {n: weight(n - centre) for n in range(math.floor(centre) - 1, math.floor(centre) + 3)}
    total = sum(found.values())
    rows = [w / total * table[min(max(n, 0), table.shape[0] - 1)] for n, w in found.items()]
    return torch.stack(rows).sum(0)


# vit2d


@pytest.mark.parametrize("grid", IMAGES, ids=str)
def test_vit2d_at_home_is_its_equation(grid: Grid) -> None:
    """The X-embedding comes first."""
    encoding = ViT2D(6, 2, grid).double()
    holds(encoding, grid, lambda y, x: torch.cat([encoding.columns[x], encoding.rows[y]]))


@pytest.mark.parametrize("grid", IMAGES, ids=str)
def test_vit2d_away_is_resampled(grid: Grid) -> None:
    encoding = ViT2D(6, 2, Grid(4, 6)).double()

    def row(y: int, x: int) -> Tensor:
        columns = cubically(encoding.columns, x, grid.width, antialias=True)
        return torch.cat([columns, cubically(encoding.rows, y, grid.height, antialias=True)])

    holds(encoding, grid, row)


def test_vit2d_is_the_learned_table_it_makes_wherever_it_is_read() -> None:
    """There is no public implementation: a full table of the same rows, resampled by timm's recipe."""
    home = Grid(4, 6)
    encoding, table = ViT2D(8, 2, home), Learned(8, 2, home)
    with torch.no_grad():
        table.table.copy_(added(encoding, home))
    for grid in (home, Grid(7, 3), Grid(1, 9)):
        close(added(encoding, grid).detach(), added(table, grid).detach(), roundings=64)


def test_vit2d_has_as_many_numbers_as_the_paper_says() -> None:
    assert sum(p.numel() for p in ViT2D(768, 12, Grid(14, 14)).parameters()) == (14 + 14) * 384


# detr_learned


@pytest.mark.parametrize("grid", IMAGES, ids=str)
def test_detr_learned_is_its_equation(grid: Grid) -> None:
    """Columns come first; of 9 rows the first are read."""
    encoding = DETRLearned(6, 2, grid, size=9).double()
    holds(encoding, grid, lambda y, x: torch.cat([encoding.columns[x], encoding.rows[y]]))


@pytest.mark.parametrize("grid", IMAGES, ids=str)
def test_detr_learned_stretches_what_is_too_short(grid: Grid) -> None:
    """Of a table of 3: one row, three, or four of them; two columns, five, or seven."""
    encoding = DETRLearned(6, 2, grid, size=3, longer="interpolate").double()

    def read(table: Tensor, place: int, length: int) -> Tensor:
        return table[place] if length <= 3 else linearly(table, place, length)

    def row(y: int, x: int) -> Tensor:
        return torch.cat([read(encoding.columns, x, grid.width), read(encoding.rows, y, grid.height)])

    holds(encoding, grid, row)


@pytest.mark.parametrize("grid", [Grid(50, 3, prefix=1), Grid(7, 50)], ids=str)
def test_detr_learned_is_transformers(grid: Grid) -> None:
    from transformers.models.detr.modeling_detr import DetrLearnedPositionEmbedding

    encoding, peer = DETRLearned(24, 2, grid), DetrLearnedPositionEmbedding(12)
    with torch.no_grad():
        peer.row_embeddings.weight.copy_(encoding.rows)
        peer.column_embeddings.weight.copy_(encoding.columns)
    expected = peer(torch.Size([1, 24, *grid.size]), torch.device("cpu"), torch.float32)[0].flatten(1).T
    assert torch.equal(added(encoding, grid), expected)


def test_detr_learned_has_50_rows_and_says_so() -> None:
    with pytest.raises(InputError, match=r"rows: a table of 50 rows, but 51 patches.*longer='interpolate'"):
        added(DETRLearned(8, 2, Grid(51, 3)), Grid(51, 3))
    with pytest.raises(InputError, match=r"columns: a table of 50 rows, but 51 patches"):
        added(DETRLearned(8, 2, Grid(3, 3)), Grid(3, 51))
    longer = added(DETRLearned(8, 2, Grid(51, 3), longer="interpolate"), Grid(51, 3))
    assert longer.shape == (153, 8)


def test_detr_learned_starts_uniform() -> None:
    """40,000 samples of a deviation of 12^(−1/2)."""
    for table in DETRLearned(1600, 2, Grid(3, 3)).parameters():
        assert 0 <= table.min() < 0.001
        assert 0.999 < table.max() <= 1
        assert abs(table.mean().item() - 0.5) < 5 * 12**-0.5 / 200


# navit


NAVIT_SETTINGS = [
    {"coordinate": coordinate, "combine": combine}
    for coordinate in ("absolute", "fractional")
    for combine in ("sum", "concat", "product")
]


@pytest.mark.parametrize("grid", [*IMAGES, VIDEO], ids=str)
@pytest.mark.parametrize("options", NAVIT_SETTINGS, ids=str)
def test_navit_is_its_equation(grid: Grid, options: dict[str, Any]) -> None:
    """Tables of 8 rows: of absolute coordinates the first are read, the others are stretched."""
    encoding = NaViT(6, 2, grid, size=8, **options).double()

    def phi(axis: str, place: int, length: int) -> Tensor:
        table = encoding.tables[axis]
        return table[place] if options["coordinate"] == "absolute" else linearly(table, place, length)

    def row(*place: int) -> Tensor:
        parts = [phi(*at) for at in zip("tyx"[-len(place) :], place, grid.size, strict=True)]
        if options["combine"] == "concat":
            return torch.cat(parts)
        total = parts[0]
        for part in parts[1:]:
            total = total + part if options["combine"] == "sum" else total * part
        return total

    holds(encoding, grid, row)


@pytest.mark.parametrize("grid", [Grid(7, 7), Grid(12, 3), Grid(2, 10)], ids=str)
def test_fractional_navit_is_timms_factorized(grid: Grid) -> None:
    home = Grid(7, 5)
    peer = NaFlexEmbeds(
        patch_size=4, embed_dim=8, pos_embed="factorized", pos_embed_grid_size=home.size, class_token=False
    )
    encoding = NaViT(8, 2, home, coordinate="fractional")
    with torch.no_grad():
        peer.pos_embed_y.copy_(encoding.tables.y)
        peer.pos_embed_x.copy_(encoding.tables.x)
        expected = torch.zeros(1, grid.patches, 8)
        peer._apply_factorized_pos_embed(expected, list(grid.size))
        close(added(encoding, grid), expected[0], roundings=4 * 12)


def test_navit_absolute_refuses_what_it_has_no_rows_for() -> None:
    encoding = NaViT(8, 2, Grid(4, 4), size=6)
    with pytest.raises(InputError, match=r"NaViT: y: a table of 6 rows, but 7 patches"):
        added(encoding, Grid(7, 2))
    with pytest.raises(InputError, match=r"NaViT: x: a table of 6 rows, but 9 patches"):
        added(encoding, Grid(2, 9))
    stretched = added(NaViT(8, 2, Grid(4, 4), size=6, longer="interpolate"), Grid(7, 9))
    assert stretched.shape == (63, 8)


# pix2struct


@pytest.mark.parametrize("grid", IMAGES, ids=str)
def test_pix2struct_is_its_equation(grid: Grid) -> None:
    """Row 0 is padding's."""
    encoding = Pix2Struct(6, 2, grid, size=9).double()
    holds(encoding, grid, lambda y, x: encoding.rows[y + 1] + encoding.columns[x + 1])


@pytest.mark.parametrize("grid", [Grid(5, 3, prefix=1), Grid(2, 11)], ids=str)
def test_pix2struct_is_transformers(grid: Grid) -> None:
    """Fed as its image processor does: row and column from 1, then the patch."""
    from transformers import Pix2StructVisionConfig
    from transformers.models.pix2struct.modeling_pix2struct import Pix2StructVisionEmbeddings

    config = Pix2StructVisionConfig(hidden_size=8, patch_embed_hidden_size=4, seq_len=12, dropout_rate=0.0)
    peer, encoding = Pix2StructVisionEmbeddings(config), Pix2Struct(8, 2, grid, size=12)
    with torch.no_grad():
        peer.row_embedder.weight.copy_(encoding.rows)
        peer.column_embedder.weight.copy_(encoding.columns)
        peer.patch_projection.bias.zero_()
        patches = torch.cat([grid.coords() + 1.0, torch.zeros(grid.patches, 4)], -1)
        assert torch.equal(added(encoding, grid), peer(patches[None])[0])


def test_pix2struct_refuses_what_it_has_no_rows_for() -> None:
    assert added(Pix2Struct(8, 2, Grid(2, 2), size=6), Grid(5, 5)).shape == (25, 8)
    with pytest.raises(InputError, match=r"Pix2Struct: rows: a table of 5 rows, but 6 patches"):
        added(Pix2Struct(8, 2, Grid(2, 2), size=6), Grid(6, 2))


# flexivit


@pytest.mark.parametrize("grid", IMAGES, ids=str)
@pytest.mark.parametrize("antialias", [True, False])
def test_flexivit_is_its_equation(grid: Grid, antialias: bool) -> None:
    encoding = FlexiViT(6, 2, grid, size=(4, 6), antialias=antialias).double()

    def row(y: int, x: int) -> Tensor:
        columns = torch.stack([linearly(encoding.table[r], x, grid.width, antialias) for r in range(4)])
        return linearly(columns, y, grid.height, antialias)

    holds(encoding, grid, row)


@pytest.mark.parametrize("name", [name for name in REFERENCE if name.startswith(("flexivit/", "naflex/"))])
def test_flexivit_is_big_visions_resize(name: str) -> None:
    kind, _, size = name.partition("/")
    if size == "table":
        return
    table = REFERENCE[f"{kind}/table"]
    height, width = map(int, size.split("x"))
    encoding = FlexiViT(table.shape[-1], 1, Grid(2, 2), size=table.shape[:2])
    encoding.table.data = table
    found = added(encoding, Grid(height, width)).unflatten(0, (height, width))
    close(found.detach(), REFERENCE[name], roundings=64)


@pytest.mark.parametrize("grid", [Grid(5, 6), Grid(30, 8), Grid(7, 7)], ids=str)
def test_flexivit_without_antialias_is_timms(grid: Grid) -> None:
    encoding = FlexiViT(8, 2, grid, antialias=False)
    expected = resample_abs_pos_embed(
        encoding.table.flatten(0, 1)[None],
        list(grid.size),
        old_size=[7, 7],
        num_prefix_tokens=0,
        interpolation="bilinear",
        antialias=False,
    )[0]
    close(added(encoding, grid).detach(), expected.detach(), roundings=64)


@pytest.mark.parametrize("grid", [Grid(16, 16), Grid(9, 28), Grid(24, 3)], ids=str)
def test_flexivit_of_16_is_transformers_siglip2(grid: Grid) -> None:
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    encoding = FlexiViT(8, 2, grid, size=(16, 16))
    expected = Siglip2VisionEmbeddings.resize_positional_embeddings(
        encoding.table, torch.tensor([list(grid.size)]), grid.patches
    )[0]
    close(added(encoding, grid).detach(), expected.detach(), roundings=256)


def test_flexivit_forgets_its_home() -> None:
    one, other = FlexiViT(8, 2, Grid(3, 3)), FlexiViT(8, 2, Grid(9, 2, prefix=1))
    other.load_state_dict(one.state_dict())
    assert torch.equal(added(one, Grid(5, 4)), added(other, Grid(5, 4)))
    assert one.table.shape == (7, 7, 8)


# abs_win


@pytest.mark.parametrize("grid", [*IMAGES, Grid(4, 6)], ids=str)
@pytest.mark.parametrize("antialias", [True, False])
def test_abs_win_is_its_equation(grid: Grid, antialias: bool) -> None:
    encoding = AbsWin(6, 2, grid, window=(2, 3), size=(3, 4), antialias=antialias).double()

    def row(y: int, x: int) -> Tensor:
        columns = torch.stack([cubically(encoding.table[r], x, grid.width, antialias) for r in range(3)])
        return cubically(columns, y, grid.height, antialias) + encoding.window[y % 2, x % 3]

    holds(encoding, grid, row)


def test_abs_win_is_timms_hiera() -> None:
    peer = Hiera(
        (96, 64), embed_dim=8, num_heads=1, stages=(1,), q_pool=0, abs_win_pos_embed=True, global_pos_size=(5, 7)
    )
    grid = Grid(24, 16)
    encoding = AbsWin(8, 2, grid, size=(5, 7))
    with torch.no_grad():
        peer.pos_embed.copy_(encoding.table.permute(2, 0, 1)[None])  # type: ignore[union-attr]
        peer.pos_embed_win.copy_(encoding.window.permute(2, 0, 1)[None])  # type: ignore[union-attr]
        expected = peer._pos_embed(torch.zeros(1, grid.patches, 8))[0]
        close(added(encoding, grid), expected, roundings=64)


def test_abs_win_is_timms_sam2() -> None:
    peer = HieraDet(embed_dim=8, num_heads=1, stages=(1, 1, 1, 1), global_att_blocks=(), global_pos_size=(7, 7))
    window = peer.pos_embed_window.shape[-1]
    grid = Grid(2 * window, 3 * window)
    encoding = AbsWin(8, 2, grid, window=(window, window), size=(7, 7), antialias=False)
    with torch.no_grad():
        peer.pos_embed.copy_(encoding.table.permute(2, 0, 1)[None])
        peer.pos_embed_window.copy_(encoding.window.permute(2, 0, 1)[None])
        expected = peer._pos_embed(torch.zeros(1, *grid.size, 8))[0].flatten(0, 1)
        close(added(encoding, grid), expected, roundings=64)


def test_abs_win_keeps_its_windows_when_the_grid_grows() -> None:
    """The window's part repeats exactly, at home and away."""
    encoding = AbsWin(8, 2, Grid(8, 8), window=(4, 2))
    torch.nn.init.zeros_(encoding.table)
    for grid in (Grid(8, 8), Grid(12, 6), Grid(5, 7)):
        image = added(encoding, grid).unflatten(0, grid.size)
        assert torch.equal(image[4:], image[: grid.height - 4])
        assert torch.equal(image[:, 2:], image[:, : grid.width - 2])


# learned, as other recipes resample it


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [True, False])
def test_learned_is_torchs_interpolation_of_any_recipe(mode: Any, antialias: bool) -> None:
    encoding = Learned(8, 2, Grid(6, 5), mode=mode, antialias=antialias)
    image = encoding.table.unflatten(0, (6, 5)).permute(2, 0, 1)[None]
    for size in ((3, 8), (9, 2), (6, 5)):
        expected = F.interpolate(image, size, mode=mode, antialias=antialias)[0].flatten(1).T
        close(added(encoding, Grid(*size)).detach(), expected.detach(), roundings=64)


# all of them


def everything(grid: Grid) -> Iterator[PositionEncoding]:
    classes = (Learned, ViT2D, DETRLearned, NaViT, Pix2Struct, FlexiViT, AbsWin)
    return (cls(24, 2, grid) for cls in classes if grid.axes in cls.axes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_keep_their_dtype(dtype: torch.dtype) -> None:
    grid = Grid(3, 4, prefix=1)
    for encoding in everything(grid):
        assert encoding.tokens(torch.zeros(1, 13, 24, dtype=dtype), grid).dtype == dtype


@pytest.mark.parametrize("grid", [Grid(3, 4, prefix=1), Grid(3, 2, frames=2)], ids=str)
def test_kept_patches_get_what_they_get_among_all(grid: Grid) -> None:
    index = torch.tensor([[7, 2, 10], [0, 11, 5]])
    for encoding in everything(grid):
        whole, kept = added(encoding, grid), grid.keep(index)
        some = encoding.tokens(torch.zeros(2, kept.tokens, 24), kept)[:, grid.prefix :]
        assert torch.equal(some, whole[index]), type(encoding).__name__


def test_tables_refuse_points_between_patches() -> None:
    grid = Grid(3, 4)
    points = Points(3, 4, at=torch.tensor([[[0.5, 1.0]]]))
    for encoding in everything(grid):
        with pytest.raises(InputError, match="lies between patches"):
            encoding.tokens(torch.zeros(1, 1, 24), points)


@pytest.mark.parametrize(
    ("build", "std"),
    [
        (lambda: ViT2D(800, 2, Grid(50, 50), std=0.03), 0.03),
        (lambda: NaViT(400, 2, Grid(4, 4), size=50), 0.02),
        (lambda: Pix2Struct(400, 2, Grid(4, 4), size=50), 400**-0.5),
        (lambda: FlexiViT(400, 2, Grid(4, 4)), 400**-0.5),
        (lambda: FlexiViT(400, 2, Grid(4, 4), std=0.5), 0.5),
        (lambda: AbsWin(300, 2, Grid(8, 8), std=0.3), 0.3),
    ],
)
def test_tables_start_normal(build: Callable[[], PositionEncoding], std: float) -> None:
    """At least 19,200 samples each: the standard deviation of their deviation is 0.51 %."""
    for table in build().parameters():
        assert table.numel() >= 19_200
        assert abs(table.std().item() / std - 1) < 5 * 0.0051
        assert abs(table.mean().item()) < 5 * std / 19_200**0.5


@pytest.mark.parametrize(
    ("cls", "dim", "options", "message"),
    [
        (Learned, 8, {"mode": "nearest"}, r"mode='nearest', expected one of \['bicubic', 'bilinear'\]"),
        (ViT2D, 9, {}, "ViT2D: dim=9, expected an even number"),
        (ViT2D, 8, {"std": 0}, "std=0"),
        (DETRLearned, 9, {}, "DETRLearned: dim=9, expected an even number"),
        (DETRLearned, 8, {"size": 0}, "size=0, expected a positive integer"),
        (DETRLearned, 8, {"longer": "clip"}, r"longer='clip', expected one of \['refuse', 'interpolate'\]"),
        (NaViT, 9, {"combine": "concat"}, "dim=9, expected a multiple of 2"),
        (NaViT, 8, {"combine": "stack"}, r"combine='stack', expected one of \['sum', 'concat', 'product'\]"),
        (NaViT, 8, {"coordinate": "relative"}, "coordinate='relative'"),
        (NaViT, 8, {"longer": "clip"}, "longer='clip'"),
        (NaViT, 8, {"longer": "interpolate", "coordinate": "fractional"}, "which fits every grid"),
        (NaViT, 8, {"size": 1.5}, "size=1.5"),
        (NaViT, 8, {"std": -1}, "std=-1"),
        (Pix2Struct, 8, {"size": "big"}, "size='big'"),
        (FlexiViT, 8, {"size": 7}, "size=7, expected 2 positive integers"),
        (FlexiViT, 8, {"size": (7, 0)}, r"size=\(7, 0\), expected 2 positive integers"),
        (FlexiViT, 8, {"std": 0}, "std=0"),
        (AbsWin, 8, {"window": (8,)}, r"window=\(8,\), expected 2 positive integers"),
        (AbsWin, 8, {"size": "77"}, "size='77'"),
        (AbsWin, 8, {"std": "x"}, "std='x'"),
    ],
)
def test_what_is_refused(cls: Any, dim: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cls(dim, 1, Grid(2, 3), **options)


EXPORTED = (
    "vit2d + detr_learned + navit(coordinate='fractional') + flexivit + abs_win(window=(2, 3))"
    " + detr_sine + fourier + perceiver(bands=4)"
)
"""One of each kind of code; a program of longer='interpolate' is for axes shorter, or longer, than its tables."""


def test_exported_with_any_height_and_width() -> None:
    """All in one program, on sizes it was not exported with."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encodings = torch.nn.ModuleList(factory(24, 2, Grid(6, 7)) for factory in parse(EXPORTED))

        def forward(self, image: Tensor) -> Tensor:
            grid = Grid(image.shape[2], image.shape[3])
            return encode(image.flatten(2).mT, grid, self.encodings)  # type: ignore[arg-type]

    model = Model().eval()
    sizes = {axis: torch.export.Dim(name, min=2, max=40) for axis, name in ((2, "height"), (3, "width"))}
    exported = torch.export.export(model, (torch.randn(1, 24, 6, 7),), dynamic_shapes=(sizes,)).module()
    for size in ((6, 7), (5, 9), (12, 2)):
        image = torch.randn(1, 24, *size)
        torch.testing.assert_close(exported(image), model(image))
