"""`equip` on every family of timm's plain transformers."""

import copy
import pickle

import pytest
import torch
from torch import nn

from timm_small import FAMILIES, close, images, make, randomise
from whereformer import Grid, InputError, PositionEncoding, describe, equip, unequip
from whereformer.adapters.find import host_of
from whereformer.grid import Points

WEIGHTLESS = {"xcit", "coat", "coat lite"}
"""Attention without weights between patches: encodings of tokens alone."""
DIFFERENTIAL = {"differential", "differential, parallel"}
"""Rotations and biases, but not values."""
NO_EQUAL = {"relpos, mlp", "gemma4", "convit", "coat", "coat lite"}
"""What they say themselves no encoding says."""
SHUFFLED = {name for name in FAMILIES if name not in {*WEIGHTLESS, "sam", "pit", "pit, distilled", "volo"}}
"""Nothing in the stem or between blocks knows a neighbourhood, so that without positions patches are a set."""
UNCHECKPOINTED = {"coat", "coat lite", "convit", "crossvit", "pit", "pit, distilled"}
"""timm has no gradient checkpointing for them."""

each = pytest.mark.parametrize("family", FAMILIES)


def speaking(family: str) -> str:
    if family in WEIGHTLESS:
        return "peg"
    return "irpe(on='qk') + rope_axial + peg" if family in DIFFERENTIAL else "irpe(on='qkv') + rope_axial + peg"


def spoken(family: str, **options) -> nn.Module:
    model = equip(make(family, **options), speaking(family))
    randomise(model)
    return model


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NO_EQUAL])
@torch.no_grad()
def test_what_a_model_says_itself_goes_on(family):
    model = make(family)
    equal, before = host_of(model).equal, model(images(family))
    assert equal is not None
    close(equip(model, equal)(images(family)), before)


@each
@torch.no_grad()
def test_none_takes_it_out(family):
    model = make(family)
    x, before = images(family), model(images(family))
    bare = equip(copy.deepcopy(model), "none")
    assert (bare(x) - before).abs().max() > 1e-4
    if family in SHUFFLED:
        close(bare(shuffled(family, x)), bare(x), rtol=1e-4, atol=1e-4)
        return
    for own in host_of(model).own:
        said = getattr(own.module, own.name)
        for parameter in said.parameters() if isinstance(said, nn.Module) else [said]:
            if isinstance(parameter, nn.Parameter):
                parameter.zero_()
    close(bare(x), model(x))


def shuffled(family: str, x: torch.Tensor) -> torch.Tensor:
    """The rows of patches upside down; for CrossViT in steps of its larger patches."""
    size = {"eva02": 7, "crossvit": 16}.get(family, 8)
    rows = x.unflatten(2, (-1, size)).flip(2)
    return rows.flatten(2, 3)


@each
@torch.no_grad()
def test_a_zero_encoding_beside_its_own_changes_nothing(family):
    model = make(family)
    before = model(images(family))
    zero = {"values": "irpe(on='qkv')", "biases": "irpe(on='qk')", "": "none"}
    takes = "" if family in WEIGHTLESS else "biases" if family in DIFFERENTIAL else "values"
    after = equip(model, zero[takes], keep_own=True)(images(family))
    close(after, before, rtol=2e-6, atol=24 * torch.finfo(torch.float32).eps)  # of activations of order 1


@each
def test_encodings_speak_and_learn(family):
    bare, model = equip(make(family), "none"), spoken(family)
    x = images(family)
    out = model(x)
    assert (out - bare(x)).abs().max() > 1e-3
    features = model.forward_features(x)
    torch.cat([part.flatten() for part in features if part.ndim > 1]).square().sum().backward()
    for name, module in model.named_modules():
        if isinstance(module, PositionEncoding) and not ("pit" in family and "2.blocks.1" in name):
            for key, parameter in module.named_parameters():
                assert parameter.grad is not None, (name, key)
                assert parameter.grad.abs().max() > 0, (name, key)
    assert describe(model).seats
    model.zero_grad()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), out)


@each
@torch.no_grad()
def test_unequip_and_failure_leave_the_model_as_it_was(family):
    model = make(family)
    before, x = model(images(family)), images(family)
    state = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    kinds = [type(module) for module in model.modules()]
    attributes = [sorted(module.__dict__) for module in model.modules()]

    def unchanged() -> None:
        assert {n: id(v) for n, v in model.state_dict(keep_vars=True).items()} == state
        assert list(model.state_dict()) == list(state)
        assert [type(module) for module in model.modules()] == kinds
        assert [sorted(module.__dict__) for module in model.modules()] == attributes
        assert torch.equal(model(x), before)

    with pytest.raises(InputError):
        equip(model, speaking(family) + " + lookhere(blocks=7)")
    unchanged()
    equip(model, speaking(family))
    own = {name for name in state if name not in model.state_dict()}
    added = [name for name in model.state_dict() if name not in state]
    assert added
    assert all("encodings." in name for name in added)
    for name in own:
        assert any(word in name for word in ("pos", "rope", "relative", "rel_", "cpe", "crpe", "gating")), name
    unequip(model)
    unchanged()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNCHECKPOINTED])
def test_checkpointing_gives_the_same_gradients(family):
    model = spoken(family).train()
    twin = copy.deepcopy(model)
    twin.set_grad_checkpointing()
    x = images(family)
    for one in (model, twin):
        torch.manual_seed(0)
        one(x).square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if parameter.grad is not None:
            close(other.grad, parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


# ---------------------------------------------------------------------------------------------------------------
# Other sizes.

RESIZED = {
    "eva02": ({"dynamic_img_size": True}, (42, 21)),
    "dinov3": ({"dynamic_img_size": True}, (40, 24)),
    "rope-vit, axial": ({"dynamic_img_size": True}, (24, 48)),
    "rope-vit, mixed": ({"dynamic_img_size": True}, (24, 48)),
    "perception encoder": ({"dynamic_img_size": True}, (40, 24)),
    "sam": ({}, (56, 24)),
    "naflex": ({}, (24, 48)),
    "naflex, factorized": ({"pos_embed_ar_preserving": False}, (24, 48)),
    "deepseek": ({}, (24, 48)),
    "xcit": ({}, (24, 48)),
}


@pytest.mark.parametrize("family", RESIZED)
@torch.no_grad()
def test_what_it_says_goes_on_at_another_size(family):
    options, size = RESIZED[family]
    model, x = make(family, **options), images(family, *size)
    before = model(x)
    equipped = equip(model, host_of(model).equal)
    assert equipped(images(family)).shape == before.shape
    close(equipped(x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")
@pytest.mark.parametrize("family", ["eva02", "dinov3", "beit", "relpos, class token"])
@torch.no_grad()
def test_set_input_size_moves_what_is_equipped(family):
    size = (42, 21) if family == "eva02" else (48, 40)
    model = make(family)
    x, twin = images(family, *size), copy.deepcopy(model)
    twin.set_input_size(size)
    equipped = equip(model, host_of(model).equal)
    equipped.set_input_size(size)
    tolerance = 1e-4 if family in ("eva02", "dinov3") else 2e-2  # timm looks for the ratio of offsets by bisection
    close(equipped(x), twin(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "pit", "volo"])
@torch.no_grad()
def test_speaks_on_other_grids(family):
    model = spoken(family)
    first = model(images(family))
    size = (96, 64) if family in ("pit", "volo") else (48, 32)
    assert model(images(family, *size)).shape == first.shape
    assert model.place.grid.size == {"pit": (3, 2), "volo": (6, 4)}.get(family, (6, 4))
    assert torch.equal(model(images(family)), first)


@torch.no_grad()
def test_a_batch_of_several_sizes_is_each_image_alone():
    from timm.models.naflexvit import batch_patchify

    model = spoken("naflex")
    pictures = [images("naflex", 16, 32)[:1], images("naflex", 24, 24)[:1]]
    alone = torch.cat([model(picture) for picture in pictures])
    patches, coords, valid = (
        torch.zeros(2, 10, 192),
        torch.zeros(2, 10, 2, dtype=torch.long),
        torch.zeros(2, 10) > 0,
    )
    for n, picture in enumerate(pictures):
        flat, (height, width) = batch_patchify(picture, (8, 8))
        count = height * width
        patches[n, :count], valid[n, :count] = flat[0], True
        coords[n, :count] = Grid(height, width).coords()
    close(model(patches, patch_coord=coords, patch_valid=valid), alone)


@torch.no_grad()
def test_dropped_patches_keep_their_places():
    for family in ("eva02", "rope-vit, mixed", "naflex"):
        model = make(family, patch_drop_rate=0.5).train()
        equipped = equip(copy.deepcopy(model), host_of(model).equal)
        outs = []
        for one in (model, equipped):
            torch.manual_seed(3)
            outs.append(one(images(family)))
        close(outs[1], outs[0])
        assert isinstance(equipped.place.grid, Points)


# ---------------------------------------------------------------------------------------------------------------
# What attention computes, by hand.


def biased(family: str, **options) -> tuple[nn.Module, torch.Tensor]:
    """A model with one random table for all blocks, and its biases written out: [1, heads, tokens, tokens]."""
    model = equip(make(family), "swin", share=True, **options)
    randomise(model)
    encoding = next(module for module in model.modules() if isinstance(module, PositionEncoding))
    grid = model.home_grid
    bias = torch.zeros(encoding.num_heads, grid.tokens, grid.tokens)
    for i, (y, x) in enumerate(grid.coords().tolist(), grid.prefix):
        for j, (v, u) in enumerate(grid.coords().tolist(), grid.prefix):
            bias[:, i, j] = encoding.table[:, y - v + grid.height - 1, x - u + grid.width - 1].detach()
    return model, bias[None]


@pytest.mark.parametrize("family", ["eva02", "dinov3", "parallel", "differential", "differential, parallel"])
@torch.no_grad()
def test_biases_are_a_mask(family):
    model, bias = biased(family)
    close(model(images(family)), equip(make(family), "none")(images(family), attn_mask=bias))


@torch.no_grad()
def test_biases_speak_before_heads_talk():
    model, bias = biased("cait")
    attention, x = model.blocks[1].attn, torch.randn(2, 16, 32)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / 4 + bias
    mix, remix = attention.proj_l, attention.proj_w
    talked = torch.einsum("gh,bhij->bgij", mix.weight, logits) + mix.bias[:, None, None]
    weights = torch.einsum("gh,bhij->bgij", remix.weight, talked.softmax(-1)) + remix.bias[:, None, None]
    close(attention(x), attention.proj((weights @ v).transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_biases_speak_to_contents_beside_gated_positions():
    model, bias = biased("convit", keep_own=True)
    attention, x = model.blocks[0].attn, torch.randn(2, 16, 32)
    model.place.grid = Grid(4, 4)
    q, k = attention.qk(x).unflatten(-1, (2, 4, 8)).permute(2, 0, 3, 1, 4)
    v = attention.v(x).unflatten(-1, (4, 8)).transpose(1, 2)
    contents = (q @ k.mT / 8**0.5 + bias).softmax(-1)
    places = Grid(4, 4).coords().float()
    dy, dx = (places[None, :] - places[:, None]).unbind(-1)
    positions = attention.pos_proj(torch.stack([dx, dy, dx**2 + dy**2], -1)).permute(2, 0, 1).softmax(-1)
    gate = attention.gating_param.sigmoid()[:, None, None]
    expected = ((1 - gate) * contents + gate * positions) @ v
    close(attention(x), attention.proj(expected.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_patches_of_tnt_attend_with_biases():
    model, bias = biased("tnt")
    attention, x = model.blocks[0].attn_out, torch.randn(2, 17, 32)
    q, k = attention.qk(x).unflatten(-1, (2, 2, 16)).permute(2, 0, 3, 1, 4)
    v = attention.v(x).unflatten(-1, (2, 16)).transpose(1, 2)
    out = (q @ k.mT / 4 + bias).softmax(-1) @ v
    close(attention(x), attention.proj(out.transpose(1, 2).flatten(2)))


# ---------------------------------------------------------------------------------------------------------------
# What cannot be.


@pytest.mark.parametrize(
    ("family", "text", "match"),
    [
        ("xcit", "irpe", "a XCABlock, which has none that takes it: its attention is between channels"),
        ("coat", "rope_axial", "a SerialBlock, which has none that takes it: its attention is factorised"),
        ("differential", "lepe", "speaks at values, but a DiffAttention takes rotations, biases"),
    ],
)
def test_what_cannot_be_says_why(family, text, match):
    with pytest.raises(InputError, match=match):
        equip(make(family), text)
