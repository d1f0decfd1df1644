"""`equip` on every family of timm's plain transformers."""

import copy
import pickle

import pytest
import torch
from timm_small import FAMILIES, close, images, make, randomise
from torch import nn

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
    """The rows of patches upside down; for CrossViT of the larger patches, with the smaller ones in them turned too."""
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
    close(after, before, rtol=2e-6, atol=2e-6)


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
                assert parameter.grad is not None and parameter.grad.abs().max() > 0, (name, key)
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
