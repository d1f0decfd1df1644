"""PEG beyond one image without holes, LePE, and CPVT models."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models.coat import ConvPosEnc
from torch import Tensor, nn

from loops import attend, close, leaf, same_gradients
from whereformer import Grid, InputError, Padded, Windows, attention, describe, encode
from whereformer.adapters import cpvt
from whereformer.encodings import PEG, LePE
from whereformer.lab.cost import macs, parameters

VALUES = load_file(Path(__file__).parent / "data" / "conditional" / "lepe.safetensors")
"""Inputs, weights and outputs, in float64, of two attentions run as released: that of CSWin (`LePEAttention` of
microsoft/CSWin-Transformer) over the image and within stripes two patches wide, and that of RMT
(`VisionRetentionAll` of qhfan/RMT) without decay and rotation."""

GRIDS = [Grid(3, 4), Grid(3, 4, prefix=1), Grid(2, 5, prefix=2), Grid(2, 3, prefix=1, frames=3)]


def convolution(x: Tensor, grid: Grid, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Σ over offsets within reach and within the grid, patch by patch: [b, channels] each."""
    places = list(itertools.product(*map(range, grid.size)))
    number = {place: grid.prefix + n for n, place in enumerate(places)}
    reach = weight.shape[-1] // 2
    rows = []
    for place in places:
        row = torch.zeros_like(x[:, 0]) if bias is None else bias.expand_as(x[:, 0])
        for offset in itertools.product(range(-reach, reach + 1), repeat=grid.axes):
            near = tuple(p + o for p, o in zip(place, offset, strict=True))
            if near in number:
                at = tuple(o + reach for o in offset)
                row = row + weight[(slice(None), 0, *at)] * x[:, number[near]]
        rows.append(row)
    return rows


def randomized(encoding: Any) -> Any:
    for parameter in encoding.double().parameters():
        nn.init.normal_(parameter)
    return encoding


# peg


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_peg_is_its_sum_over_neighbours_in_images_and_videos(grid: Grid, kernel_size: int, bias: bool) -> None:
    encoding = randomized(PEG(4, 2, grid, kernel_size=kernel_size, bias=bias))
    x = leaf(2, grid.tokens, 4)
    rows = [x[:, n] for n in range(grid.prefix)]
    here = convolution(x, grid, encoding.weight, encoding.bias)
    rows += [x[:, grid.prefix + n] + row for n, row in enumerate(here)]
    same_gradients(encoding.tokens(x, grid), torch.stack(rows, 1), {"x": x, **dict(encoding.named_parameters())})


@pytest.mark.parametrize("kernel_size", [3, 5])
def test_peg_is_coats_with_a_class_token(kernel_size: int) -> None:
    grid = Grid(3, 5, prefix=1)
    encoding, peer = PEG(8, 2, grid, kernel_size=kernel_size), ConvPosEnc(8, kernel_size)
    peer.proj.load_state_dict(encoding.state_dict())
    x = torch.randn(2, 16, 8)
    close(encoding.tokens(x, grid), peer(x, (3, 5)), roundings=16)


def test_peg_on_videos_is_uniformers_convolution() -> None:
    grid = Grid(4, 5, frames=3)
    encoding, peer = PEG(8, 2, grid), nn.Conv3d(8, 8, 3, padding=1, groups=8)
    peer.load_state_dict(encoding.state_dict())
    x = torch.randn(2, 8, 3, 4, 5)
    expected = (x + peer(x)).flatten(2).mT
    close(encoding.tokens(x.flatten(2).mT, grid), expected, roundings=32)


def test_peg_counts_of_the_paper() -> None:
    """CPVT-Ti: 1,728 numbers, where the table of DeiT-Ti has 197 rows of 192."""
    assert sum(p.numel() for p in PEG(192, 3, Grid(14, 14), bias=False).parameters()) == 1728
    assert sum(p.numel() for p in PEG(192, 3, Grid(14, 14)).parameters()) == 1728 + 192
    assert PEG(192, 3, Grid(14, 14)).macs(Grid(14, 14, prefix=1)) == 196 * 1728
    assert PEG(8, 2, Grid(4, 5, frames=3)).macs(Grid(4, 5, frames=2)) == 40 * 8 * 27


def test_peg_tells_places_by_the_zeros_around_the_grid() -> None:
    """Equal patches: those whose neighbours lie beyond the same edges stay equal, the others do not."""
    grid = Grid(5, 6)
    encoding = randomized(PEG(4, 2, grid))
    x = encoding.tokens(torch.ones(1, 30, 4, dtype=torch.float64), grid)[0]
    kinds = {}
    for (y, c), row in zip(itertools.product(range(5), range(6)), x, strict=True):
        kinds.setdefault((y == 0, y == 4, c == 0, c == 5), []).append(row)
    assert len(kinds) == 9
    for rows in kinds.values():
        close(torch.stack(rows), rows[0].expand(len(rows), -1))
    first = torch.stack([rows[0] for rows in kinds.values()])
    assert (torch.cdist(first, first) + torch.eye(9)).min() > 1e-3


def test_peg_before_all_blocks_is_position_minus_one() -> None:
    assert list(PEG(8, 2, Grid(2, 2), after=-1).blocks(12)) == [0]
    assert list(PEG(8, 2, Grid(2, 2), after=tuple(range(-1, 11))).blocks(12)) == list(range(12)), "UniFormer"


# lepe


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_lepe_is_its_sum_over_neighbours(grid: Grid, kernel_size: int, backend: str) -> None:
    encoding = randomized(LePE(4, 2, grid, kernel_size=kernel_size))
    q, k, v = (leaf(2, 2, grid.tokens, 2) for _ in range(3))
    channels = v.transpose(1, 2).reshape(2, grid.tokens, 4)
    here = convolution(channels, grid, encoding.weight, encoding.bias)
    added = torch.stack([*[torch.zeros_like(here[0])] * grid.prefix, *here], 1)
    expected = attend(q, k, v) + added.reshape(2, grid.tokens, 2, 2).transpose(1, 2)
    sources = {"q": q, "k": k, "v": v, **dict(encoding.named_parameters())}
    same_gradients(attention(q, k, v, grid, [encoding], backend=backend), expected, sources)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


@pytest.mark.parametrize(("name", "window"), [("whole", (6, 6)), ("columns", (6, 2)), ("rows", (2, 6))])
def test_lepe_is_cswins(name: str, window: tuple[int, int]) -> None:
    qkv, weight, bias, expected = (VALUES[f"cswin.{name}.{part}"] for part in ("qkv", "weight", "bias", "out"))
    windows = Windows(Grid(6, 6), window)
    encoding = LePE(6, 3, windows.one).double()
    encoding.load_state_dict({"weight": weight, "bias": bias})
    q, k, v = (heads(windows.split(x), 3) for x in qkv)
    out = attention(q, k, v, windows.one, [encoding])
    close(windows.merge(out.transpose(1, 2).flatten(2)), expected)


def test_lepe_is_rmts() -> None:
    q, k, v, weight, bias, expected = (VALUES[f"rmt.{part}"] for part in ("q", "k", "v", "weight", "bias", "out"))
    grid = Grid(4, 5)
    encoding = LePE(8, 2, grid, kernel_size=5).double()
    encoding.load_state_dict({"weight": weight, "bias": bias})
    q, k, v = (heads(x.flatten(1, 2), 2) for x in (q, k, v))
    out = attention(q, k, v, grid, [encoding])
    close(out.transpose(1, 2).flatten(2).unflatten(1, (4, 5)), expected)


def test_lepe_starts_as_torchs_convolutions() -> None:
    """9,216 samples of a uniform: the standard deviation of their deviation is 0.47 %."""
    encoding, peer = LePE(1024, 2, Grid(3, 3)), nn.Conv2d(1024, 1024, 3, groups=1024)
    for ours, theirs in ((encoding.weight, peer.weight), (encoding.bias, peer.bias)):
        assert theirs is not None
        assert ours.abs().max() <= 1 / 3
        assert theirs.abs().max() <= 1 / 3
    assert abs(encoding.weight.std().item() * 3 * 3**0.5 - 1) < 5 * 0.0047
    assert encoding.macs(Grid(4, 5, prefix=3)) == 20 * 1024 * 9


def test_lepe_of_kept_patches_sees_zeros_where_the_others_were() -> None:
    grid = Grid(3, 4, prefix=1)
    index = torch.tensor([[7, 0, 3, 10], [2, 11, 5, 4]])
    kept, encoding = grid.keep(index), randomized(LePE(4, 2, grid))
    q, k, v = (leaf(2, 2, kept.tokens, 2) for _ in range(3))
    whole = torch.zeros(2, grid.tokens, 4, dtype=torch.float64)
    for b, n in itertools.product(range(2), range(4)):
        whole[b, 1 + int(index[b, n])] = v[b, :, 1 + n].flatten()
    here = torch.stack(convolution(whole, grid, encoding.weight, encoding.bias), 1)
    here = torch.stack([here[b, index[b]] for b in range(2)])
    added = heads(torch.cat([torch.zeros(2, 1, 4, dtype=torch.float64), here], 1), 2)
    sources = {"q": q, "k": k, "v": v, **dict(encoding.named_parameters())}
    same_gradients(attention(q, k, v, kept, [encoding]), attend(q, k, v) + added, sources)


def test_padding_does_not_leak_into_convolutions() -> None:
    grids = (Grid(2, 3, prefix=1), Grid(4, 1, prefix=1))
    padded = Padded(grids)
    peg, lepe = (randomized(cls(4, 2, Grid(3, 3))) for cls in (PEG, LePE))
    x = torch.randn(2, padded.tokens, 4, dtype=torch.float64)
    q, k, v = (torch.randn(2, 2, padded.tokens, 2, dtype=torch.float64) for _ in range(3))
    tokens, out = encode(x, padded, [peg]), attention(q, k, v, padded, [lepe])
    for (rows, at), grid in zip(padded.parts(), grids, strict=True):
        close(tokens[rows][:, at], peg.tokens(x[rows][:, at], grid))
        close(out[rows][:, :, at], attention(*(t[rows][:, :, at] for t in (q, k, v)), grid, [lepe]))


def test_lepe_refuses() -> None:
    with pytest.raises(InputError, match="LePE: kernel_size=2, expected an odd"):
        LePE(4, 2, Grid(3, 3), kernel_size=2)
    with pytest.raises(InputError, match="kernel_size=True"):
        LePE(4, 2, Grid(3, 3), kernel_size=True)
    q, k = torch.zeros(1, 2, 9, 2), torch.zeros(1, 2, 4, 2)
    with pytest.raises(InputError, match="LePE"):
        attention(q, k, k, Grid(3, 3), [LePE(4, 2, Grid(3, 3))], keys=Grid(2, 2))


# cpvt

PRINTED = {"tiny": (5.69, 1262), "small": (21.99, 4616), "base": (86.45, 17598)}
"""Millions of parameters and of multiply-adds of CPVT(0-5). The multiply-adds are printed in Table 5 of iRPE, with
6, 23 and 86 M parameters; CPVT prints 6, 23 and 88. DeiT-S without its table and with five PEGs has 22, not 23."""


@pytest.mark.parametrize("size", PRINTED)
@pytest.mark.parametrize("gap", [False, True])
def test_cpvt_counts(size: str, gap: bool) -> None:
    with torch.device("meta"):
        plain = timm.create_model(f"deit_{size}_patch16_224")
        model = cpvt(size, gap=gap)
    dim = plain.embed_dim
    peg = 9 * dim + dim
    assert parameters(model) == parameters(plain) - 197 * dim - gap * dim + 5 * peg
    millions, counted = PRINTED[size]
    assert round(parameters(model) / 1e6, 2) == millions
    if not gap:
        assert int(macs(model, 224, 224) / 1e6) == counted
    else:
        assert macs(model, 224, 224) / 1e6 < counted


SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 7, "num_heads": 3}


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("after", [0, (0, 1, 2, 3, 4)])
def test_cpvt_is_deit_with_pegs(gap: bool, after: int | tuple[int, ...]) -> None:
    """Block by block, with convolutions of torch's."""
    model = cpvt("tiny", gap=gap, after=after, num_classes=5, **SMALL).eval()
    assert [seat.where for seat in describe(model).seats] == [
        f"blocks.{a + 1}" for a in ((after,) if isinstance(after, int) else after)
    ]
    x = torch.randn(2, 3, 24, 40)
    tokens = model.patch_embed(x).flatten(1, 2)
    if not gap:
        tokens = torch.cat([model.cls_token.expand(2, -1, -1), tokens], 1)
    for number, block in enumerate(model.blocks):
        for peg in block.encodings:
            prefix, image = tokens.tensor_split([1 - gap], 1)
            convolution = nn.Conv2d(24, 24, 3, padding=1, groups=24)
            convolution.load_state_dict(peg.state_dict())
            image = image.mT.reshape(2, 24, 3, 5)
            tokens = torch.cat([prefix, (image + convolution(image)).flatten(2).mT], 1)
        tokens = tokens + block.attn.proj(plain_attention(block.attn, block.norm1(tokens)))
        tokens = tokens + block.mlp(block.norm2(tokens))
        assert len(block.encodings) == (number - 1 in ((after,) if isinstance(after, int) else after))
    tokens = model.norm(tokens)
    torch.testing.assert_close(model(x), model.head(tokens.mean(1) if gap else tokens[:, 0]))


def plain_attention(module: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part, module.num_heads) for part in module.qkv(x).chunk(3, -1))
    return ((q @ k.mT * module.head_dim**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_cpvt_refuses() -> None:
    for size, options, message in (
        ("huge", {}, "size='huge', expected one of"),
        ("tiny", {"no_such_option": 1}, "no_such_option"),
        ("tiny", {"after": 11}, "after=11, but of 12 blocks"),
    ):
        with torch.device("meta"), pytest.raises(InputError, match=message):
            cpvt(size, **options)
