"""`equip` on torchvision's models and on torch's own attention and encoder."""

import copy
import pickle
import warnings

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)

from whereformer import Grid, InputError, PositionEncoding, attention, describe, equip, unequip
from whereformer.encodings import IRPE

SWIN = {"patch_size": [4, 4], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": [4, 4]}


def vit():
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)


def swin():
    return SwinTransformer(**SWIN, num_classes=5, stochastic_depth_prob=0.0, downsample_layer=PatchMerging)


def swin_v2():
    options = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2, "stochastic_depth_prob": 0.0}
    return SwinTransformer(**SWIN, **options, num_classes=5)


MODELS = {"vit": (vit, "learned", 32), "swin": (swin, "swin", 40), "swin v2": (swin_v2, "log_cpb", 40)}


@pytest.fixture(params=MODELS, ids=str)
def case(request):
    make, kind, size = MODELS[request.param]
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if "relative_position" in name or "pos_embedding" in name or "cpb_mlp" in name or "head" in name:
            nn.init.normal_(parameter, std=0.3)
    return model, kind, torch.randn(2, 3, size, size)


def randomise(model: nn.Module, std: float = 0.5) -> None:
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=std)


def snapshot(model: nn.Module):
    return {name: type(m) for name, m in model.named_modules()}, {n: id(p) for n, p in model.named_parameters()}


def test_zero_encodings_beside_its_own_change_nothing(case):
    model, _, x = case
    expected = model(x)
    equip(model, "irpe(on='qkv')", keep_own=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    randomise(model)
    assert (model(x) - expected).abs().max() > 1e-3


def test_its_own_kind_goes_on_from_its_weights(case):
    model, kind, x = case
    expected = model(x)
    equip(model, kind)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert describe(model).own == ()


def test_none_is_the_model_without_its_own(case):
    model, _, x = case
    silent = copy.deepcopy(model)
    for name, parameter in silent.named_parameters():
        if "relative_position" in name or "pos_embedding" in name:
            nn.init.zeros_(parameter)
        if "cpb_mlp.2" in name:  # the same bias for all, which the softmax does not see
            nn.init.zeros_(parameter)
    torch.testing.assert_close(equip(model, "none")(x), silent(x), rtol=1e-4, atol=1e-5)


def test_unequip_gives_all_back(case):
    model, kind, x = case
    expected, before = model(x), snapshot(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    equip(model, f"{kind} + irpe")
    randomise(model)
    assert not torch.equal(model(x), expected)
    unequip(model)
    assert snapshot(model) == before
    assert torch.equal(model(x), expected)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_gradients_copies_and_the_names_of_weights(case):
    model, _, x = case
    names = set(model.state_dict())
    equip(model, "irpe(on='qkv') + rope_axial" if "swin" not in type(model).__name__.lower() else "irpe(on='qkv')")
    randomise(model)
    expected = model.train()(x)
    expected.sum().backward()
    tables = [p for n, p in model.named_parameters() if ".encodings." in n]
    assert tables
    assert all(p.grad is not None for p in tables)
    # a class token that asks alone, in the last block, says the same of all keys by its own table
    assert all(p.grad.abs().max() > 0 for p in tables[: len(tables) // 2])
    assert {n for n in model.state_dict() if ".encodings." not in n} <= names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), expected)


def test_a_failure_leaves_the_model_as_it_was(case):
    model, _, x = case
    before, expected = snapshot(model), model(x)
    with pytest.raises(InputError):
        equip(model, "irpe + learned(std=-1)")
    assert snapshot(model) == before
    assert torch.equal(model(x), expected)


def test_swin_takes_images_that_its_windows_do_not_divide():
    torch.manual_seed(0)
    model = swin().eval()
    x = torch.randn(2, 3, 36, 60)
    expected = model(x)
    torch.testing.assert_close(equip(model, "irpe", keep_own=True)(x), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# torch.nn

GRID = Grid(3, 4, prefix=1)


def masks(batch: int, heads: int, tokens: int):
    generator = torch.Generator().manual_seed(3)
    square = torch.rand(tokens, tokens, generator=generator) < 0.3
    square.fill_diagonal_(False)
    padding = torch.zeros(batch, tokens, dtype=torch.bool)
    padding[0, -3:] = True
    floats = torch.randn(batch * heads, tokens, tokens, generator=generator)
    return [
        {},
        {"attn_mask": square},
        {"key_padding_mask": padding},
        {"attn_mask": square, "key_padding_mask": padding},
        {"attn_mask": floats},
        {"attn_mask": floats, "key_padding_mask": padding.float().masked_fill(padding, -torch.inf)},
    ]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", range(6))
def test_a_silent_multihead_attention_is_torchs(batch_first, mask):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 2, batch_first=batch_first).eval()
    nn.init.normal_(plain.in_proj_bias)
    ours = equip(copy.deepcopy(plain), "irpe(on='qkv')", grid=GRID)
    options = masks(3, 2, GRID.tokens)[mask]
    x = torch.randn((3, GRID.tokens, 16) if batch_first else (GRID.tokens, 3, 16))
    for average in (True, False):
        found = ours(x, x, x, average_attn_weights=average, **options)
        expected = plain(x, x, x, average_attn_weights=average, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert ours(x, x, x, need_weights=False)[1] is None


def test_a_multihead_attention_with_an_encoding_is_attention():
    torch.manual_seed(0)
    module = equip(nn.MultiheadAttention(16, 2, batch_first=True), "irpe(on='qkv')", grid=GRID)
    randomise(module)
    x = torch.randn(3, GRID.tokens, 16)
    q, k, v = (
        x @ w.mT + b for w, b in zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    )
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
    out = attention(q, k, v, GRID, module.encodings, backend="reference")
    expected = module.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, x, x)[0], expected, rtol=1e-4, atol=1e-5)
    single = module(x[0], x[0], x[0])
    torch.testing.assert_close(single[0], expected[0], rtol=1e-4, atol=1e-5)
    module.set_grid(Grid(2, 3))
    assert module(*[torch.randn(1, 6, 16)] * 3)[0].shape == (1, 6, 16)
    with pytest.raises(InputError, match="13 tokens"):
        module(x, x, x)


def test_a_lone_attention_copies_and_goes_back():
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 2, batch_first=True)
    module = equip(copy.deepcopy(plain), "irpe(on='qkv')", grid=GRID)
    randomise(module)
    x = torch.randn(3, GRID.tokens, 16)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(x, x, x), module(x, x, x))
    unequip(module)
    assert type(module) is nn.MultiheadAttention
    assert module.__dict__.keys() == plain.__dict__.keys()
    assert torch.equal(module(x, x, x)[0], plain(x, x, x)[0])


def test_different_widths_of_keys_and_values():
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 2, kdim=5, vdim=7, batch_first=True).eval()
    ours = equip(copy.deepcopy(plain), "irpe", grid=GRID)
    q, k, v = torch.randn(2, 13, 16), torch.randn(2, 13, 5), torch.randn(2, 13, 7)
    torch.testing.assert_close(ours(q, k, v), plain(q, k, v), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_in_training_and_not_with_padding(batch_first, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first, norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will not use nested tensors
        plain = nn.TransformerEncoder(layer, 2)
    ours = equip(copy.deepcopy(plain), "irpe(on='qkv')", grid=GRID)
    x = torch.randn(3, GRID.tokens, 16)
    padding = torch.zeros(3, GRID.tokens, dtype=torch.bool)
    padding[0, -3:] = True
    given = x if batch_first else x.transpose(0, 1)
    keep = ~padding if batch_first else ~padding.T
    for training in (True, False):
        for module in (plain, ours):
            module.train(training)
        expected = plain.train()(given, src_key_padding_mask=padding)[keep]  # not in training it gives zeros
        with torch.no_grad():
            torch.testing.assert_close(
                ours(given, src_key_padding_mask=padding)[keep], expected, rtol=1e-4, atol=1e-5
            )
    randomise(ours)
    with torch.no_grad():
        assert (ours(given) - plain(given)).abs().max() > 1e-2


def test_an_encoder_with_encodings_of_tokens_and_taken_back():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=False)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(GRID.tokens, 2, 16)
    expected = encoder(x)
    equip(encoder, "sincos2d", grid=GRID)
    assert (encoder(x) - expected).abs().max() > 1e-2
    assert torch.equal(unequip(encoder)(x), expected)


def test_errors():
    with pytest.raises(InputError, match=r"does not know where its tokens are; grid=None, expected Grid"):
        equip(nn.MultiheadAttention(16, 2), "irpe")
    with pytest.raises(InputError, match="VisionTransformer knows its own"):
        equip(vit(), "irpe", grid=GRID)
    with pytest.raises(InputError, match="MultiheadAttention alone is none"):
        equip(nn.MultiheadAttention(16, 2), "learned", grid=GRID)
    with pytest.raises(InputError, match="add_zero_attn"):
        equip(nn.MultiheadAttention(16, 2, add_zero_attn=True), IRPE, grid=GRID)
    with pytest.raises(InputError, match=r"grid=\(4, 4\), expected Grid"):
        equip(nn.MultiheadAttention(16, 2), "irpe", grid=(4, 4))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"grid=\(4, 4\), expected a whereformer.Grid"):
        equip(nn.MultiheadAttention(16, 2), "irpe", grid=GRID).set_grid((4, 4))  # type: ignore
