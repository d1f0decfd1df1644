"""Encodings that are functions of coordinates: sincos1d, sincos3d, detr_sine, fourier, perceiver, xcit,
learnable_fourier; against their equations and against other implementations."""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.layers.pos_embed_sincos import FourierEmbed, build_sincos2d_pos_embed
from timm.models.xcit import PositionalEncodingFourier
from torch import Tensor

from loops import close, leaf, same_gradients
from whereformer import Grid, InputError, Padded, PositionEncoding, encode
from whereformer.encodings import (
    DETRSine,
    Fourier,
    LearnableFourier,
    Perceiver,
    SinCos1D,
    SinCos2D,
    SinCos3D,
    XCiT,
)
from whereformer.grid import Points

REFERENCE = load_file(Path(__file__).parent / "data" / "absolute" / "reference.safetensors")
"""Values of released code: V-JEPA's and MAE's position tables, the Perceiver's Fourier features, a public port of
learnable Fourier features (willGuimont/learnable_fourier_positional_encoding, with its weights)."""

SINGLE = 2**29
"""One rounding to float32, in roundings to float64."""

IMAGES = [Grid(3, 5), Grid(4, 2, prefix=1), Grid(1, 7, prefix=2)]
VIDEO = Grid(2, 3, 1, frames=4)


def added(encoding: PositionEncoding, grid: Grid) -> Tensor:
    """What an encoding adds to patches: [patches, dim]."""
    dtype = next((p.dtype for p in encoding.parameters()), torch.float32)
    return encoding.tokens(torch.zeros(1, grid.tokens, encoding.dim, dtype=dtype), grid)[0, grid.prefix :]


def holds(encoding: PositionEncoding, grid: Grid, row: Callable[..., Tensor], roundings: int) -> None:
    """Tokens, and all gradients, are those of x_n + row(place of n), prefix tokens untouched."""
    x = leaf(2, grid.tokens, encoding.dim)
    rows = [x[:, n] for n in range(grid.prefix)]
    for n, place in enumerate(itertools.product(*map(range, grid.size)), start=grid.prefix):
        rows.append(x[:, n] + row(*place))
    sources = {"x": x, **{name: p for name, p in encoding.named_parameters() if p.requires_grad}}
    same_gradients(encoding.tokens(x, grid), torch.stack(rows, 1), sources, roundings)


def wave(position: float, channels: int, temperature: float = 10000.0) -> list[float]:
    """PE of Vaswani et al.: sin, cos of each frequency side by side."""
    angles = [position / temperature ** (2 * k / channels) for k in range(channels // 2)]
    return [f(angle) for angle in angles for f in (math.sin, math.cos)]


def apart(pairs: list[float]) -> list[float]:
    return pairs[::2] + pairs[1::2]


def vector(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# sincos1d


@pytest.mark.parametrize("grid", [*IMAGES, VIDEO], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("temperature", [10000.0, 20.0])
def test_sincos1d_is_its_equation(grid: Grid, layout: Any, temperature: float) -> None:
    """In float32: angles up to 24 are rounded a few times."""

    def row(*place: int) -> Tensor:
        number = 0
        for n, p in zip(grid.size, place, strict=True):
            number = number * n + p
        pairs = wave(number, 10, temperature)
        return vector(pairs if layout == "interleaved" else apart(pairs))

    encoding = SinCos1D(10, 2, grid, layout=layout, temperature=temperature)
    holds(encoding, grid, row, 4 * grid.patches * SINGLE)


@pytest.mark.parametrize("grid", [Grid(14, 14), Grid(3, 50), Grid(4, 5, frames=8)], ids=str)
def test_sincos1d_is_videomaes(grid: Grid) -> None:
    from transformers.models.videomae.modeling_videomae import get_sinusoid_encoding_table

    expected = get_sinusoid_encoding_table(grid.patches, 24)[0]
    close(SinCos1D(24, 3, grid).table(grid), expected, roundings=4 * grid.patches)


def test_sincos1d_in_halves_is_a_half_of_timms_table_of_one_row() -> None:
    expected = build_sincos2d_pos_embed([1, 40], dim=48, interleave_sin_cos=True)[:, 24:]
    close(SinCos1D(24, 3, Grid(1, 40), layout="half").table(Grid(1, 40)), expected, roundings=4 * 40)


def test_sincos1d_of_a_sequence_is_the_same_of_a_column() -> None:
    encoding = SinCos1D(8, 1, Grid(1, 6))
    assert torch.equal(encoding.table(Grid(1, 6)), encoding.table(Grid(6, 1)))
    assert torch.equal(encoding.table(Grid(1, 6)), encoding.table(Grid(2, 3)))


# sincos2d, against what was released


@pytest.mark.parametrize("grid", [Grid(14, 14), Grid(3, 7), Grid(5, 1)], ids=str)
def test_moco_layout_is_transformers_vitmae(grid: Grid) -> None:
    """Its table has rows first; MAE's own, below, columns."""
    from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

    expected = build_2d_sinusoidal_position_embedding(grid.height, grid.width, 24)
    found = SinCos2D(24, 3, grid, layout="moco").table(grid)
    close(found, expected, roundings=4 * max(grid.size))


def test_layouts_are_maes_and_big_visions() -> None:
    close(SinCos2D(16, 1, Grid(3, 3)).table(Grid(3, 3)), REFERENCE["mae/3x3-16"].float(), roundings=8)
    found = SinCos2D(16, 1, Grid(3, 4), layout="big_vision").table(Grid(3, 4))
    close(found, REFERENCE["big_vision/3x4"], roundings=16)


def test_sincos2d_speaks_of_points_between_patches() -> None:
    """At (0.5, 2.25), in channels of frequency 1."""
    points = Points(4, 4, at=torch.tensor([[[0.5, 2.25]]]))
    row = SinCos2D(8, 1, Grid(4, 4)).table(points)[0, 0]
    close(row[[0, 2, 4, 6]], torch.tensor([f(p) for p in (2.25, 0.5) for f in (math.sin, math.cos)]), roundings=4)


# sincos3d


@pytest.mark.parametrize("grid", [*IMAGES, VIDEO], ids=str)
@pytest.mark.parametrize("dim", [24, 16, 8])
def test_sincos3d_is_its_equation(grid: Grid, dim: int) -> None:
    def row(*place: int) -> Tensor:
        channels = 2 * math.ceil(dim / (2 * len(place)))
        return vector([c for p in place for c in apart(wave(p, channels, 50.0))][:dim])

    holds(SinCos3D(dim, 2, grid, temperature=50.0), grid, row, 4 * 8 * SINGLE)


@pytest.mark.parametrize("name", ["2x3x3-16", "3x2x2-24", "3x3-16"])
def test_sincos3d_is_jepas(name: str) -> None:
    """Of 16 channels each axis would have 6: the last two are cut off."""
    size, dim = name.split("-")
    *frames, height, width = map(int, size.split("x"))
    grid = Grid(height, width, frames=frames[0] if frames else None)
    close(SinCos3D(int(dim), 1, grid).table(grid), REFERENCE[f"jepa/{name}"].float(), roundings=16)


def test_sincos3d_of_an_image_is_sincos2d() -> None:
    grid = Grid(3, 5)
    assert torch.equal(SinCos3D(16, 1, grid).table(grid), SinCos2D(16, 1, grid, layout="moco").table(grid))


# detr_sine


DETR_SETTINGS: list[dict[str, Any]] = [
    {},
    {"scale": 3.0, "temperature": 20.0},
    {"offset": -0.5},
    {"normalize": False},
    {"normalize": False, "temperature": 20.0},
]


@pytest.mark.parametrize("grid", IMAGES, ids=str)
@pytest.mark.parametrize("options", DETR_SETTINGS, ids=str)
def test_detr_sine_is_its_equation(grid: Grid, options: dict[str, Any]) -> None:
    def at(p: int, size: int) -> float:
        if not options.get("normalize", True):
            return p + 1
        return options.get("scale", 2 * math.pi) * (p + 1 + options.get("offset", 0)) / (size + 1e-6)

    def row(y: int, x: int) -> Tensor:
        temperature = options.get("temperature", 10000.0)
        return vector(
            wave(at(y, grid.height), 6, temperature) + wave(at(x, grid.width), 6, temperature),
        )

    holds(DETRSine(12, 2, grid, **options), grid, row, 4 * 8 * SINGLE)


def transformers_detr(encoding: DETRSine, mask: Tensor | None, size: tuple[int, int, int]) -> Tensor:
    """What transformers' DETR, or Deformable DETR, makes of images [batch, height, width]: [batch, h, w, dim]."""
    from transformers.models.deformable_detr.modeling_deformable_detr import DeformableDetrSinePositionEmbedding
    from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding

    cls = DeformableDetrSinePositionEmbedding if encoding.offset else DetrSinePositionEmbedding
    peer = cls(
        encoding.dim // 2,
        temperature=encoding.temperature,  # pyright: ignore[reportArgumentType]
        normalize=encoding.normalize,
        scale=encoding.scale if encoding.normalize else None,
    )
    shape = torch.Size([size[0], 1, *size[1:]])
    return peer(shape, torch.device("cpu"), torch.float32, mask=mask).permute(0, 2, 3, 1)


@pytest.mark.parametrize("options", DETR_SETTINGS, ids=str)
def test_detr_sine_is_transformers(options: dict[str, Any]) -> None:
    grid = Grid(7, 12, prefix=1)
    encoding = DETRSine(24, 2, grid, **options)
    expected = transformers_detr(encoding, None, (1, 7, 12)).flatten(0, 2)
    close(added(encoding, grid), expected, roundings=4 * 13)


@pytest.mark.parametrize("options", DETR_SETTINGS, ids=str)
def test_detr_sine_of_padded_images_is_transformers_with_its_mask(options: dict[str, Any]) -> None:
    """Each image of the batch is normalized by its own size; padding gets nothing."""
    batch = Padded((Grid(3, 5), Grid(4, 2), Grid(2, 6)), Grid(5, 6))
    encoding = DETRSine(24, 2, batch.grid, **options)
    mask = torch.zeros(3, 5, 6, dtype=torch.bool)
    for image, grid in zip(mask, batch.grids, strict=True):
        image[: grid.height, : grid.width] = True
    x = torch.randn(3, 30, 24)
    found = (encode(x, batch, [encoding]) - x).unflatten(1, (5, 6))
    expected = transformers_detr(encoding, mask, (3, 5, 6))
    assert mask.sum() == 15 + 8 + 12
    close(found[mask], expected[mask], roundings=4 * 8)


@pytest.mark.parametrize("padded", [False, True])
def test_detr_sine_compiled_in_bfloat16_is_the_same(padded: bool) -> None:
    batch = Padded((Grid(3, 5), Grid(4, 2))) if padded else Grid(4, 5)
    encoding = DETRSine(16, 2, Grid(4, 5))
    x = torch.randn(2, 20, 16, dtype=torch.bfloat16)
    torch.compiler.reset()
    found = torch.compile(encode, fullgraph=True, backend="aot_eager")(x, batch, [encoding])
    torch.compiler.reset()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, encode(x, batch, [encoding]))


def test_detr_sine_counts_from_one_and_ends_at_one_turn() -> None:
    """Of frequency 1: the first of four rows is at 2π / 4, the last at 2π."""
    table = DETRSine(4, 1, Grid(4, 1)).table(Grid(4, 1))
    expected = [[1, 0], [0, -1], [-1, 0], [0, 1]]
    torch.testing.assert_close(table[:, :2], torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-5)


# fourier


@pytest.mark.parametrize("grid", [*IMAGES, VIDEO], ids=str)
@pytest.mark.parametrize("layout", ["tancik", "sam"])
def test_fourier_is_its_equation(grid: Grid, layout: Any) -> None:
    encoding = Fourier(10, 2, grid, layout=layout).double()

    def row(*place: int) -> Tensor:
        v = [p / n if layout == "tancik" else 2 * (p + 0.5) / n - 1 for p, n in zip(place, grid.size, strict=True)]
        waves: dict[str, list[float]] = {"cos": [], "sin": []}
        for c in range(5):
            angle = 2 * math.pi * sum(v_k * encoding.B[k, c].item() for k, v_k in enumerate(reversed(v)))
            waves["cos"].append(math.cos(angle))
            waves["sin"].append(math.sin(angle))
        order = ("cos", "sin") if layout == "tancik" else ("sin", "cos")
        return vector([number for name in order for number in waves[name]])

    holds(encoding, grid, row, 512)


@pytest.mark.parametrize("grid", [Grid(8, 8), Grid(3, 7, prefix=1)], ids=str)
def test_fourier_is_transformers_sam(grid: Grid) -> None:
    """Angles up to 2π · 2 · 4, rounded in float32; the peer is told centres of patches, x first."""
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamPositionalEmbedding

    peer = SamPositionalEmbedding(SamVisionConfig(num_pos_feats=12, hidden_size=24))
    encoding = Fourier(24, 2, grid, layout="sam")
    with torch.no_grad():
        encoding.B.normal_().clamp_(-4, 4)
        peer.positional_embedding.copy_(encoding.B)
    y, x = grid.coords().unflatten(0, grid.size).unbind(-1)
    expected = peer(torch.stack([x, y], -1)[None] + 0.5, grid.size)[0].flatten(0, 1)
    close(added(encoding, grid), expected.detach(), roundings=4 * 64)


def test_fourier_features_are_drawn_once_saved_and_never_trained() -> None:
    """60,000 samples: the standard deviation of their deviation is 0.29 %."""
    encoding = Fourier(60_000, 2, Grid(3, 4), sigma=3.0)
    assert list(encoding.state_dict()) == ["B"]
    assert not any(p.requires_grad for p in encoding.parameters())
    assert abs(encoding.B.std().item() / 3.0 - 1) < 5 * 0.0029
    assert abs(encoding.B.mean().item()) < 5 * 3.0 / 60_000**0.5


# perceiver


@pytest.mark.parametrize("grid", [*IMAGES, VIDEO], ids=str)
def test_perceiver_is_its_equation(grid: Grid) -> None:
    encoding = Perceiver(6, 2, grid, bands=3, resolution=10).double()
    torch.nn.init.normal_(encoding.bias)

    def row(*place: int) -> Tensor:
        p = [2 * at / (n - 1) - 1 if n > 1 else -1.0 for at, n in zip(place, grid.size, strict=True)]
        angles = [math.pi * f * at for at in p for f in (1.0, 3.0, 5.0)]
        features = vector([*p, *map(math.sin, angles), *map(math.cos, angles)])
        return torch.stack([(encoding.weight[c] * features).sum() + encoding.bias[c] for c in range(6)])

    holds(encoding, grid, row, 512)


@pytest.mark.parametrize(("name", "bands", "resolution"), [("3x4", 5, 16), ("2x3x4", 3, 20)])
def test_perceiver_features_are_its_released_codes(name: str, bands: int, resolution: float) -> None:
    """Angles up to 10 π, rounded in float32."""
    *frames, height, width = map(int, name.split("x"))
    grid = Grid(height, width, frames=frames[0] if frames else None)
    found = Perceiver(6, 2, grid, bands=bands, resolution=resolution).features(grid)
    close(found, REFERENCE[f"perceiver/{name}"], roundings=4 * 32)


@pytest.mark.parametrize("grid", [Grid(7, 7), Grid(3, 9), Grid(1, 5)], ids=str)
def test_perceiver_features_are_timms(grid: Grid) -> None:
    """Which has features of y and of x side by side; angles up to 16 π."""
    peer = FourierEmbed(max_res=32, num_bands=6)
    expected = peer(torch.zeros(1, 1, *grid.size))[0, :, 1:].unflatten(-1, (13, 2))
    expected = [expected[:, :1], expected[:, 1:7], expected[:, 7:]]
    expected = torch.cat([part.mT.flatten(1) for part in expected], -1)
    close(Perceiver(6, 2, grid, bands=6, resolution=32).features(grid), expected, roundings=4 * 51)


# xcit


@pytest.mark.parametrize("grid", IMAGES, ids=str)
def test_xcit_is_its_equation(grid: Grid) -> None:
    encoding = XCiT(6, 2, grid, channels=4, temperature=20.0).double()

    def row(y: int, x: int) -> Tensor:
        angles = [2 * math.pi * (p + 1) / (n + 1e-6) for p, n in ((y, grid.height), (x, grid.width))]
        features = vector(wave(angles[0], 4, 20.0) + wave(angles[1], 4, 20.0))
        return torch.stack([(encoding.weight[c] * features).sum() + encoding.bias[c] for c in range(6)])

    holds(encoding, grid, row, 512)


@pytest.mark.parametrize("grid", [Grid(14, 14), Grid(3, 9, prefix=1)], ids=str)
def test_xcit_is_timms(grid: Grid) -> None:
    encoding, peer = XCiT(24, 2, grid), PositionalEncodingFourier(dim=24)
    peer.token_projection.weight.data = encoding.weight.data[..., None, None]
    peer.token_projection.bias.data = encoding.bias.data  # type: ignore[union-attr]
    expected = peer(1, *grid.size)[0].flatten(1).T
    close(added(encoding, grid).detach(), expected.detach(), roundings=4 * 64)


# learnable_fourier


@pytest.mark.parametrize("grid", [*IMAGES, VIDEO], ids=str)
@pytest.mark.parametrize("groups", ["together", "apart"])
def test_learnable_fourier_is_its_equation(grid: Grid, groups: Any) -> None:
    encoding = LearnableFourier(12, 2, grid, features=8, hidden=5, groups=groups, gamma=3.0).double()

    def row(*place: int) -> Tensor:
        parts = []
        for p in [place] if groups == "together" else [(at,) for at in place]:
            angles = [sum(at * encoding.W_r[m, f] for m, at in enumerate(p)) for f in range(4)]
            r = torch.stack(
                [torch.as_tensor(a).cos() for a in angles] + [torch.as_tensor(a).sin() for a in angles]
            )
            r = r / math.sqrt(8)
            h = torch.stack([(encoding.weight_1[c] * r).sum() + encoding.bias_1[c] for c in range(5)])
            h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
            width = 12 if groups == "together" else 12 // len(place)
            parts += [(encoding.weight_2[c] * h).sum() + encoding.bias_2[c] for c in range(width)]
        return torch.stack(parts)

    holds(encoding, grid, row, 512)


@pytest.mark.parametrize("groups", ["together", "apart"])
def test_learnable_fourier_is_a_public_port(groups: Any) -> None:
    grid = Grid(3, 4)
    values = {
        name.split("/", 2)[2]: value
        for name, value in REFERENCE.items()
        if name.startswith(f"learnable_fourier/{groups}")
    }
    encoding = LearnableFourier(12, 2, grid, features=8, hidden=6, groups=groups).double()
    encoding.load_state_dict(
        {
            "W_r": values["Wr.weight"].T,
            "weight_1": values["mlp.0.weight"],
            "bias_1": values["mlp.0.bias"],
            "weight_2": values["mlp.2.weight"],
            "bias_2": values["mlp.2.bias"],
        }
    )
    close(added(encoding, grid).detach(), values["out"])


def test_learnable_fourier_starts_near_a_gaussian_of_the_distance() -> None:
    """2 r_i·r_j is a mean of 100,000 cosines: 5 of its deviations are at most 0.012."""
    gamma, offset = 2.0, torch.tensor([1.0, 2.0])
    W_r = LearnableFourier(4, 1, Grid(2, 2), features=200_000, gamma=gamma).W_r
    kernel = (offset @ W_r).cos().mean().item()
    assert abs(kernel - math.exp(-5.0 / (2 * gamma**2))) < 0.012


# all of them


def test_sinusoids_have_nothing_to_train_or_save() -> None:
    for encoding in (SinCos1D(8, 1, Grid(2, 3)), SinCos3D(8, 1, Grid(2, 3)), DETRSine(8, 1, Grid(2, 3))):
        assert not list(encoding.parameters())
        assert not encoding.state_dict()


def everything(grid: Grid) -> Iterator[PositionEncoding]:
    classes = (SinCos1D, SinCos2D, SinCos3D, DETRSine, Fourier, LearnableFourier, Perceiver, XCiT)
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
        close(some, whole[index], roundings=4)


@pytest.mark.parametrize(
    ("cls", "dim", "options", "message"),
    [
        (SinCos1D, 9, {}, "SinCos1D: dim=9, expected an even number"),
        (SinCos1D, 8, {"layout": "moco"}, "layout='moco', expected 'interleaved' or 'half'"),
        (SinCos1D, 8, {"temperature": -1}, "temperature=-1"),
        (SinCos3D, 9, {}, "SinCos3D: dim=9"),
        (SinCos3D, 8, {"temperature": 0}, "temperature=0"),
        (DETRSine, 6, {}, "dim=6, expected a multiple of 4"),
        (DETRSine, 8, {"scale": 0}, "scale=0"),
        (DETRSine, 8, {"offset": "half"}, "offset='half', expected a number"),
        (DETRSine, 8, {"offset": math.nan}, "offset=nan"),
        (DETRSine, 8, {"offset": -0.5, "normalize": False}, "offset=-0.5 with normalize=False"),
        (DETRSine, 8, {"scale": 1.0, "normalize": False}, "scale=1.0, offset=0.0 with normalize=False"),
        (Fourier, 9, {}, "dim=9"),
        (Fourier, 8, {"layout": "kornia"}, r"layout='kornia', expected one of \['tancik', 'sam'\]"),
        (Fourier, 8, {"sigma": 0}, "sigma=0"),
        (Perceiver, 8, {"bands": 0}, "bands=0, expected a positive integer"),
        (Perceiver, 8, {"resolution": "224"}, "resolution='224'"),
        (XCiT, 8, {"channels": 3}, "channels=3, expected an even number"),
        (XCiT, 8, {"channels": 2.0}, "channels=2.0"),
        (LearnableFourier, 8, {"features": 7}, "features=7, expected an even number"),
        (LearnableFourier, 8, {"hidden": True}, "hidden=True"),
        (LearnableFourier, 8, {"groups": 2}, r"groups=2, expected one of \['together', 'apart'\]"),
        (LearnableFourier, 9, {"groups": "apart"}, "dim=9, expected a multiple of 2"),
        (LearnableFourier, 8, {"gamma": 0}, "gamma=0"),
    ],
)
def test_what_is_refused(cls: Any, dim: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cls(dim, 1, Grid(2, 3), **options)


@pytest.mark.parametrize("cls", [SinCos2D, DETRSine, XCiT])
def test_encodings_of_images_refuse_videos(cls: Any) -> None:
    with pytest.raises(InputError, match=f"{cls.__name__}: grid=.*defined on images"):
        cls(24, 2, Grid(2, 3, frames=2))
