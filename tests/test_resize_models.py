"""Models of timm, transformers and torchvision at another size, equipped or not."""

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

import whereformer
from loops import close
from whereformer import Grid, InputError, PositionEncoding
from whereformer.adapters.tables import tables_of
from whereformer.resample import RECIPES

TINY = {"num_classes": 3, "depth": 2, "embed_dim": 24, "num_heads": 2}
SWIN = {"num_classes": 3, "depths": (1, 1), "embed_dim": 8, "num_heads": (1, 2), "window_size": 4}


def timms(name: str, size: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return with_numbers(timm.create_model(name, img_size=size, **options))


def with_numbers(model: nn.Module) -> nn.Module:
    """Tables that start at zero would say nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.eval()


def image(height: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def output(model: nn.Module, height: int, width: int, **options: Any) -> Tensor:
    with torch.no_grad():
        out = model(image(height, width), **options)
    return out if isinstance(out, Tensor) else out[0]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------------------------------------------------------
# timm.

TIMM = [
    ("vit_tiny_patch16_224", 64, (96, 48), TINY),
    ("deit_tiny_distilled_patch16_224", 64, (96, 48), TINY),
    ("deit3_small_patch16_224", 64, (96, 48), TINY),
    ("vit_small_patch14_reg4_dinov2", 56, (84, 56), {**TINY, "depth": 1}),
    ("flexivit_small", 64, (48, 80), TINY),
    ("eva02_tiny_patch14_224", 56, (84, 56), TINY),
    ("vit_small_patch16_rope_mixed_224", 64, (96, 48), TINY),
    ("vit_small_patch16_dinov3", 64, (96, 48), {**TINY, "embed_dim": 32}),
    ("beit_base_patch16_224", 64, (96, 48), TINY),
    ("vit_relpos_small_patch16_224", 64, (96, 48), TINY),
    ("swin_tiny_patch4_window7_224", 64, (96, 64), SWIN),
    ("swinv2_tiny_window8_256", 64, (96, 64), SWIN),
    ("samvit_base_patch16", 64, (96, 48), {**TINY, "window_size": 3, "global_attn_indexes": (1,)}),
    ("hiera_tiny_224", 64, (96, 64), {"num_classes": 3, "embed_dim": 8, "num_heads": 1, "stages": (1, 1, 1, 1)}),
    (
        "hiera_small_abswin_256",
        64,
        (96, 96),
        {"num_classes": 3, "embed_dim": 8, "num_heads": 1, "stages": (1,) * 4},
    ),
    ("mvitv2_tiny", 64, (96, 96), {"num_classes": 3}),
    ("levit_128s", 112, (192, 192), {"num_classes": 3}),
    ("cait_xxs24_224", 64, (96, 48), {**TINY, "depth_token_only": 1}),
    ("pit_ti_224", 64, (96, 64), {"num_classes": 3, "depth": (1, 1, 1)}),
    ("maxvit_tiny_tf_224", 64, (128, 128), {"num_classes": 3, "depths": (1, 1, 1, 1)}),
]


@pytest.mark.parametrize(("name", "home", "size", "options"), TIMM, ids=[case[0] for case in TIMM])
def test_timm(name: str, home: int, size: tuple[int, int], options: dict[str, Any]) -> None:
    """It becomes what it would be if it had been built so: a fresh one loads its weights, and gives the same."""
    model = timms(name, home, **options)
    before, there = snapshot(model), output(model, home, home)
    names = {table.name for table in tables_of(model)}
    assert whereformer.resize(model, image_size=home) is model
    assert torch.equal(output(model, home, home), there), "the same size changes nothing"
    whereformer.resize(model, image_size=size)
    for key, value in model.state_dict().items():
        if key not in names:
            assert torch.equal(value, before[key]), key
    fresh = timm.create_model(name, img_size=size, **options).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(output(model, *size), output(fresh, *size))


@pytest.mark.parametrize(
    ("name", "size"), [("vit_tiny_patch16_224", (96, 48)), ("deit_tiny_distilled_patch16_224", (96, 96))]
)
def test_the_resized_model_is_the_dynamic_one(name: str, size: tuple[int, int]) -> None:
    model = timms(name, 64, **TINY, dynamic_img_size=True)
    expected = output(model, *size)
    close(output(whereformer.resize(model, image_size=size), *size), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [("vit_tiny_patch16_224", TINY), ("eva02_tiny_patch14_224", TINY), ("beit_base_patch16_224", TINY)],
)
@pytest.mark.filterwarnings("ignore:Using a non-tuple:UserWarning", "ignore:torch.searchsorted:UserWarning")
def test_values_are_those_of_timms_own_resize(name: str, options: dict[str, Any]) -> None:
    """Tables of places to rounding; of offsets to what timm's bisection leaves."""
    home, size = (56, (70, 70)) if "14" in name else (64, (80, 80))
    model, own = timms(name, home, **options), timms(name, home, **options)
    own.set_input_size(img_size=size)  # type: ignore[operator]
    whereformer.resize(model, image_size=size)
    for key, value in own.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=1e-5 if "embed" in key else 2e-3)


def test_as_many_patches_on_another_grid_are_another_table() -> None:
    model = timms("vit_tiny_patch16_224", (32, 128), **TINY)
    before = model.pos_embed
    whereformer.resize(model, (4, 4))
    assert model.pos_embed.shape == before.shape
    assert not torch.allclose(model.pos_embed, before)
    expected = RECIPES["timm"].read(before[0, 1:].unflatten(0, (2, 8)), (4, 4)).flatten(0, 1)
    assert torch.equal(model.pos_embed[0, 1:], expected)
    assert torch.equal(model.pos_embed[0, :1], before[0, :1])


def test_windows_stay_or_change() -> None:
    model = timms("swin_tiny_patch4_window7_224", 64, **SWIN)
    before = snapshot(model)
    whereformer.resize(model, image_size=128)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    tables = dict(model.named_parameters())
    whereformer.resize(model, image_size=128, window=8)
    shape = model.layers[0].blocks[0].attn.relative_position_bias_table.shape
    assert shape == (15 * 15, 1)
    assert model.patch_embed.proj.weight is tables["patch_embed.proj.weight"]
    assert output(model, 128, 128).shape == (1, 3)


def test_patch_kernels() -> None:
    """Twice the patch on twice the image: what was seen is seen again."""
    model = timms("vit_tiny_patch16_224", 64, **TINY).double()
    before = output(model.float(), 64, 64)
    model = whereformer.resize(model.double(), image_size=128, patch_size=32)
    assert model.patch_embed.proj.weight.shape == (24, 3, 32, 32)
    assert model.patch_embed.grid_size == (4, 4)
    patches = image(64, 64).unfold(2, 16, 16).unfold(3, 16, 16).flatten(0, 3)
    larger = nn.functional.interpolate(patches[:, None].double(), (32, 32), mode="bicubic", antialias=True)
    larger = larger.view(3, 4, 4, 32, 32).permute(0, 1, 3, 2, 4).reshape(1, 3, 128, 128)
    with torch.no_grad():
        torch.testing.assert_close(model(larger).float(), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    half = timms("beit_base_patch16_224", 64, **TINY, use_abs_pos_emb=True).to(dtype)
    wide = whereformer.resize(copy.deepcopy(half).float(), image_size=96)
    for parameter in half.parameters():
        parameter.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        whereformer.resize(half, image_size=96)
    for (name, parameter), exact in zip(half.named_parameters(), wide.parameters(), strict=True):
        assert not parameter.requires_grad
        assert torch.equal(parameter, exact.to(dtype)), name


def test_a_recipe_is_replayed() -> None:
    model = timms("vit_tiny_patch16_224", 64, **TINY)
    rows = model.pos_embed[0, 1:].unflatten(0, (4, 4))
    whereformer.resize(model, Grid(6, 3), recipe="dinov2")
    assert torch.equal(model.pos_embed[0, 1:].detach(), RECIPES["dinov2"].read(rows, (6, 3)).flatten(0, 1))


# ---------------------------------------------------------------------------------------------------------------
# transformers.

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
}
STAGES = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
}
SAM = {"mlp_dim": 16, "output_channels": 8, "window_size": 3, "global_attn_indexes": [0]}
HF: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "ViT": ("ViTModel", SMALL, {"interpolate_pos_encoding": True}),
    "DeiT": ("DeiTModel", SMALL, {"interpolate_pos_encoding": True}),
    "Dinov2": ("Dinov2Model", SMALL, {}),
    "Dinov2WithRegisters": ("Dinov2WithRegistersModel", SMALL, {}),
    "DINOv3ViT": ("DINOv3ViTModel", SMALL, {}),
    "CLIPVision": ("CLIPVisionModel", SMALL, {"interpolate_pos_encoding": True}),
    "SiglipVision": ("SiglipVisionModel", SMALL, {"interpolate_pos_encoding": True}),
    "Beit": ("BeitModel", {**SMALL, "use_relative_position_bias": True}, {}),
    "Data2VecVision": ("Data2VecVisionModel", {**SMALL, "use_shared_relative_position_bias": True}, {}),
    "Swin": ("SwinModel", {**STAGES, "use_absolute_embeddings": True}, {"interpolate_pos_encoding": True}),
    "Swinv2": ("Swinv2Model", STAGES, {}),
    "SamVision": ("SamVisionModel", {**SMALL, **SAM}, None),
    "DPT": ("DPTModel", SMALL, {}),
}


def transformer(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls, options, _ = HF[name]
    config = getattr(transformers, f"{name}Config")(**options)
    return with_numbers(getattr(transformers, cls)(config))


@pytest.mark.parametrize("name", HF)
def test_transformers(name: str, tmp_path: Any) -> None:
    """It says what it said of such images, if it took them; and is saved and loaded like any other."""
    dynamic = HF[name][2]
    model = transformer(name)
    expected = None if dynamic is None else output(model, 48, 48, **dynamic)
    assert whereformer.resize(model, image_size=48) is model
    found = output(model, 48, 48)
    if expected is not None:
        close(found, expected)
    assert model.config.image_size == 48
    model.save_pretrained(tmp_path)
    close(output(type(model).from_pretrained(tmp_path).eval(), 48, 48), found)


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "Swin", "Swinv2"])
def test_transformers_not_square(name: str) -> None:
    model = transformer(name)
    expected = output(model, 48, 32, **(HF[name][2] or {}))
    whereformer.resize(model, image_size=(48, 32))
    close(output(model, 48, 32), expected)
    assert list(model.config.image_size) == [48, 32]
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(output(again, 48, 32), output(model, 48, 32))
    whereformer.resize(model, image_size=32)
    assert list(model.config.image_size) == [32, 32]


def test_a_table_that_is_not_square_is_read_as_it_is() -> None:
    """transformers' own method takes it for a square one."""
    model = whereformer.resize(transformer("Dinov2"), image_size=(48, 32))
    rows = model.embeddings.position_embeddings
    found = model.embeddings.interpolate_pos_encoding(torch.empty(1, 1 + 40, 16), 40, 64)
    expected = RECIPES["bicubic"].read(rows[0, 1:].unflatten(0, (6, 4)), (5, 8))
    close(found[0, 1:], expected.flatten(0, 1))
    found.sum().backward()
    assert rows.grad is not None


def test_both_configurations_of_clip_know() -> None:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=SMALL))
    words = model.text_model.embeddings.position_embedding.weight
    whereformer.resize(model, (6, 6))
    assert model.config.vision_config.image_size == model.vision_model.config.image_size == 48
    assert model.vision_model.embeddings.position_ids.tolist() == [list(range(37))]
    assert model.text_model.embeddings.position_embedding.weight is words


def test_a_patch_embedding_of_transformers() -> None:
    model = whereformer.resize(transformer("ViT"), image_size=32, patch_size=4)
    assert model.embeddings.patch_embeddings.projection.weight.shape[-2:] == (4, 4)
    assert (model.config.patch_size, model.config.image_size) == (4, 32)
    assert output(model, 32, 32).shape == (1, 65, 16)


# ---------------------------------------------------------------------------------------------------------------
# torchvision.


def test_torchvisions_vit() -> None:
    model = with_numbers(torchvision.models.VisionTransformer(64, 16, 1, 2, 16, 16, num_classes=3))
    weights = {"encoder.pos_embedding": model.encoder.pos_embedding.detach().clone()}
    expected = torchvision.models.vision_transformer.interpolate_embeddings(96, 16, weights)
    whereformer.resize(model, image_size=96)
    close(model.encoder.pos_embedding, expected["encoder.pos_embedding"])
    assert output(model, 96, 96).shape == (1, 3)


def test_torchvisions_swin() -> None:
    model = torchvision.models.SwinTransformer([4, 4], 8, [2, 2], [1, 2], [4, 4], num_classes=3)
    before = snapshot(with_numbers(model))
    whereformer.resize(model, image_size=128)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    whereformer.resize(model, image_size=128, window=8)
    attention = model.features[1][1].attn
    assert (attention.window_size, attention.shift_size) == ([8, 8], [4, 4])
    key = "features.1.1.attn.relative_position_bias_table"
    expected = RECIPES["bicubic"].read(before[key].unflatten(0, (7, 7)), (15, 15)).flatten(0, 1)
    assert torch.equal(attention.relative_position_bias_table, expected)
    assert output(model, 128, 128).shape == (1, 3)


# ---------------------------------------------------------------------------------------------------------------
# Equipped models.


@pytest.mark.parametrize(
    "encoding", ["learned", "abs_win + swin", "irpe(on='qkv') + decomposed", "beit + rope_axial(scaling='yarn')"]
)
@pytest.mark.parametrize("share", [False, True])
def test_an_equipped_model_says_what_it_said_there(encoding: str, share: bool) -> None:
    model = timms("vit_tiny_patch16_224", 64, **{**TINY, "embed_dim": 48}, dynamic_img_size=True)
    plain = copy.deepcopy(model)
    whereformer.equip(model, encoding, share=share)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PositionEncoding):
                for parameter in module.parameters():
                    parameter.normal_()
    expected = output(model, 96, 48)
    whereformer.resize(model, (6, 3))
    close(output(model, 96, 48), expected)
    grids = {module.grid for module in model.modules() if isinstance(module, PositionEncoding)}
    assert grids == {model.home_grid} == {Grid(6, 3, prefix=1)}
    close(output(pickle.loads(pickle.dumps(model)), 96, 48), expected)
    expected = output(whereformer.resize(plain, (6, 3)), 96, 48)
    assert torch.equal(output(whereformer.unequip(model), 96, 48), expected), "its own table moved along"


# ---------------------------------------------------------------------------------------------------------------
# What cannot be.


def vit() -> nn.Module:
    return timms("vit_tiny_patch16_224", 64, **TINY)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (vit, {}, "grid=None, expected"),
        (vit, {"grid": 24}, "grid=24, expected .* in patches; pixels go as image_size="),
        (vit, {"grid": (4, 0)}, r"grid=\(4, 0\), expected 2 positive integers"),
        (vit, {"grid": (4, 4), "image_size": 64}, "expected one of them"),
        (vit, {"grid": Grid(4, 4, frames=2)}, "expected a whole grid of an image"),
        (
            vit,
            {"image_size": (100, 64)},
            r"no multiple of the patches' \(16, 16\): for height 96 or 112, for width 64",
        ),
        (vit, {"image_size": 96, "window": 7}, "window=.* has no windows"),
        (vit, {"image_size": 96, "recipe": "dino"}, "recipe='dino'"),
        (lambda: nn.Linear(2, 2), {"grid": (4, 4)}, "Linear is no model of timm, transformers, torchvision"),
        (lambda: torch.nn.DataParallel(vit()), {"grid": (4, 4)}, "give model.module"),
        (lambda: vit().to("meta"), {"grid": (6, 6)}, "pos_embed is on the meta device"),
        (lambda: timm.models.PyramidVisionTransformerV2(), {"grid": (6, 6)}, "build it by timm.create_model"),
        (lambda: timm.create_model("pvt_v2_b0"), {"image_size": 256}, "takes images of any as it is"),
        (lambda: transformer("CLIPVision"), {"grid": (6, 4)}, "takes square images"),
        (lambda: transformer("Beit"), {"grid": (6, 4)}, "reads its bias tables as squares"),
        (lambda: transformer("Swin"), {"grid": (8, 8), "window": 8}, "windows of transformers' models stay"),
        (
            lambda: torchvision.models.VisionTransformer(64, 16, 1, 2, 16, 16),
            {"grid": (4, 6)},
            "takes squares only",
        ),
    ],
)
def test_what_cannot_be_is_said(make: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        whereformer.resize(make(), **options)


def test_a_sharded_table_is_named() -> None:
    model = vit()
    model.pos_embed = nn.Parameter(torch.empty(0))
    with pytest.raises(InputError, match=r"pos_embed has shape .*resize before weights are sharded"):
        whereformer.resize(model, (6, 6))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "transformers"])
def test_a_model_that_fails_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last table cannot be read, after everything else has changed."""
    model = transformer("Beit") if name == "transformers" else vit()
    if name != "transformers":
        whereformer.equip(model, "learned + swin", keep_own=True)
    before, there = snapshot(model), output(model, *((32, 32) if name == "transformers" else (64, 64)))
    parameters = dict(model.named_parameters())

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sys.modules["whereformer.adapters.resize"], "move_encodings", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        whereformer.resize(model, (6, 6))
    assert dict(model.named_parameters()) == parameters or all(
        parameter is parameters[key] for key, parameter in model.named_parameters()
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    size = model.config.image_size if name == "transformers" else model.patch_embed.img_size[0]
    assert size == (32 if name == "transformers" else 64)
    assert torch.equal(output(model, size, size), there)
