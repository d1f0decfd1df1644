"""Recipes by name, tables as data, and encodings moved to another home grid."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table, resize_rel_pos_bias_table_levit
from torch import Tensor, nn

from loops import close
from whereformer import Grid, InputError, encode
from whereformer.adapters.tables import Table, tables_of
from whereformer.encodings import Huang, Learned, LogCPB, RoPEAxial
from whereformer.layers import AxialAttention
from whereformer.resample import RECIPES, Recipe, recipe_of, resample, resample_kernel

SIZES = [(20, 9), (7, 28), (5, 5), (14, 20), (2, 30)]
HALVES = [torch.bfloat16, torch.float16]


def as_image(table: Tensor) -> Tensor:
    return table.permute(2, 0, 1)[None]


def as_table(image: Tensor) -> Tensor:
    return image[0].permute(1, 2, 0)


# ---------------------------------------------------------------------------------------------------------------
# Recipes.


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_grid_is_the_same_tensor(name: str) -> None:
    table = torch.randn(5, 7, 3)
    assert RECIPES[name].read(table, (5, 7)) is table


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("align_corners", [False, True])
def test_options_are_torchs(mode: str, antialias: bool, align_corners: bool, size: tuple[int, int]) -> None:
    table = torch.randn(14, 14, 3)
    options = {"mode": mode, "antialias": antialias, "align_corners": align_corners}
    expected = as_table(F.interpolate(as_image(table), size, **options))
    close(resample(table, size, **options), expected, roundings=4 * 14)


@pytest.mark.parametrize("old", [7, 14, 16, 37])
@pytest.mark.parametrize("antialias", [False, True])
def test_the_legacy_offset_is_a_ratio(old: int, antialias: bool) -> None:
    """As the released DINOv2 does it: scale_factor = (t + 0.1) / n; the size is right for every t."""
    table = torch.randn(old, old, 2)
    for new in (3, old - 1, old + 1, 2 * old, 61, 86, 115):
        scale = ((new + 0.1) / old, (new + 1.1) / old)
        expected = F.interpolate(as_image(table), scale_factor=scale, mode="bicubic", antialias=antialias)
        found = resample(table, (new, new + 1), antialias=antialias, offset=0.1)
        assert found.shape == (new, new + 1, 2)
        close(found, as_table(expected), roundings=8 * old)
    assert not torch.allclose(found, resample(table, (new, new + 1), antialias=antialias), atol=0.01)


@pytest.mark.parametrize("size", SIZES)
def test_timms_recipe(size: tuple[int, int]) -> None:
    table = torch.randn(14, 14, 3)
    expected = resample_abs_pos_embed(table.flatten(0, 1)[None], list(size), [14, 14], num_prefix_tokens=0)
    close(RECIPES["timm"].read(table, size), expected.reshape(*size, 3), roundings=4 * 14)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("recipe", "module", "embeddings", "prefix"),
    [
        ("deit", "deit", "DeiTEmbeddings", 2),
        ("mae", "vit_mae", "ViTMAEEmbeddings", 1),
        ("bicubic", "dinov2", "Dinov2Embeddings", 1),
        ("dinov2-reg", "dinov2_with_registers", "Dinov2WithRegistersEmbeddings", 1),
    ],
)
def test_transformers_recipes(
    recipe: str, module: str, embeddings: str, prefix: int, size: tuple[int, int]
) -> None:
    """What its own methods say of a table of 14 x 14."""
    from importlib import import_module

    cls = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), embeddings)
    table = torch.randn(14, 14, 3)
    rows = torch.cat([torch.randn(prefix, 3), table.flatten(0, 1)])[None]
    patches = SimpleNamespace(patch_size=(1, 1))
    itself = SimpleNamespace(position_embeddings=rows, patch_size=1, patch_embeddings=patches)
    tokens = torch.empty(1, prefix + size[0] * size[1], 3)
    expected = cls.interpolate_pos_encoding(itself, tokens, *size)
    close(RECIPES[recipe].read(table, size).flatten(0, 1), expected[0, prefix:], roundings=4 * 14)


@pytest.mark.parametrize("size", [(9, 4), (3, 12), (16, 16), (20, 10)])
def test_siglip2s_recipe(size: tuple[int, int]) -> None:
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    table = torch.randn(16, 16, 3)
    resize = Siglip2VisionEmbeddings.resize_positional_embeddings
    expected = resize(table, torch.tensor([size]), max_length=size[0] * size[1])
    close(RECIPES["siglip2"].read(table, size).flatten(0, 1), expected[0], roundings=4 * 16)


@pytest.mark.parametrize("size", [(9, 4), (3, 12), (16, 20), (20, 10)])
def test_radios_recipes(size: tuple[int, int]) -> None:
    """transformers for v4; for v3 timm's conversion, which aligns corners as its code was released."""
    from timm.models.vision_transformer import _convert_radio
    from transformers.models.radio.modeling_radio import RadioPatchEmbeddings

    table = torch.randn(16, 16, 3)
    rows = table.flatten(0, 1)[None]
    itself = SimpleNamespace(position_embedding=rows, max_rows=16, max_cols=16)
    expected = RadioPatchEmbeddings._interpolate_position_embedding(itself, size, torch.float32)
    close(RECIPES["radio"].read(table, size).flatten(0, 1), expected[0], roundings=4 * 16)

    weights = {"radio_model.model.patch_generator.pos_embed": rows}
    model = SimpleNamespace(pos_embed=rows, patch_embed=SimpleNamespace(grid_size=size))
    expected = _convert_radio(weights, model, align_corners=True)["pos_embed"]  # type: ignore[arg-type]
    close(RECIPES["radio-v3"].read(table, size).flatten(0, 1), expected[0], roundings=4 * 16)


def test_torchvisions_recipe() -> None:
    from torchvision.models.vision_transformer import interpolate_embeddings

    weights = {"encoder.pos_embedding": torch.randn(1, 1 + 49, 8)}
    expected = interpolate_embeddings(320, 32, dict(weights))["encoder.pos_embedding"]
    (table,) = tables_of({**weights, "class_token": torch.empty(1, 1, 8)})
    assert (table.recipe, table.grid, table.prefix) == ("torchvision", (7, 7), 1)
    close(table.read(weights[table.name], table.on((10, 10))), expected, roundings=4 * 7)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_round_once(name: str, dtype: torch.dtype) -> None:
    table = torch.randn(13, 15, 3).to(dtype)
    expected = RECIPES[name].read(table.float(), (9, 21)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(RECIPES[name].read(table, (9, 21)), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "nearest"}, "mode='nearest'"),
        ({"offset": 1.5}, "offset=1.5, expected less than 1"),
        ({"offset": -0.1}, "offset=-0.1"),
        ({"offset": 0.1, "align_corners": True}, "has no step"),
        ({"mode": "geometric", "antialias": True}, "'geometric' has no options"),
        ({"antialias": 1}, "antialias=1, expected True or False"),
    ],
)
def test_recipes_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe(**options)  # type: ignore[arg-type]


def test_unknown_recipes_and_tables_without_numbers() -> None:
    with pytest.raises(InputError, match=r"recipe='dino', expected one of .*'dinov2'"):
        recipe_of("dino")
    with pytest.raises(InputError, match=r"shape .* without numbers: resize before weights are sharded"):
        resample(torch.empty(0, 0, 3), (2, 2))
    with pytest.raises(InputError, match="expected odd sizes"):
        resample(torch.randn(4, 5, 1), (7, 7), mode="geometric")


# ---------------------------------------------------------------------------------------------------------------
# Patch kernels.


@pytest.mark.parametrize("size", [(8, 8), (32, 32), (12, 20)])
def test_patch_kernels_are_flexivits(size: tuple[int, int]) -> None:
    """timm takes the pseudo-inverse of the whole matrix in float32."""
    kernel = torch.randn(4, 3, 16, 16)
    expected = resample_patch_embed(kernel, list(size))
    found = resample_kernel(kernel.permute(2, 3, 0, 1).flatten(2), size)
    close(found.unflatten(2, (4, 3)).permute(2, 3, 0, 1), expected, roundings=1024)


def test_larger_kernels_give_what_the_small_ones_gave() -> None:
    """<B x, w'> = <x, w> for every patch x, B its resize to the larger size."""
    kernel, patches = torch.randn(6, 5, 2, dtype=torch.float64), torch.randn(6, 5, 10, dtype=torch.float64)
    larger = resample(patches, (9, 13))
    expected = torch.einsum("yxc,yxn->cn", kernel, patches)
    found = torch.einsum("yxc,yxn->cn", resample_kernel(kernel, (9, 13)), larger)
    close(found, expected, roundings=10_000)


# ---------------------------------------------------------------------------------------------------------------
# Tables as data.


def table_of(kind: str, shape: tuple[int, ...], grid: tuple[int, ...], **more: object) -> Table:
    return Table("table", kind, shape, grid, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_prefix_rows_stay_to_the_bit(first: int) -> None:
    table = table_of("absolute", (1, first + 4 * 6, 3), (4, 6), prefix=first, axis=1)
    weight = torch.randn(table.shape, dtype=torch.bfloat16)
    for grid in ((8, 3), (6, 4), (1, 1)):
        found = table.read(weight, table.on(grid))
        assert found.shape == table.on(grid).shape == (1, first + grid[0] * grid[1], 3)
        assert torch.equal(found[:, :first], weight[:, :first])
        expected = RECIPES["timm"].read(weight[0, first:].unflatten(0, (4, 6)), grid)
        assert torch.equal(found[0, first:], expected.flatten(0, 1))


def test_as_many_patches_on_another_grid_are_not_the_same() -> None:
    table = table_of("absolute", (16, 3), (2, 8))
    weight = torch.arange(48.0).view(16, 3)
    found = table.read(weight, table.on((4, 4)))
    assert found.shape == weight.shape
    assert not torch.equal(found, weight)
    assert table.read(weight, table) is weight


@pytest.mark.parametrize(("shape", "axis"), [((1, 4, 6, 3), 1), ((1, 3, 4, 6), 2), ((4, 6, 3), 0)])
def test_tables_that_are_images(shape: tuple[int, ...], axis: int) -> None:
    table = table_of("absolute", shape, (4, 6), axis=axis, flat=False)
    weight = torch.randn(shape)
    found = table.read(weight, table.on((5, 3)))
    image = weight.movedim((axis, axis + 1), (0, 1)).flatten(2)
    expected = RECIPES["timm"].read(image, (5, 3))
    assert torch.equal(found.movedim((axis, axis + 1), (0, 1)).flatten(2), expected)
    assert found.is_contiguous()


@pytest.mark.parametrize("recipe", ["bicubic", "bilinear", "geometric"])
def test_bias_tables_keep_their_centre_and_their_constants(recipe: str) -> None:
    """7 -> 12: 169 -> 529 rows, row 84 becomes row 264; a table of one number per head stays so."""
    table = table_of("bias", (169, 4), (7, 7), recipe=recipe)
    weight = torch.randn(169, 4)
    found = table.read(weight, table.on((12, 12)))
    assert found.shape == (529, 4)
    close(found[264], weight[84], roundings=64)
    constant = torch.arange(4.0).expand(169, 4)
    close(table.read(constant, table.on((12, 12))), torch.arange(4.0).expand(529, 4), roundings=64)


@pytest.mark.filterwarnings("ignore:Using a non-tuple:UserWarning", "ignore:torch.searchsorted:UserWarning")
@pytest.mark.parametrize("window", [(15, 20), (20, 24)])
def test_geometric_bias_tables_are_timms(window: tuple[int, int]) -> None:
    """timm stops its search for the ratio 1e-6 away, which moves the last of 14 offsets by < 14² 1e-6 steps."""
    table = table_of("bias", (27 * 27 + 3, 2), (14, 14), prefix=3, recipe="geometric")
    steps = torch.arange(-13.0, 14) / 13
    smooth = torch.stack(torch.meshgrid(steps, steps.sin(), indexing="ij"), -1).flatten(0, 1)
    weight = torch.cat([smooth, torch.randn(3, 2)])
    new = table.on(window)
    assert new.shape[0] == (2 * window[0] - 1) * (2 * window[1] - 1) + 3
    found = table.read(weight, new)
    assert torch.equal(found[-3:], weight[-3:])
    expected = resize_rel_pos_bias_table(weight, window, new.shape, old_window_size=(14, 14))
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * 14**2 * 1e-6 * 2)


def test_a_bias_of_distances_stays_symmetric() -> None:
    y, x = torch.meshgrid(torch.arange(-3.0, 4), torch.arange(-3.0, 4), indexing="ij")
    table = table_of("bias", (49, 1), (4, 4))
    for recipe in ("geometric", "bicubic", "bilinear"):
        found = table.read((y**2 + x**2).view(49, 1), table.on((6, 6)), recipe).view(11, 11)
        for mirrored in (found.flip(0), found.flip(1), found.mT):
            close(mirrored, found, roundings=64)


def test_tables_of_distances_are_levits() -> None:
    """timm stretches |dy|, |dx| from border to border; ours keeps offset 0 where it is."""
    table = table_of("distance", (2, 49), (7, 7), axis=1)
    weight = torch.randn(2, 49)
    found = table.read(weight, table.on((12, 12)))
    assert found.shape == resize_rel_pos_bias_table_levit(weight.T, (144, 2)).T.shape
    close(found[:, 0], weight[:, 0], roundings=64)
    close(table.read(torch.ones(2, 49), table.on((5, 9))), torch.ones(2, 45), roundings=64)


@pytest.mark.parametrize(("name", "home", "expected"), [("rel_pos_h", (14, 10), 20), ("rel_pos_w", (10, 14), 18)])
def test_strips_are_read_linearly_along_their_axis(name: str, home: tuple[int, int], expected: int) -> None:
    table = Table(name, "strip", (27, 3), (14,), recipe="bilinear")
    weight = torch.randn(27, 3)
    new = table.follow(home, (20, 18))
    assert new.grid == (expected,)
    length = 2 * expected - 1
    line = F.interpolate(weight.T[None], length, mode="linear")[0].T
    close(table.read(weight, new, "dinov2"), line, roundings=64)  # recipes of models are for places


def test_recipes_speak_of_places_or_of_offsets() -> None:
    places, offsets = table_of("absolute", (1, 16, 2), (4, 4), axis=1), table_of("bias", (49, 2), (4, 4))
    assert places.recipe_for("geometric") == RECIPES["timm"]
    assert places.recipe_for("dinov2") == RECIPES["dinov2"]
    assert offsets.recipe_for("dinov2") == RECIPES["timm"]
    assert offsets.recipe_for("geometric") == RECIPES["geometric"]


def test_stages_follow() -> None:
    """14 -> 7 -> 4 patches, each half of the one before, rounded up, are 24 -> 12 -> 6."""
    for own, expected in ((14, 24), (7, 12), (4, 6)):
        table = table_of("distance", (2, own * own), (own, own), axis=1)
        assert table.follow((14, 14), (24, 24)).grid == (expected, expected)
    with pytest.raises(InputError, match=r"table: made for \(5, 5\) where the model has \(14, 14\)"):
        table_of("bias", (81, 2), (5, 5)).follow((14, 14), (24, 24))


def shapes(**given: tuple[int, ...]) -> dict[str, Tensor]:
    return {name.replace("__", "."): torch.empty(shape, device="meta") for name, shape in given.items()}


@pytest.mark.parametrize(
    ("rows", "tokens", "prefix"),
    [
        (196, {"cls_token": (1, 1, 8)}, 0),
        (197, {"cls_token": (1, 1, 8)}, 1),
        (198, {"cls_token": (1, 1, 8), "dist_token": (1, 1, 8)}, 2),
        (201, {"cls_token": (1, 1, 8), "reg_token": (1, 4, 8)}, 5),
        (197, {"cls_token": (1, 1, 8), "register_tokens": (1, 4, 8)}, 1),
        (200, {"reg_token": (1, 4, 8)}, 4),
    ],
)
def test_prefix_tokens_are_counted(rows: int, tokens: dict[str, tuple[int, ...]], prefix: int) -> None:
    (table,) = tables_of(shapes(pos_embed=(1, rows, 8), **tokens))
    assert (table.prefix, table.grid) == (prefix, (14, 14))


def test_a_flat_table_is_not_guessed() -> None:
    """4 x 16 patches and a class token: 64 would have a root, 4 x 15 has not; the grid can be told."""
    weights = shapes(pos_embed=(1, 61, 8), cls_token=(1, 1, 8))
    (table,) = tables_of(weights)
    assert table.grid is None
    with pytest.raises(
        InputError, match=r"pos_embed \[1, 61, 8\]: its rows, .* are no square, nor .* Give the grid"
    ):
        table.follow((4, 4), (8, 8))
    (table,) = tables_of(weights, grid=(4, 15))
    assert (table.grid, table.prefix) == ((4, 15), 1)
    (table,) = tables_of(shapes(pos_embed=(1, 65, 8)))
    assert table.grid is None, "nothing says that one of its rows is a class token's"
    assert tables_of(shapes(pos_embed=(1, 65, 8)), prefix=1)[0].grid == (8, 8)


def test_what_is_no_table_of_images_is_left_alone() -> None:
    names = ("text_model.embeddings.position_embedding.weight", "positional_embedding", "blocks.0.mlp.fc1.weight")
    assert not tables_of({name: torch.empty(77, 8) for name in names})


def test_official_dinov2_checkpoints_are_known() -> None:
    weights = shapes(pos_embed=(1, 1370, 8), cls_token=(1, 1, 8), mask_token=(1, 8), blocks__0__ls1__gamma=(8,))
    assert tables_of(weights)[0].recipe == "dinov2"
    assert tables_of(weights | shapes(register_tokens=(1, 4, 8)))[0].recipe == "dinov2-reg"


# ---------------------------------------------------------------------------------------------------------------
# Encodings: the promises are in the contract; here what they do not say.


def test_learned_keeps_prefix_rows_and_parameters_that_need_no_gradient() -> None:
    encoding = Learned(8, 2, Grid(4, 6, prefix=2)).requires_grad_(False)
    before = encoding.table.clone()
    assert encoding.resize(Grid(7, 5, prefix=2)) is encoding
    assert torch.equal(encoding.table[:2], before[:2])
    assert encoding.table.shape == (2 + 35, 8)
    assert not encoding.table.requires_grad
    assert repr(encoding) == "Learned(rows=2 + 7 * 5)"


def test_a_scaled_rotation_still_knows_its_training() -> None:
    encoding = RoPEAxial(16, 2, Grid(4, 4), scaling="ntk")
    before = encoding.angles(Grid(8, 8))
    assert torch.equal(encoding.resize(Grid(8, 8)).angles(Grid(8, 8)), before)
    fresh = RoPEAxial(16, 2, Grid(8, 8), scaling="ntk")
    assert not torch.equal(fresh.angles(Grid(8, 8)), before)


def test_log_cpb_keeps_its_pretrained_window() -> None:
    assert LogCPB(8, 2, Grid(8, 8)).resize(Grid(12, 12)).pretrained == (8, 8)


def test_offsets_that_were_clipped_repeat_the_last_row() -> None:
    encoding = Huang(8, 2, Grid(2, 3), offsets="raster")
    first, last = encoding.table[:, 0], encoding.table[:, -1]
    encoding.resize(Grid(2, 4))
    assert encoding.clip == 7
    assert torch.equal(encoding.table[:, 0], first)
    assert torch.equal(encoding.table[:, -1], last)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Learned(8, 2, Grid(2, 2)).resize((4, 4)), r"grid=\(4, 4\), expected a whereformer.Grid"),
        (lambda: Learned(8, 2, Grid(2, 2)).resize(Grid(4, 4, prefix=1)), "prefix=0"),
        (lambda: Learned(8, 2, Grid(2, 2)).resize(Grid(4, 4, frames=2)), "it is defined on images"),
        (lambda: Learned(8, 2, Grid(2, 2)).resize(Grid(4, 4).keep(torch.tensor([[1]]))), "a whole grid"),
        (lambda: Learned(8, 2, Grid(2, 2)).to("meta").resize(Grid(4, 4)), "Learned.table is on the meta device"),
    ],
)
def test_encodings_refuse(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_a_sharded_table_is_not_resized() -> None:
    encoding = Learned(8, 2, Grid(2, 2))
    encoding.table = nn.Parameter(torch.empty(0))
    with pytest.raises(InputError, match=r"Learned.table has shape .*GatheredParameters"):
        encoding.resize(Grid(4, 4))
    assert encoding.grid == Grid(2, 2)


def test_axial_attention() -> None:
    layer, grid = AxialAttention(8, 2, span=5, axis="width").double(), Grid(3, 9)
    x = torch.randn(1, grid.tokens, 8, dtype=torch.float64)
    expected = layer(x, grid)
    assert layer.resize(grid) is layer
    assert (layer.span, layer.relative.shape[1]) == (9, 17)
    close(layer(x, grid), expected)


def test_tables_move_on_through_the_optimizer_of_another() -> None:
    """A new table is a leaf that learns."""
    encoding = Learned(8, 2, Grid(2, 2)).resize(Grid(3, 3))
    encode(torch.zeros(1, 9, 8), Grid(3, 3), [encoding]).sum().backward()
    assert encoding.table.is_leaf
    assert torch.equal(encoding.table.grad, torch.ones(9, 8))
