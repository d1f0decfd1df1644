"""Rotary encodings against timm, transformers, and values computed by the papers' own code.

`data/rotary/reference.safetensors` holds what released code makes of `features()`, in float32: rope-vit (axial,
mixed), vit-pytorch (pixel, golden), Spiral_RoPE, nD-RoPE (nd), VisionLLaMA, FiT (scaling per axis; `at` says which
patches are stored), LieRE (raw: its generator parameters), ComRoPE. `turned`: [1, heads, tokens, head_dim].
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
    apply_rot_embed_cat,
)
from torch import Tensor
from transformers import DINOv3ViTConfig, LlamaConfig, PixtralVisionConfig, VJEPA2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLVisionRotaryEmbedding,
    apply_rotary_pos_emb_vision,
)
from transformers.models.vjepa2.modeling_vjepa2 import VJEPA2RopeAttention
from transformers.vision_utils import get_vision_position_ids

from loops import close
from whereformer import Grid
from whereformer.encodings import (
    EVA02,
    VJEPA2,
    ComRoPE,
    DINOv3,
    GoldenGate,
    LieRE,
    MRoPE,
    NDRoPE,
    Pixtral,
    Qwen2VL,
    RoPE1D,
    RoPEAxial,
    RoPEMixed,
    RoPEPixel,
    SpiralRoPE,
    VisionLLaMA,
)
from whereformer.encodings.common.rotary import interleaved_to_half

VALUES = load_file(Path(__file__).parent / "data" / "rotary" / "reference.safetensors")
GRIDS = [(16, 16), (14, 14), (3, 7), (24, 10), (1, 5)]


def features(*shape: int) -> Tensor:
    """Between −½ and ½, the same on every machine."""
    return ((torch.arange(math.prod(shape)) * 7919) % 1009).float().div(1009).sub(0.5).reshape(shape)


def turned(encoding: Any, x: Tensor, grid: Grid) -> Tensor:
    for rotate in encoding.rotations(grid):
        x = rotate(x)
    return x


# timm


@pytest.mark.parametrize("size", GRIDS)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("encoding", "peer"),
    [
        (
            lambda half, home: RoPEAxial(64, 2, home, layout=half),
            {"temperature": 100.0, "in_pixels": False, "grid_indexing": "xy"},
        ),
        (
            lambda half, home: RoPEAxial(64, 2, home, layout=half, theta=10000.0),
            {"temperature": 10000.0, "in_pixels": False, "grid_indexing": "xy"},
        ),
        (
            lambda half, home: EVA02(64, 2, home, layout=half),
            {"in_pixels": False, "ref_feat_shape": [16, 16]},
        ),
        (
            lambda half, home: EVA02(64, 2, home, layout=half, reference=(24, 20), grid_offset=1.0, order="x"),
            {"in_pixels": False, "ref_feat_shape": [24, 20], "grid_offset": 1.0, "grid_indexing": "xy"},
        ),
        (
            lambda half, home: EVA02(64, 2, home, layout=half, scaling="none"),
            {"in_pixels": False},
        ),
    ],
    ids=["axial", "axial, theta 10000", "eva02", "perception encoder", "eva02 without interpolation"],
)
def test_axial_kinds_are_timms(encoding: Any, peer: dict[str, Any], half: bool, size: tuple[int, int]) -> None:
    """Angles up to 24 in float32, reckoned two ways."""
    x = torch.randn(2, 2, math.prod(size), 32)
    expected = apply_rot_embed_cat(x, RotaryEmbeddingCat(32, rotate_half=half, **peer).get_embed(list(size)), half)
    found = turned(encoding("half" if half else "interleaved", Grid(14, 14)), x, Grid(*size))
    close(found, expected, roundings=4 * 24)


@pytest.mark.parametrize("size", GRIDS)
@pytest.mark.parametrize(("bands", "most"), [("linear", 10.0), ("log", 224.0)])
def test_pixel_is_timms(bands: Any, most: float, size: tuple[int, int]) -> None:
    """Angles up to 112 π."""
    x = torch.randn(2, 2, math.prod(size), 32)
    peer = RotaryEmbeddingCat(32, in_pixels=True, max_res=int(most), linear_bands=bands == "linear")
    expected = apply_rot_embed_cat(x, peer.get_embed(list(size)))
    found = turned(RoPEPixel(64, 2, Grid(14, 14), bands=bands, max_freq=most), x, Grid(*size))
    close(found, expected, roundings=2 * math.pi * most)


@pytest.mark.parametrize("size", GRIDS)
def test_mixed_is_timms(size: tuple[int, int]) -> None:
    torch.manual_seed(1)
    peer = RotaryEmbeddingMixed(64, depth=3, num_heads=2, feat_shape=list(size))
    encoding = RoPEMixed(64, 2, Grid(14, 14))
    x = torch.randn(2, 2, math.prod(size), 32)
    for layer in range(3):
        encoding.load_state_dict({"frequencies": peer.freqs[:, layer]})
        found = turned(encoding, x, Grid(*size))
        close(found, apply_rot_embed_cat(x, peer.get_embed()[layer]), roundings=4 * 24)


def test_mixed_starts_as_timms() -> None:
    torch.manual_seed(1)
    expected = RotaryEmbeddingMixed(64, depth=1, num_heads=4).freqs[:, 0]
    torch.manual_seed(1)
    close(RoPEMixed(64, 4, Grid(3, 3)).frequencies, expected, roundings=8)


@pytest.mark.parametrize("size", GRIDS)
@pytest.mark.parametrize(
    ("ours", "peer"),
    [
        ({}, {}),
        ({"base": 50.0, "normalise": "max"}, {"temperature": 50.0, "normalize_coords": "max"}),
        ({"normalise": "min"}, {"normalize_coords": "min"}),
        ({"periods": (0.5, 40.0)}, {"min_period": 0.5, "max_period": 40.0}),
    ],
    ids=str,
)
def test_dinov3_is_timms(ours: dict[str, Any], peer: dict[str, Any], size: tuple[int, int]) -> None:
    x = torch.randn(2, 2, math.prod(size), 32)
    expected = apply_rot_embed_cat(x, RotaryEmbeddingDinoV3(32, **peer).get_embed(list(size)), half=True)
    close(turned(DINOv3(64, 2, Grid(14, 14), **ours).eval(), x, Grid(*size)), expected, roundings=4 * 24)


@pytest.mark.parametrize("size", GRIDS)
@pytest.mark.parametrize(("head_dim", "sections"), [(64, (8, 12, 12)), (72, (12, 12, 12)), (32, (10, 2, 4))])
def test_mrope_is_timms(head_dim: int, sections: Any, size: tuple[int, int]) -> None:
    x = torch.randn(2, 2, math.prod(size), head_dim)
    expected = apply_rot_embed_cat(x, RotaryEmbeddingMRope(head_dim, sections).get_embed(list(size)), half=True)
    encoding = MRoPE(2 * head_dim, 2, Grid(14, 14), sections=sections)
    close(turned(encoding, x, Grid(*size)), expected, roundings=4 * 24)


# transformers


@pytest.mark.parametrize(
    "given",
    [
        {"shift": 0.3, "jitter": 1.5, "rescale": 2.0},
        {"shift": None, "jitter": None, "rescale": 2.0},
        {"shift": 0.3, "jitter": None, "rescale": None},
        {"shift": None, "jitter": 1.5, "rescale": None},
    ],
    ids=str,
)
def test_dinov3_in_training_draws_as_the_released_code(given: dict[str, Any]) -> None:
    """The same numbers in the same order from the same seed; and none in eval."""
    height, width = 5, 3
    names = {f"pos_embed_{name}": value for name, value in given.items()}
    config = DINOv3ViTConfig(hidden_size=64, num_attention_heads=2, patch_size=2, **names)
    peer = DINOv3ViTRopePositionEmbedding(config)
    encoding, x = DINOv3(64, 2, Grid(14, 14), **given), torch.randn(1, 2, height * width, 32)
    timm = RotaryEmbeddingDinoV3(32, **{f"{name}_coords": value for name, value in given.items()})
    for training in (True, False):
        torch.manual_seed(3)
        cos, sin = peer.train(training)(torch.zeros(1, 3, 2 * height, 2 * width))
        after = torch.rand(1)
        torch.manual_seed(3)
        found = turned(encoding.train(training), x, Grid(height, width))
        assert torch.equal(torch.rand(1), after), "drew more or fewer numbers"
        expected, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None])
        close(found, expected, roundings=4 * 24)
        torch.manual_seed(3)
        close(found, apply_rot_embed_cat(x, timm.train(training).get_embed([height, width]), half=True), 4 * 24)
    assert not torch.equal(turned(encoding.train(), x, Grid(5, 3)), turned(encoding, x, Grid(5, 3)))


@pytest.mark.parametrize("size", GRIDS)
def test_pixtral_is_transformers(size: tuple[int, int]) -> None:
    config = PixtralVisionConfig(hidden_size=64, num_attention_heads=2)
    x, grid = torch.randn(1, 2, math.prod(size), 32), Grid(*size)
    cos, sin = PixtralVisionRotaryEmbedding(config)(x, grid.coords())
    expected, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None])
    theta = config.rope_parameters["rope_theta"]
    found = turned(Pixtral(64, 2, Grid(14, 14), theta=theta, order="blocks", layout="half"), x, grid)
    close(found, expected, roundings=4 * 24)


def test_pixtrals_orders_and_layouts_are_permutations_of_features() -> None:
    """The same scores on projections whose rows are in another order."""
    grid, (q, k) = Grid(3, 5), torch.randn(2, 1, 2, 15, 16)

    def scores(q: Tensor, k: Tensor, **given: Any) -> Tensor:
        encoding = Pixtral(32, 2, grid, **given)
        return turned(encoding, q, grid) @ turned(encoding, k, grid).mT

    expected = scores(q, k)
    pairs = [0, 2, 4, 6, 1, 3, 5, 7]
    q, k = (x.unflatten(-1, (8, 2))[..., pairs, :].flatten(-2) for x in (q, k))
    close(scores(q, k, order="blocks"), expected, roundings=64)
    q, k = (interleaved_to_half(x.movedim(-1, 0), 1).movedim(0, -1) for x in (q, k))
    close(scores(q, k, order="blocks", layout="half"), expected, roundings=64)


@pytest.mark.parametrize("size", [(4, 6), (2, 10)])
def test_qwen2_vl_is_transformers(size: tuple[int, int]) -> None:
    """Its positions come in blocks of 2 x 2 merged patches: put back row by row."""
    config = Qwen2VLVisionConfig(embed_dim=64, num_heads=2)
    positions = get_vision_position_ids(torch.tensor([[1, *size]]), 2)
    x = torch.randn(math.prod(size), 2, 32)
    cos, sin = Qwen2VLVisionRotaryEmbedding(config)(x, positions)
    expected, _ = apply_rotary_pos_emb_vision(x, x, cos, sin)
    row_by_row = (positions[:, 0] * size[1] + positions[:, 1]).argsort()
    found = turned(Qwen2VL(64, 2, Grid(4, 4)), x[row_by_row].transpose(0, 1)[None], Grid(*size))
    close(found[0].transpose(0, 1), expected[row_by_row], roundings=4 * 24)


@pytest.mark.parametrize("head_dim", [24, 32, 64])
def test_vjepa2_with_repeated_pairing_is_transformers(head_dim: int) -> None:
    config = VJEPA2Config(crop_size=32, patch_size=8, frames_per_clip=6, tubelet_size=2)
    peer = VJEPA2RopeAttention(config, hidden_size=2 * head_dim, num_attention_heads=2)
    grid = Grid(4, 4, frames=3)
    x = torch.randn(1, 2, grid.tokens, head_dim)
    expected = peer.apply_rotary_embeddings(x, peer.get_position_ids(torch.zeros(1, grid.tokens, 1)))
    encoding = VJEPA2(2 * head_dim, 2, grid, pairing="repeated")
    close(turned(encoding, x, grid), expected, roundings=64)
    image = Grid(4, 4)
    first = x[:, :, :16]
    close(
        turned(VJEPA2(2 * head_dim, 2, image, pairing="repeated"), first, image), expected[:, :, :16], roundings=64
    )


@pytest.mark.parametrize("home", [32, 100, 2048])
@pytest.mark.parametrize("factor", [1, 1.5, 4])
@pytest.mark.parametrize(
    ("scaling", "kind"), [("none", "default"), ("pi", "linear"), ("ntk", "dynamic"), ("yarn", "yarn")]
)
def test_scaling_in_one_dimension_is_transformers(scaling: Any, kind: str, factor: float, home: int) -> None:
    """On a grid of one row. Dynamic NTK of transformers with factor 1 is NTK by the length itself."""
    length, d = int(home * factor), 64
    given = {"factor": 1.0 if kind == "dynamic" else length / home, "original_max_position_embeddings": home}
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **({} if kind == "default" else given)}
    config = LlamaConfig(
        hidden_size=2 * d, num_attention_heads=2, max_position_embeddings=home, rope_parameters=parameters
    )
    if kind == "default":
        frequencies, scale = 10000.0 ** (-torch.arange(0, d, 2) / d), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    encoding = RoPE1D(2 * d, 2, Grid(1, home), scaling=scaling, layout="half")
    (rotation,) = encoding.rotations(Grid(1, length))
    assert isinstance(scale, float)
    torch.testing.assert_close(rotation.angles[0, 1], frequencies, rtol=1e-6, atol=0)
    assert float(rotation.scale) == pytest.approx(scale, abs=1e-6)
    x = torch.randn(1, 2, length, d)
    angles = torch.arange(length)[:, None] * frequencies
    cos, sin = (wave(angles).repeat(1, 2)[None] * scale for wave in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    close(rotation(x), expected, roundings=2 * length)


# the papers' own code


def test_rope_vit() -> None:
    x, grid = features(1, 2, 15, 16), Grid(3, 5)
    close(turned(RoPEAxial(32, 2, grid), x, grid), VALUES["axial.turned"], roundings=32)
    encoding = RoPEMixed(32, 2, grid)
    encoding.load_state_dict({"frequencies": VALUES["mixed.freqs"][:, 1].unflatten(-1, (2, 8))})
    close(turned(encoding, x, grid), VALUES["mixed.turned"], roundings=32)


def test_vit_pytorch_pixel() -> None:
    x, grid = features(1, 1, 16, 16), Grid(4, 4)
    close(turned(RoPEPixel(16, 1, grid), x, grid), VALUES["pixel.turned"], roundings=64)


@pytest.mark.parametrize(
    ("name", "heads", "grid", "given"),
    [
        ("2d", 3, Grid(3, 5), {"min_freq": 0.2, "max_freq": 20.0}),
        ("3d", 2, Grid(3, 4, frames=2), {"min_freq": 1.0, "max_freq": 10000.0, "zero_freqs": 0.3}),
    ],
)
def test_golden_gate(name: str, heads: int, grid: Grid, given: dict[str, float]) -> None:
    """Angles of 20 * 4, and of 10000 * 3: as exact as float32 can say them."""
    expected = VALUES[f"golden.{name}.turned"]
    head_dim = expected.shape[-1]
    encoding = GoldenGate(heads * head_dim, heads, grid, **given)
    torch.testing.assert_close(encoding.waves(grid, None), VALUES[f"golden.{name}.freqs"], rtol=2e-6, atol=0)
    found = turned(encoding, features(1, heads, grid.patches, head_dim), grid)
    close(found, expected, roundings=8 * given["max_freq"] * 4)


@pytest.mark.parametrize(
    ("name", "side", "home", "given"),
    [
        ("two", 6, 4, {}),
        ("axial", 4, 4, {"directions": 2}),
        ("four", 5, 5, {"directions": 8, "max_freq": 1.0}),
        ("shared", 5, 4, {"shared": True}),
    ],
)
def test_spiral(name: str, side: int, home: int, given: dict[str, Any]) -> None:
    """The released code turns maps of angles by bilinear sampling in float32."""
    expected, grid = VALUES[f"spiral.{name}.turned"], Grid(side, side)
    head_dim = expected.shape[-1]
    encoding = SpiralRoPE(2 * head_dim, 2, Grid(home, home), clamped=True, **given)
    x = features(1, 2, side * side, head_dim)
    close(turned(encoding, x, grid), expected, roundings=256)
    inner = [n for n in range(side * side) if {n // side, n % side} <= set(range(1, side - 1))]
    plain = SpiralRoPE(2 * head_dim, 2, Grid(home, home), **given)
    scores, released = ((t @ t.mT)[..., inner, :][..., inner] for t in (turned(plain, x, grid), expected))
    close(scores, released, roundings=512)  # far from the border projection and released code agree


def test_nd_rope() -> None:
    grid, freqs = Grid(3, 5), VALUES["nd.2d.freqs"]
    encoding = NDRoPE(48, 2, grid)
    encoding.load_state_dict({"directions": freqs[:, 1:2]})
    close(turned(encoding, features(1, 2, 15, 24), grid), VALUES["nd.2d.turned"], roundings=64)
    video = Grid(2, 3, frames=2)
    encoding = NDRoPE(32, 2, video)
    encoding.load_state_dict({"directions": VALUES["nd.3d.freqs"]})
    close(turned(encoding, features(1, 2, 12, 16), video), VALUES["nd.3d.turned"], roundings=64)


@pytest.mark.parametrize("scaling", ["pi", "none"])
def test_visionllama(scaling: Any) -> None:
    x, grid = features(1, 2, 36, 16), Grid(6, 6)
    expected = VALUES["visionllama.scaled.turned" if scaling == "pi" else "visionllama.plain.turned"]
    close(turned(VisionLLaMA(32, 2, Grid(4, 4), scaling=scaling), x, grid), expected, roundings=32)


@pytest.mark.parametrize(
    ("name", "scaling", "home", "size"),
    [
        ("linear.wide", "pi", 8, (10, 20)),
        ("ntk-aware.wide", "ntk", 8, (6, 20)),
        ("ntk-aware.tall", "ntk", 16, (30, 10)),
        ("yarn.wide", "yarn", 8, (6, 20)),
        ("yarn.tall", "yarn", 16, (30, 10)),
    ],
)
def test_scaling_per_axis_is_fits(name: str, scaling: Any, home: int, size: tuple[int, int]) -> None:
    """VisionNTK and VisionYaRN ("decouple"): each axis by its own length, the temperature by the longer one's."""
    encoding = EVA02(32, 1, Grid(home, home), reference=None, scaling=scaling)
    found = turned(encoding, features(1, 1, math.prod(size), 32), Grid(*size))
    close(found[:, :, VALUES[f"fit.{name}.at"]], VALUES[f"fit.{name}.turned"], roundings=4 * 30)


@pytest.mark.parametrize(
    ("name", "home", "grid", "given"),
    [
        ("2d", Grid(4, 4), Grid(3, 5, prefix=1), {"block": None}),
        ("rest", Grid(4, 4), Grid(3, 5, prefix=1), {"block": 3}),
        ("shared", Grid(2, 3), Grid(2, 3, prefix=1), {"shared": True}),
        ("3d", Grid(2, 2, frames=2), Grid(3, 2, prefix=1, frames=2), {"block": 4}),
    ],
)
def test_liere(name: str, home: Grid, grid: Grid, given: dict[str, Any]) -> None:
    """Exponentials, in float32, of matrices of norms up to 2π * 8."""
    raw = VALUES[f"liere.{name}.raw"][:, 0]  # [axes, heads * blocks, block, block], of which half is used
    encoding = LieRE(16, 2, home, **given)
    row, column = torch.triu_indices(raw.shape[-1], raw.shape[-1], 1)
    encoding.load_state_dict({"generators": raw[..., row, column].unflatten(1, encoding.generators.shape[1:3])})
    close(turned(encoding, features(1, 2, grid.tokens, 8), grid), VALUES[f"liere.{name}.turned"], roundings=1024)


@pytest.mark.parametrize(("name", "kind", "block"), [("ap", "ap", 4), ("ap2", "ap", 2), ("ld", "ld", 4)])
def test_comrope(name: str, kind: Any, block: int) -> None:
    """Scores: the released code counts from 0 and turns the class token by ½, here all is told from the centre."""
    grid = Grid(4, 4, prefix=1)
    encoding = ComRoPE(32, 2, grid, kind=kind, block=block)
    state = {"generators": VALUES[f"comrope.{name}.freqs"][:, 0]}
    if kind == "ld":
        state["scales"] = VALUES[f"comrope.{name}.multiplier"][0, :, :, 0, 0]
    encoding.load_state_dict(state)
    found, expected = turned(encoding, features(1, 2, 17, 16), grid), VALUES[f"comrope.{name}.turned"]
    close(found @ found.mT, expected @ expected.mT, roundings=1024)


# bugs of others


def fast_rotary(x: Tensor, height: int, width: int) -> Tensor:
    """The rotary embedding of mmpretrain's EVA-02: frequencies repeated block-wise, features paired in turn."""
    half = x.shape[-1] // 2
    f = 10000.0 ** (-torch.arange(0, half, 2) / half)
    y, x_ = (torch.arange(n)[:, None] / n * half * f for n in (height, width))
    rows, columns = y.repeat(1, 2)[:, None].expand(-1, width, -1), x_.repeat(1, 2)[None].expand(height, -1, -1)
    angles = torch.cat([rows, columns], -1).flatten(0, 1)
    swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * angles.cos() + swapped * angles.sin()


def holds_norms(turn: Any, x: Tensor) -> bool:
    return bool(((turn(x).norm(dim=-1) / x.norm(dim=-1)) - 1).abs().max() < 1e-5)


def holds_offsets(turn: Any, height: int, width: int, head_dim: int) -> bool:
    """Scores of one q and one k at all places depend on the offset of the places alone."""
    q, k = (v.expand(1, 2, height * width, head_dim) for v in torch.randn(2, head_dim))
    scores = (turn(q) @ turn(k).mT)[0, 1].reshape(height, width, height, width)
    return bool((scores[1:, 1:, 1:, 1:] - scores[:-1, :-1, :-1, :-1]).abs().max() < 1e-4 * scores.abs().max())


def test_mmpretrains_rotary_is_not_a_rotation_and_ours_is() -> None:
    height, width, head_dim = 5, 7, 64
    x, grid = torch.randn(1, 2, height * width, head_dim), Grid(height, width)
    ours = EVA02(2 * head_dim, 2, grid)
    for turn, right in ((lambda x: fast_rotary(x, height, width), False), (lambda x: turned(ours, x, grid), True)):
        assert holds_norms(turn, x) is right
        assert holds_offsets(turn, height, width, head_dim) is right


def test_vjepa2_is_a_rotation_unless_its_released_weights_are_wanted() -> None:
    grid = Grid(4, 5)
    x = torch.randn(1, 2, 20, 24)
    for pairing, right in (("paired", True), ("repeated", False)):
        encoding = VJEPA2(48, 2, grid, pairing=pairing)  # type: ignore[arg-type]
        assert holds_norms(lambda x, e=encoding: turned(e, x, grid), x) is right
        assert holds_offsets(lambda x, e=encoding: turned(e, x, grid), 4, 5, 24) is right


def test_released_code_of_spiral_is_not_relative_at_the_border_and_the_projection_is() -> None:
    grid = Grid(6, 6)
    for clamped, right in ((False, True), (True, False)):
        encoding = SpiralRoPE(64, 2, grid, clamped=clamped)
        assert holds_offsets(lambda x, e=encoding: turned(e, x, grid), 6, 6, 32) is right


def test_liere_keeps_norms_and_is_not_exactly_relative_but_in_blocks_of_two() -> None:
    grid = Grid(4, 5)
    x = torch.randn(1, 2, 20, 16)
    for block, right in ((None, False), (2, True)):
        encoding = LieRE(32, 2, grid, block=block)
        assert holds_norms(lambda x, e=encoding: turned(e, x, grid), x)
        assert holds_offsets(lambda x, e=encoding: turned(e, x, grid), 4, 5, 16) is right
