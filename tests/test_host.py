"""Models of one's own, described; sharing, different encodings in different blocks, and taking all back."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention

from whereformer import Grid, InputError, describe, equip, unequip
from whereformer.adapters import Block, Host, Own, Stage, swap
from whereformer.adapters.behaviours import EquippedModel
from whereformer.encodings import Learned


class OwnAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), OwnAttention(dim)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class OwnModel(nn.Module):
    """No class token; a table for 4 x 4 patches of 4 x 4 pixels."""

    def __init__(self, dim: int = 16, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, dim, 4, 4)
        self.table = nn.Parameter(torch.randn(1, 16, dim))
        self.blocks = nn.ModuleList(OwnBlock(dim) for _ in range(depth))

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        if self.table is not None:
            x = x + self.table
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


def where(images, patches):
    return Grid(*patches.shape[2:])


def described(model: OwnModel) -> Host:
    blocks = [Block(block, [block.attention]) for block in model.blocks]
    stage = Stage(dim=16, heads=2, grid=Grid(4, 4), blocks=blocks)
    return Host([stage], own=[Own(model, "table")], entry=(model.patches, where))


def own(encoding, **options) -> OwnModel:
    model = OwnModel()
    return equip(model, encoding, host=described(model), **options)


def images(height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def randomise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".encodings." in name:
            nn.init.normal_(parameter, std=0.5)


def test_a_model_of_ones_own():
    model = own("none")
    plain = OwnModel()
    plain.table = None
    torch.testing.assert_close(model(images()), plain(images()))
    speaking = own("sincos2d + irpe(on='qkv') + rope_axial")
    randomise(speaking)
    assert (speaking(images()) - plain(images())).abs().max() > 0.01
    assert speaking(images(8, 24)).shape == (2, 16)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(speaking)))
    torch.testing.assert_close(twin(images(8, 24)), speaking(images(8, 24)))
    assert "attention of blocks.0.attention ... blocks.2.attention" in str(describe(speaking))


def test_it_compiles_as_one_graph():
    model = own("sincos2d + irpe")
    randomise(model)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()))


def test_unequip_takes_all_back():
    model = OwnModel()
    expected, state = model(images()), {name: id(p) for name, p in model.named_parameters()}
    kinds = [type(m) for m in model.modules()]
    equip(model, "learned + irpe", host=described(model))
    assert "table" not in dict(model.named_parameters())
    assert unequip(model) is model
    assert torch.equal(model(images()), expected)
    assert {name: id(p) for name, p in model.named_parameters()} == state
    assert [type(m) for m in model.modules()] == kinds
    assert model.__dict__.keys() == OwnModel().__dict__.keys()
    equip(model, "irpe", host=described(model)).double()
    unequip(model)
    torch.testing.assert_close(model(images().double()), expected.double(), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="unequip: OwnModel is not equipped"):
        unequip(model)


def test_different_blocks_have_different_encodings():
    model = own({range(2): "learned + irpe", 2: "rope_axial"})
    kinds = [[type(e).__name__ for e in block.attention.encodings] for block in model.blocks]
    assert kinds == [["IRPE"], ["IRPE"], ["RoPEAxial"]]
    assert [type(e) for e in model.blocks[0].encodings] == [Learned]
    for blocks, match in (
        ({5: "irpe"}, "block 5, but the model has 3"),
        ({0: "irpe", (0, 1): "swin"}, "named twice"),
    ):
        with pytest.raises(InputError, match=match):
            own(blocks)


def test_blocks_may_share_one_encoding():
    model = own("irpe", share=True)
    randomise(model)
    first, *others = (block.attention.encodings[0] for block in model.blocks)
    assert all(other is first for other in others)
    apart = own("irpe")
    apart.load_state_dict(model.state_dict())
    torch.testing.assert_close(apart(images()), model(images()))
    model(images()).sum().backward()
    assert first.tables["k"].grad.abs().max() > 0
    with pytest.raises(InputError, match="lookhere is another one in each block"):
        own("lookhere", share=True)


def test_a_description_that_is_wrong():
    model = OwnModel()
    host = described(model)
    with pytest.raises(InputError, match="OwnModel has no 'tabel'"):
        equip(model, "irpe", host=replace(host, own=[Own(model, "tabel")]))
    with pytest.raises(InputError, match="expected a Host with stages of blocks"):
        equip(model, "irpe", host=Host([]))
    model.blocks[1].attention = model.blocks[0].attention
    with pytest.raises(InputError, match="one attention stands in several places"):
        equip(model, "irpe", host=described(model))
    for wrong, match in (({"keep_own": "no"}, "keep_own='no'"), ({"share": 1}, "share=1")):
        with pytest.raises(InputError, match=match):
            own("irpe", **wrong)
    with pytest.raises(InputError, match="expected some blocks"):
        own({})


@pytest.mark.parametrize("at", range(0, 60, 4))
def test_an_interrupted_equip_leaves_the_model_as_it_was(at, monkeypatch):
    model = OwnModel()
    expected = model(images())
    kinds = [(type(m), sorted(m.__dict__)) for m in model.modules()]
    names = list(model.state_dict())
    calls = 0

    def interrupted(module, name, value):
        nonlocal calls
        calls += 1
        if calls == at + 1:
            monkeypatch.undo()
            raise KeyboardInterrupt
        nn.Module.__setattr__(module, name, value)

    monkeypatch.setattr(swap, "setattr", interrupted, raising=False)
    try:
        equip(model, "learned + irpe", host=described(model))
    except KeyboardInterrupt:
        assert not isinstance(model, EquippedModel)
    else:
        assert at > 16, "equip sets more than that"
        unequip(model)
    assert [(type(m), sorted(m.__dict__)) for m in model.modules()] == kinds
    assert list(model.state_dict()) == names
    assert torch.equal(model(images()), expected)


def test_an_attention_that_does_not_attend_is_an_error_not_a_silence():
    class Deaf(OwnAttention):
        def forward(self, x):
            return self.out(x)

    model = OwnModel()
    model.blocks[1].attention = Deaf(16)
    equip(model, "irpe", host=described(model))
    with pytest.raises(InputError, match="Deaf: its forward did not call torch's scaled_dot_product_attention"):
        model(images())


def sharded(model: nn.Module) -> nn.Module:
    """As FSDP leaves it: of a class of its own."""
    model.__class__ = type("Sharded", (FSDPModule, type(model)), {})
    return model


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (torch.compile, "compiled; give model._orig_mod"),
        (nn.DataParallel, "wrapped in DataParallel; give model.module"),
        (sharded, r"sharded \(Sharded\); do it before FSDP"),
    ],
)
def test_wrapped_models_say_what_to_do(wrap, match):
    with pytest.raises(InputError, match=f"equip: .*{match}"):
        equip(wrap(OwnModel()), "irpe")
    with pytest.raises(InputError, match=f"unequip: .*{match}"):
        unequip(wrap(own("irpe")))


def test_nothing_is_taken_back_from_under_another_change():
    model = own("irpe")
    sharded(model.blocks[1])
    with pytest.raises(InputError, match="something else changed the class of a Sharded"):
        unequip(model)
    assert describe(model).attentions
