"""Biases, GPSA and PaPE against timm, transformers, torchvision and values of the papers' own code.

`data/biases/reference.safetensors` was computed in float32 with the code of cheerss/CrossFormer, antofuller/CROMA,
chijames/KERPLE, mcleish7/arithmetic (FIRE: the authors released none), qhfan/RMT, GreenCUBIC/lookhere,
DTU-PAS/parabolic-position-encoding and meta-pytorch/attention-gym, as they were in 2026.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers.pos_embed_rel import RelPosBias, RelPosBiasTf, RelPosMlp, resize_rel_pos_bias_table
from timm.models import beit as timm_beit
from timm.models import convit as timm_convit
from timm.models import levit as timm_levit
from torch import Tensor, nn
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
from transformers import BeitConfig, Swinv2Config, T5Config
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention
from transformers.models.t5.modeling_t5 import T5Attention

from loops import close, same_gradients
from test_biases import said
from whereformer import Grid, InputError, attention
from whereformer.encodings import (
    DPB,
    FIRE,
    KERPLE,
    RMT,
    T5,
    ALiBi,
    ALiBi2D,
    BEiT,
    LeViT,
    LogCPB,
    LookHere,
    MaxViT,
    Swin,
)
from whereformer.encodings.alibi import alibi_slopes
from whereformer.encodings.t5 import t5_bucket
from whereformer.layers import GPSA, PaPE

VALUES = load_file(Path(__file__).parent / "data/biases/reference.safetensors")
HEADS, DIM = 3, 24
SIZES = [(3, 4), (4, 3), (1, 5), (4, 4)]


def flat(encoding: Swin | BEiT) -> Tensor:
    """Its table as Swin and BEiT keep it: [offsets, heads]."""
    return encoding.table.detach().flatten(1).mT


def values(prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in VALUES.items() if name.startswith(prefix)}


def randomised(encoding: Any) -> Any:
    for parameter in encoding.parameters():
        nn.init.normal_(parameter)
    return encoding


# swin, maxvit


@pytest.mark.parametrize("size", SIZES)
def test_swin_is_timms_torchvisions_and_transformers(size: tuple[int, int]) -> None:
    encoding = randomised(Swin(DIM, HEADS, Grid(*size)))
    peer = RelPosBias(size, HEADS)
    peer.relative_position_bias_table.data.copy_(flat(encoding))
    found = said(encoding, Grid(*size))
    assert torch.equal(found, peer.get_bias())
    other = SwinRelativePositionBias(HEADS, size)
    other.relative_position_bias_table.data.copy_(flat(encoding))
    assert torch.equal(found, other())
    third = ShiftedWindowAttention(DIM, list(size), [0, 0], HEADS)
    third.relative_position_bias_table.data.copy_(flat(encoding))
    assert torch.equal(found, third.get_relative_position_bias())


@pytest.mark.parametrize(("old", "new"), [(7, 12), (12, 7), (4, 9)])
def test_swin_on_another_window_is_the_released_recipe(old: int, new: int) -> None:
    """The table as an image, bicubic; the middle stays in the middle, and a constant a constant."""
    encoding = randomised(Swin(DIM, HEADS, Grid(old, old)))
    stretched = F.interpolate(encoding.table[None], (2 * new - 1, 2 * new - 1), mode="bicubic")[0]
    peer = randomised(Swin(DIM, HEADS, Grid(new, new)))
    peer.table.data.copy_(stretched)
    found = said(encoding, Grid(new, new))
    close(found, said(peer, Grid(new, new)), roundings=16)
    close(found[0, :, 0, 0], encoding.table[:, old - 1, old - 1], roundings=16)
    encoding.table.data[:] = torch.tensor([1.0, -2.0, 3.0])[:, None, None]
    close(
        said(encoding, Grid(new, new)), encoding.table[None, :, :1, :1].expand(1, 3, new**2, new**2), roundings=8
    )


@pytest.mark.parametrize("size", SIZES)
def test_maxvit_is_timms(size: tuple[int, int]) -> None:
    encoding = randomised(MaxViT(DIM, HEADS, Grid(*size)))
    peer = RelPosBiasTf(size, HEADS)
    peer.relative_position_bias_table.data.copy_(encoding.table)
    found = said(encoding, Grid(*size))
    assert torch.equal(found[0], peer.get_bias())
    mirrored = Swin(DIM, HEADS, Grid(*size))
    mirrored.table.data.copy_(encoding.table.flip(1, 2))
    assert torch.equal(found, said(mirrored, Grid(*size)))


def test_torchvisions_maxvit_counts_as_swin_and_scales_by_all_features() -> None:
    peer = RelativePositionalMultiHeadAttention(DIM, DIM // HEADS, 16)
    encoding = randomised(Swin(DIM, HEADS, Grid(4, 4)))
    peer.relative_position_bias_table.data.copy_(flat(encoding))
    x = torch.randn(2, 1, 16, DIM)
    q, k, v = peer.to_qkv(x[:, 0]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def ours(q: Tensor) -> Tensor:
        out = attention(q, k, v, Grid(4, 4), [encoding])
        return peer.merge(out.transpose(1, 2).flatten(2))[:, None]

    close(ours(q * HEADS**-0.5), peer(x))
    assert (ours(q) - peer(x)).abs().max() > 0.01, "it should be the square root of a head's features"


# beit


@pytest.mark.parametrize("size", SIZES)
def test_beit_is_timms(size: tuple[int, int]) -> None:
    grid = Grid(*size, prefix=1)
    encoding = randomised(BEiT(DIM, HEADS, grid))
    peer = timm_beit.Attention(DIM, HEADS, window_size=size)
    peer.relative_position_bias_table.data.copy_(torch.cat([flat(encoding), encoding.prefix.mT]))
    assert torch.equal(said(encoding, grid), peer._get_rel_pos_bias())


@pytest.mark.filterwarnings("ignore:Using a non-tuple:UserWarning", "ignore:torch.searchsorted:UserWarning")
@pytest.mark.parametrize(("old", "new"), [((14, 14), (20, 24)), ((7, 7), (12, 9)), ((14, 14), (15, 16))])
def test_beit_on_another_grid_is_timms(old: tuple[int, int], new: tuple[int, int]) -> None:
    """timm stops its search for the ratio 1e-6 away, which moves the last of 14 offsets by < 14² 1e-6.

    It seeks no ratio below 1.01, so that an axis that does not grow is moved there too; not in ours.
    """
    encoding = randomised(BEiT(DIM, HEADS, Grid(*old, prefix=1)))
    table = torch.cat([flat(encoding), encoding.prefix.detach().mT])
    rows = (2 * new[0] - 1) * (2 * new[1] - 1) + 3
    resized = resize_rel_pos_bias_table(table, new, (rows, HEADS))
    assert resized.shape == ((1836 if new == (20, 24) else rows), HEADS)
    peer = timm_beit.Attention(DIM, HEADS, window_size=new)
    peer.relative_position_bias_table.data.copy_(resized)
    found, expected = said(encoding, Grid(*new, prefix=1)), peer._get_rel_pos_bias()
    assert torch.equal(found[..., 0, :], expected[..., 0, :])
    assert torch.equal(found[..., :, 0], expected[..., :, 0])
    span = (table.max() - table.min()).item()
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * 14**2 * 1e-6 * span)


def transformers_beit(encoding: BEiT, image: tuple[int, int]) -> BeitRelativePositionBias:
    config = BeitConfig(image_size=image, patch_size=1, num_attention_heads=HEADS, hidden_size=DIM)
    peer = BeitRelativePositionBias(config)
    peer.relative_position_bias_table.data.copy_(torch.cat([flat(encoding), encoding.prefix.detach().mT]))
    return peer


def test_beit_is_transformers_where_the_grid_is_square() -> None:
    grid = Grid(4, 4, prefix=1)
    encoding = randomised(BEiT(DIM, HEADS, grid, stretch="bilinear"))
    peer = transformers_beit(encoding, (4, 4))
    assert torch.equal(said(encoding, grid), peer((4, 4)))
    close(said(encoding, Grid(6, 6, prefix=1)), peer((6, 6)), roundings=16)


def test_beit_of_transformers_mixes_height_and_width() -> None:
    """It reads a table of 5 x 7 offsets as one of 7 x 5, and resizes that to 5 x 7: wrong on its own grid even."""
    encoding = BEiT(DIM, HEADS, Grid(3, 4, prefix=1), stretch="bilinear")
    encoding.table.data.copy_(torch.arange(-2.0, 3.0)[None, :, None].expand(HEADS, 5, 7))  # dy alone
    peer = transformers_beit(encoding, (3, 4))
    for height in (3, 6):
        rows = torch.arange(height).repeat_interleave(4)
        above = (rows[:, None] - rows) * 5 / (2 * height - 1)  # offsets of 5 rows, spread over more
        expected = above.clamp(-2, 2).expand(HEADS, 4 * height, 4 * height)
        found = said(encoding, Grid(height, 4, prefix=1))[0, :, 1:, 1:]
        close(found, expected, roundings=16)
        assert (peer((height, 4))[0, :, 1:, 1:] - expected).abs().max() > 0.5


def test_beit_treats_every_prefix_token_as_the_class_token() -> None:
    grid = Grid(2, 3, prefix=3)
    encoding = randomised(BEiT(DIM, HEADS, grid))
    bias = said(encoding, grid)[0]
    to_patch, to_prefix, among = encoding.prefix.unbind(1)
    for rows, columns, value in (
        (slice(0, 3), slice(3, None), to_patch),
        (slice(3, None), slice(0, 3), to_prefix),
        (slice(0, 3), slice(0, 3), among),
    ):
        block = bias[:, rows, columns]
        assert torch.equal(block, value[:, None, None].expand_as(block))


# levit


@pytest.mark.parametrize("size", SIZES)
def test_levit_is_timms(size: tuple[int, int]) -> None:
    encoding = randomised(LeViT(DIM, HEADS, Grid(*size)))
    peer = timm_levit.Attention(DIM, 8, num_heads=HEADS, resolution=size)
    peer.attention_biases.data.copy_(encoding.table.flatten(1))
    assert torch.equal(said(encoding, Grid(*size))[0], peer.get_attention_biases(torch.device("cpu")))


@pytest.mark.parametrize(("size", "stride"), [((4, 4), 2), ((5, 7), 2), ((7, 4), 3)])
def test_levit_that_shrinks_is_timms(size: tuple[int, int], stride: int) -> None:
    encoding = randomised(LeViT(DIM, HEADS, Grid(*size), stride=stride))
    peer = timm_levit.AttentionDownsample(DIM, DIM, 8, num_heads=HEADS, stride=stride, resolution=size)
    peer.attention_biases.data.copy_(encoding.table.flatten(1))
    queries = Grid(*((n - 1) // stride + 1 for n in size))
    found = said(encoding, queries, Grid(*size))
    assert torch.equal(found[0], peer.get_attention_biases(torch.device("cpu")))


def test_levit_sees_an_update_that_timms_cache_does_not() -> None:
    encoding = randomised(LeViT(DIM, HEADS, Grid(3, 4))).eval()
    peer = timm_levit.Attention(DIM, 8, num_heads=HEADS, resolution=(3, 4))
    peer.eval()
    device = torch.device("cpu")
    with torch.no_grad():
        before, peer_before = said(encoding, Grid(3, 4)), peer.get_attention_biases(device)
        encoding.table.add_(1)
        peer.attention_biases.add_(1)
        assert torch.equal(peer.get_attention_biases(device), peer_before), "timm has mended its cache"
        close(said(encoding, Grid(3, 4)), before + 1, roundings=4)
        encoding.load_state_dict({"table": -encoding.table})
        close(said(encoding, Grid(3, 4)), -before - 1, roundings=4)


# log_cpb


@pytest.mark.parametrize("pretrained", [None, (8, 6)])
@pytest.mark.parametrize("size", [(3, 4), (4, 4)])
def test_log_cpb_is_timms(size: tuple[int, int], pretrained: tuple[int, int] | None) -> None:
    encoding = randomised(LogCPB(DIM, HEADS, Grid(*size), pretrained=pretrained))
    peer = RelPosMlp(size, HEADS, hidden_dim=512, mode="swin", pretrained_window_size=pretrained or (0, 0)).eval()
    load = {"mlp.fc1.weight": encoding.w1, "mlp.fc1.bias": encoding.b1, "mlp.fc2.weight": encoding.w2}
    peer.load_state_dict(load)
    close(said(encoding, Grid(*size)), peer.get_bias())
    if pretrained is None:  # another window than at home is one that was pre-trained there
        peer = RelPosMlp((5, 6), HEADS, hidden_dim=512, mode="swin", pretrained_window_size=size).eval()
        peer.load_state_dict(load)
        close(said(encoding, Grid(5, 6)), peer.get_bias())


def test_log_cpb_is_torchvisions() -> None:
    encoding = randomised(LogCPB(DIM, HEADS, Grid(4, 4)))
    peer = ShiftedWindowAttentionV2(DIM, [4, 4], [0, 0], HEADS)
    peer.cpb_mlp.load_state_dict({"0.weight": encoding.w1, "0.bias": encoding.b1, "2.weight": encoding.w2})
    close(said(encoding, Grid(4, 4)), peer.get_relative_position_bias())


def test_log_cpb_of_one_row_divides_by_no_zero() -> None:
    for home in (Grid(1, 1), Grid(1, 5)):
        encoding = randomised(LogCPB(DIM, HEADS, home))
        assert said(encoding, home).isfinite().all()
        assert said(encoding, Grid(3, 4)).isfinite().all()
    peer = RelPosMlp((1, 5), HEADS, hidden_dim=8, mode="swin").eval()
    assert peer.get_bias().isnan().any(), "timm has mended its division"


@pytest.mark.parametrize("masked", [False, True])
def test_log_cpb_in_cosine_attention_is_transformers(masked: bool) -> None:
    """Which adds its mask twice: of no effect on −100, which forbids at once, but on milder ones."""
    peer = Swinv2SelfAttention(Swinv2Config(), DIM, HEADS, 4).eval()
    for parameter in peer.parameters():
        nn.init.normal_(parameter)
    peer.logit_scale.data.copy_(torch.tensor([1.0, 3.0, 9.0])[:, None, None])  # the last beyond its bound
    encoding = LogCPB(DIM, HEADS, Grid(4, 4))
    mlp = peer.continuous_position_bias_mlp
    encoding.load_state_dict({"w1": mlp[0].weight, "b1": mlp[0].bias, "w2": mlp[2].weight})
    x = torch.randn(2, 16, DIM)
    mask = torch.randn(2, 16, 16) if masked else None
    expected = peer(x, mask)[0]
    q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (peer.query, peer.key, peer.value))
    scale = peer.logit_scale.clamp(max=math.log(100)).exp() * q.shape[-1] ** 0.5
    q, k = F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)

    def ours(mask: Tensor | None) -> Tensor:
        mask = None if mask is None else mask[:, None]
        return attention(q, k, v, Grid(4, 4), [encoding], mask=mask).transpose(1, 2).flatten(2)

    close(ours(None if mask is None else 2 * mask), expected, roundings=2048)  # logits up to 116
    if masked:
        assert (ours(mask) - expected).abs().max() > 0.01


# dpb


def test_dpb_is_the_released_code() -> None:
    names = {"linear.0": "pos_proj", **{f"norm.{n}": f"pos{n + 1}.0" for n in range(3)}}
    names |= {f"linear.{n}": f"pos{n}.2" for n in (1, 2, 3)}
    state = {
        f"{ours}.{part}": VALUES[f"dpb.{peer}.{part}"]
        for ours, peer in names.items()
        for part in ("weight", "bias")
    }
    encoding = DPB(96, HEADS, Grid(3, 4), width=96 // 16)
    encoding.load_state_dict(state)
    close(said(encoding, Grid(3, 4))[0], VALUES["dpb.bias"])


# t5


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 6), (64, 1000)])
def test_t5_buckets_are_transformers(buckets: int, farthest: int) -> None:
    offsets = torch.arange(-1100, 1101)
    expected = T5Attention._relative_position_bucket(offsets, num_buckets=buckets, max_distance=farthest)
    assert torch.equal(t5_bucket(offsets, buckets, farthest), expected)


def test_t5_on_the_raster_is_transformers() -> None:
    config = T5Config(d_model=DIM, d_kv=8, num_heads=HEADS)
    peer = T5Attention(config, has_relative_attention_bias=True)
    encoding = T5(DIM, HEADS, Grid(3, 4), method="raster")
    peer.relative_attention_bias.weight.data.copy_(encoding.table.mT)
    assert torch.equal(said(encoding, Grid(3, 4)), peer.compute_bias(12, 12))
    assert torch.equal(said(encoding, Grid(1, 3), Grid(2, 20)), peer.compute_bias(3, 40))


# alibi


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_alibi_slopes_are_blooms_and_mpts(heads: int) -> None:
    slopes = torch.tensor(alibi_slopes(heads))
    close(slopes, _get_alibi_slopes(heads, torch.device("cpu")), roundings=64)
    close(slopes, -build_mpt_alibi_tensor(heads, 2)[:, 0, 0], roundings=4)


def test_alibi_of_past_keys_is_mpts() -> None:
    """In a causal text; ours loses as much on the other side."""
    found = said(ALiBi(DIM, 6, Grid(1, 9)).float(), Grid(1, 9))[0].float()
    close(found[:, -1], build_mpt_alibi_tensor(6, 9)[:, 0], roundings=8)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("heads", [8, 12])
def test_alibi2d_is_the_released_code(heads: int) -> None:
    close(said(ALiBi2D(48, heads, Grid(3, 3)), Grid(3, 3))[0].float(), VALUES[f"alibi2d.{heads}"], roundings=8)


def test_alibi_has_no_sign() -> None:
    """attention-gym's rewards keys to come by as much as it takes from those past."""
    signed = VALUES["gym_alibi"]
    found = said(ALiBi(DIM // 3, 4, Grid(1, 5)), Grid(1, 5))[0].float()
    close(found.tril(), signed.tril(), roundings=8)
    assert (signed.triu(1) >= 0).all()
    assert (found <= 0).all()


# rmt, kerple, fire


def test_rmt_is_the_released_code() -> None:
    close(said(RMT(DIM, 3, Grid(3, 4)), Grid(3, 4))[0].float(), VALUES["rmt"], roundings=16)
    close(said(RMT(48, 6, Grid(2, 3), span=6), Grid(2, 3))[0].float(), VALUES["rmt.6"], roundings=16)


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerple_is_the_released_code(kernel: Any) -> None:
    """Of past keys, the text being causal. Its parameters went to their bounds when it was computed."""
    encoding = KERPLE(DIM, 4, Grid(2, 3), kernel=kernel, distance="raster")
    p, a = VALUES[f"kerple.{kernel}.p"], VALUES[f"kerple.{kernel}.a"]
    encoding.load_state_dict({"r1": p, "r2": a} if kernel == "log" else {"r1": a, "r2": p})
    close(said(encoding, Grid(2, 3))[0].tril(), VALUES[f"kerple.{kernel}"].tril(), roundings=16)


@pytest.mark.parametrize("threshold", [512, 4])
def test_fire_is_its_appendix(threshold: int) -> None:
    """Where the threshold is the normaliser, and for the last query, whose farthest key is at the extent."""
    encoding = FIRE(DIM, HEADS, Grid(1, 7), threshold=float(threshold), distance="raster")
    state = values(f"fire.{threshold}.")
    encoding.load_state_dict(
        {
            "w1": state["mlp.0.weight"][:, 0],
            "b1": state["mlp.0.bias"],
            "w2": state["mlp.2.weight"],
            "b2": state["mlp.2.bias"],
            "c": state["c"],
            "multiplier": state["L_multiplier"],
        }
    )
    found, expected = said(encoding, Grid(1, 7))[0], VALUES[f"fire.{threshold}"]
    rows = slice(None) if threshold == 512 else slice(-1, None)
    close(found[:, rows], expected[:, rows], roundings=64)


# lookhere


@pytest.mark.parametrize("case", [name for name in VALUES if name.startswith("lookhere.") and "port" not in name])
def test_lookhere_is_the_released_code(case: str) -> None:
    """Which rounds to bfloat16, and has the lowest number there where we have −1024."""
    _, heads, views = case.split(".")
    grid = Grid(3, 4)
    for layer, expected in enumerate(VALUES[case].float()):
        encoding = LookHere(12 * 16, int(heads), grid, views=views, layer=layer, depth=3)
        found = said(encoding, grid)[0].float()
        hidden = expected < -1e30
        assert torch.equal(found == -1024, hidden)
        visible = expected.masked_fill(hidden, 0)
        torch.testing.assert_close(found.masked_fill(hidden, 0), visible, rtol=2**-8, atol=0)


def test_lookhere_has_another_slope_in_each_layer() -> None:
    """A port has the first layer's in all."""
    grid = Grid(3, 3)
    port = VALUES["lookhere.port"][0].float()
    first, last = (said(LookHere(48, 12, grid, layer=n, depth=12), grid)[0].float() for n in (0, 11))
    seen = port > -1e30
    torch.testing.assert_close(first[seen], port[seen], rtol=2**-8, atol=0)
    close(last[seen], first[seen] / 3, roundings=4)


@pytest.mark.parametrize(
    ("heads", "first", "second", "third"),
    [(3, 3, 0, 0), (6, 4, 2, 0), (8, 4, 4, 0), (12, 4, 4, 4), (16, 8, 4, 4), (20, 12, 4, 4)],
)
def test_lookhere_divides_any_number_of_heads(heads: int, first: int, second: int, third: int) -> None:
    """Corners see a quarter, triangles too, and the others all: told apart by the patches at one's side."""
    bias = said(LookHere(heads, heads, Grid(3, 3), layer=0, depth=1), Grid(3, 3))[0, :, 4]
    seen = (bias > -1000).sum(-1)  # of 9 from the middle: 4 in a corner, 4 in a triangle
    straight = (bias[:, [1, 3, 5, 7]] > -1000).sum(-1)
    kinds = [
        "none" if n == 9 else "corners" if s == 2 else "triangles" for n, s in zip(seen, straight, strict=True)
    ]
    assert kinds == ["corners"] * first + ["triangles"] * second + ["none"] * third


# convit


def gpsa(size: int, heads: int, prefix: int = 0) -> tuple[GPSA, timm_convit.GPSA]:
    peer = timm_convit.GPSA(DIM, heads, locality_strength=0.7).double()
    peer.local_init()
    ours = GPSA(DIM, heads, locality_strength=0.7).double()
    return ours, peer


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
def test_gpsa_starts_as_timms(heads: int) -> None:
    ours, peer = gpsa(4, heads)
    square = int(heads**0.5) ** 2
    close(ours.pos_proj.weight[:square].float(), peer.pos_proj.weight[:square].float(), roundings=4)
    assert torch.equal(ours.v.weight, peer.v.weight)
    assert torch.equal(ours.gating_param, peer.gating_param)


@pytest.mark.parametrize("heads", [3, 4])
def test_gpsa_is_timms_with_all_gradients(heads: int) -> None:
    ours, peer = gpsa(4, heads)
    randomised(ours)
    peer.load_state_dict(ours.state_dict())
    x = torch.randn(2, 16, DIM, dtype=torch.float64, requires_grad=True)
    found, expected = ours(x, Grid(4, 4)), peer(x)
    close(found, expected)
    weight = torch.randn_like(found)
    names = [name for name, _ in ours.named_parameters()]
    got = torch.autograd.grad((found * weight).sum(), [x, *ours.parameters()], allow_unused=True)
    want = torch.autograd.grad((expected * weight).sum(), [x, *(peer.get_parameter(n) for n in names)])
    for name, g, w in zip(["x", *names], got, want, strict=True):
        if name == "pos_proj.bias":  # cancels in the softmax
            assert w.abs().max() < 1e-12
        close(g, w)


def test_gpsa_is_its_equation_where_timm_is_not_square() -> None:
    grid = Grid(2, 3)
    layer = randomised(GPSA(DIM, HEADS).double())
    x = torch.randn(1, 6, DIM, dtype=torch.float64, requires_grad=True)
    q, k = layer.qk(x).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
    v = layer.v(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    rows = []
    for i in range(6):
        logits, places = [], []
        for j in range(6):
            dy, dx = j // 3 - i // 3, j % 3 - i % 3
            logits.append((q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(DIM // HEADS))
            w = layer.pos_proj.weight
            places.append(w[:, 0] * dx + w[:, 1] * dy + w[:, 2] * (dx**2 + dy**2) + layer.pos_proj.bias)
        content, position = (torch.stack(logits).softmax(0), torch.stack(places).softmax(0)[:, None])
        gate = layer.gating_param.sigmoid()
        weights = [(1 - gate) * content[j] + gate * position[j] for j in range(6)]
        total = sum(weights)
        rows.append(sum((w / total)[..., None] * v[:, :, j] for j, w in enumerate(weights)))
    expected = layer.proj(torch.stack(rows, 1).flatten(2))  # type: ignore[arg-type]
    sources = {"x": x, **dict(layer.named_parameters())}
    same_gradients(layer(x, grid), expected, sources)


def test_gpsa_of_kept_patches_and_under_a_mask() -> None:
    """What is left out is as if masked."""
    layer = randomised(GPSA(DIM, HEADS).double())
    x = torch.randn(1, 12, DIM, dtype=torch.float64)
    index = torch.tensor([[0, 5, 11, 3]])
    allowed = torch.zeros(12, dtype=torch.bool)
    allowed[index[0]] = True
    masked = layer(x, Grid(3, 4), mask=allowed)
    close(layer(x[:, index[0]], Grid(3, 4).keep(index)), masked[:, index[0]])
    with pytest.raises(InputError, match="without prefix tokens"):
        layer(x, Grid(1, 11, prefix=1))


def test_gpsa_starts_as_a_convolution() -> None:
    """Each of nine heads, sharp, reads one neighbour."""
    layer = GPSA(9, 9, locality_strength=50.0)
    nearest = layer.positions(Grid(5, 5))[:, 12].argmax(-1)
    assert sorted(nearest.tolist()) == [6, 7, 8, 11, 12, 13, 16, 17, 18]


# pape


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
def test_pape_is_the_released_code(name: str) -> None:
    layer = PaPE(8, 2, parabolas=3, rotation_invariant=name == "pape_ri")
    state = {key.removeprefix("position_encoder."): v for key, v in values(f"{name}.").items()}
    x, y = state.pop("x"), state.pop("y")
    layer.load_state_dict({key: v.flatten() if key == "position_scales" else v for key, v in state.items()})
    close(layer(x, Grid(2, 3, prefix=1)), y)


@pytest.mark.parametrize("rotation_invariant", [False, True])
@pytest.mark.parametrize("grid", [Grid(2, 3), Grid(3, 2, prefix=2), Grid(1, 2, prefix=1, frames=2)], ids=str)
def test_pape_is_its_equation(grid: Grid, rotation_invariant: bool) -> None:
    layer = PaPE(8, 2, parabolas=3, rotation_invariant=rotation_invariant, axes=grid.axes).double()
    randomised(layer)
    x = torch.randn(1, grid.tokens, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = layer.qkv_proj(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    places = [[-1] * grid.axes] * grid.prefix + grid.coords().tolist()
    out = []
    for h in range(2):
        rows = []
        for i, here in enumerate(places):
            logits = []
            for j, there in enumerate(places):
                offset = torch.tensor(here[::-1], dtype=torch.float64) - torch.tensor(there[::-1])
                if rotation_invariant:
                    a = F.softplus(layer.a(x[0, i]))[h]
                    bias = -a * layer.position_scales[h] ** 2 * (offset**2).sum()
                else:
                    a, b = layer.ab(x[0, i]).reshape(2, 2, 3)[:, h]
                    t = (layer.position.weight.reshape(2, 3, -1)[h] * offset).sum(-1)
                    bias = (b * t - F.softplus(a) * t**2).sum()
                logits.append(((q[0, h, i] * k[0, h, j]).sum() + bias) / 2)
            rows.append((torch.stack(logits).softmax(0)[:, None] * v[0, h]).sum(0))
        out.append(torch.stack(rows))
    expected = layer.out_proj(torch.stack(out, 1).flatten(1))[None]
    sources = {"x": x, **{n: p for n, p in layer.named_parameters() if p.requires_grad}}
    same_gradients(layer(x, grid), expected, sources)


def test_pape_keeps_to_masks_and_kept_patches() -> None:
    grid = Grid(14, 14, prefix=1)
    layer = PaPE(24, 3, parabolas=2)
    x = torch.randn(1, grid.tokens, 24)
    index = torch.randperm(196)[None, :50]
    tokens = F.pad(index[0] + 1, (1, 0))
    allowed = torch.zeros(grid.tokens, dtype=torch.bool)
    allowed[tokens] = True
    close(layer(x[:, tokens], grid.keep(index)), layer(x, grid, mask=allowed)[:, tokens])
    with pytest.raises(InputError, match="built for 2 axes"):
        layer(x, Grid(14, 7, prefix=1, frames=2))


@pytest.mark.parametrize("autocast", [False, True])
def test_pape_keeps_its_squares_in_half_precision(autocast: bool) -> None:
    """Numbers of 800 that cancel: a few roundings of bfloat16 off, but half a unit in features of q and k."""
    grid = Grid(14, 14, prefix=1)
    half = PaPE(24, 3, parabolas=2).bfloat16()
    wide = PaPE(24, 3, parabolas=2)
    wide.load_state_dict(half.state_dict())
    x = 3 * torch.randn(1, grid.tokens, 24).bfloat16()
    expected = wide(x.float(), grid)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            found = wide(x.float(), grid)
    else:
        found = half(x, grid)
    assert found.dtype == torch.bfloat16
    assert wide.bias(x.float(), grid).dense().abs().max() > 500
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=16 * 2**-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"parabolas": 0}, "parabolas=0"), ({"axes": 1}, "axes=1, expected 2"), ({}, "not a multiple")],
)
def test_pape_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PaPE(8 if options else 9, 2, **options)


@pytest.mark.parametrize("options", [{}, {"rotation_invariant": True}], ids=str)
def test_pape_starts_anew_after_the_meta_device(options: dict[str, bool]) -> None:
    with torch.device("meta"):
        layer = PaPE(8, 2, parabolas=3, **options)
    layer = layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    layer.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert all(parameter.unique().numel() > 1 for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GPSA(8, 0), "GPSA: num_heads=0"),
        (lambda: PaPE(8, 0), "PaPE: num_heads=0"),
        (lambda: GPSA(8, 2, locality_strength=float("nan")), "GPSA: locality_strength=nan"),
        (lambda: GPSA(8, 2)(torch.zeros(1, 8, 8), Grid(2, 2, frames=2)), "GPSA: .*expected an image"),
        (
            lambda: PaPE(8, 2)(torch.zeros(1, 1, 8), Grid(2, 2).keep(torch.tensor([[0], [1]]))),
            "x has a batch of 1, but Points",
        ),
    ],
)
def test_layers_refuse(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
