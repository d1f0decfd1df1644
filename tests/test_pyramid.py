"""`equip` on timm's pyramids: Twins, whose own convolutions are PEGs, and PVT v2, which has none."""

import copy
import io
import pickle
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from whereformer import Grid, InputError, PositionEncoding, describe, equip
from whereformer.encodings import PEG, Learned

SMALL = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "depths": (2, 3, 2, 2), "num_classes": 5}
TWINS = {
    "pcpvt": ("twins_pcpvt_small", {"img_size": 64}),
    "svt": ("twins_svt_small", {"img_size": 64, "wss": (3, 3, 3, 3)}),
}
PYRAMIDS = {
    **TWINS,
    "pvt v2": ("pvt_v2_b0", {}),
    "pvt v2 linear": ("pvt_v2_b2_li", {}),
}
DIMS = SMALL["embed_dims"]


def small(kind: str, **options) -> nn.Module:
    name, own = PYRAMIDS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **own, **options}).eval()
    with torch.no_grad():
        for parameter in getattr(model, "pos_block", nn.Identity()).parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def images(height: int = 64, width: int = 64, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def pegs(model: nn.Module) -> list[PEG]:
    return [module for module in model.modules() if isinstance(module, PEG)]


def randomise(model: nn.Module) -> None:
    for peg in pegs(model):
        for parameter in peg.parameters():
            nn.init.normal_(parameter, std=0.3)


def stages(model: nn.Module) -> list[nn.ModuleList]:
    return list(model.blocks) if hasattr(model, "blocks") else [stage.blocks for stage in model.stages]


@pytest.fixture(params=PYRAMIDS, ids=str)
def pyramid(request):
    return partial(small, request.param)


@pytest.fixture(params=TWINS, ids=str)
def twins(request):
    return partial(small, request.param)


def test_twins_own_convolutions_go_on_as_pegs(twins):
    model = twins()
    own = {f"{i}.{name}": value.clone() for i, block in enumerate(model.pos_block)
           for name, value in block.proj[0].state_dict().items()}  # fmt: skip
    others = {name: value.clone() for name, value in model.state_dict().items() if "pos_block" not in name}
    expected = [model(images(*size)) for size in ((64, 64), (32, 96))]
    count = sum(p.numel() for p in model.parameters())
    equip(model, "peg")
    for size, out in zip(((64, 64), (32, 96)), expected, strict=True):
        assert torch.equal(model(images(*size)), out)
    assert sum(p.numel() for p in model.parameters()) == count
    state = model.state_dict()
    for i, depth in enumerate(SMALL["depths"]):
        assert len(model.blocks[i]) == depth
        for name in ("weight", "bias"):
            assert torch.equal(state.pop(f"blocks.{i}.1.encodings.0.{name}"), own[f"{i}.{name}"])
    assert state.keys() == others.keys()
    assert all(torch.equal(state[name], value) for name, value in others.items())


def test_a_peg_of_another_kind_starts_anew(twins):
    for peg, (dim, size) in zip(pegs(equip(twins(), "peg(kernel_size=5)")), zip(DIMS, (16, 8, 4, 2), strict=True),
                                strict=True):  # fmt: skip
        assert peg.weight.shape == (dim, 1, 5, 5)
        assert peg.grid == Grid(size, size)
        assert not peg.bias.any()


def test_it_is_one_depthwise_convolution_after_the_first_block_of_each_stage(pyramid):
    """Block by block on the untouched model, the convolution by torch."""
    plain = pyramid()
    model = equip(pyramid(), "peg")
    randomise(model)
    weights = iter([(peg.weight, peg.bias) for peg in pegs(model)])
    is_twins = hasattr(plain, "pos_block")
    x = images(96, 64) if is_twins else plain.patch_embed(images(96, 64))
    for i, blocks in enumerate(stages(plain)):
        if is_twins:
            x, size = plain.patch_embeds[i](x)
        else:
            x = x if i == 0 else plain.stages[i].downsample(x)
            size = tuple(x.shape[1:3])
            x = x.flatten(1, 2)
        x = blocks[0](x, size)
        weight, bias = next(weights)
        image = x.mT.reshape(2, DIMS[i], *size)
        image = image + F.conv2d(F.pad(image, (1, 1, 1, 1)), weight, bias, groups=DIMS[i])
        x = image.flatten(2).mT
        for block in blocks[1:]:
            x = block(x, size)
        if not is_twins:
            x = plain.stages[i].norm(x)
        if not is_twins or i < 3:
            x = x.mT.reshape(2, DIMS[i], *size)
    x = plain.norm(x) if is_twins else x
    torch.testing.assert_close(model(images(96, 64)), plain.forward_head(x))


def test_keep_own_and_none(twins):
    model = twins()
    before = model(images())
    both = equip(copy.deepcopy(model), "peg", keep_own=True)
    assert describe(both).own == (("pos_block", sum(10 * dim for dim in DIMS)),)
    assert "own position encoding: pos_block (800 parameters)" in str(describe(both))
    for peg in pegs(both):
        nn.init.zeros_(peg.weight)
    torch.testing.assert_close(both(images()), before)
    none = equip(model, "none")
    assert describe(none).own == ()
    assert not [name for name in none.state_dict() if "pos_block" in name or "encodings" in name]
    assert (none(images()) - before).abs().max() > 1e-3


def test_sizes_in_turn(pyramid):
    model = equip(pyramid(), "peg")
    randomise(model)
    sizes = [(64, 64), (32, 96), (96, 32), (64, 64)]
    fresh = [copy.deepcopy(model)(images(*size)) for size in sizes]
    for size, expected in zip(sizes, fresh, strict=True):
        torch.testing.assert_close(model(images(*size)), expected)


def test_parameters_of_the_papers():
    """Millions that Twins prints; PVT v2 has one convolution more per stage, of 10 numbers a channel."""
    pcpvt, svt = {"small": 24.1, "base": 43.8, "large": 60.9}, {"small": 24.0, "base": 56.0, "large": 99.2}
    for family, printed in (("pcpvt", pcpvt), ("svt", svt)):
        for size, millions in printed.items():
            with torch.device("meta"):
                model = equip(timm.create_model(f"twins_{family}_{size}"), "peg")
            count = sum(p.numel() for p in model.parameters()) / 1e6
            assert count == pytest.approx(millions, abs=0.1), (family, size)
    with torch.device("meta"):
        model = timm.create_model("pvt_v2_b2")
        before = sum(p.numel() for p in model.parameters())
        equip(model, "peg")
    assert sum(p.numel() for p in model.parameters()) - before == 10 * (64 + 128 + 320 + 512)


def test_any_encoding_of_tokens_stands_where_it_would_in_a_model_of_the_stages_depth(pyramid):
    """Tables before the first block of each stage, as PVT has them."""
    model = equip(pyramid(), "learned + peg(after=0) + sincos2d")
    for i, blocks in enumerate(stages(model)):
        table, waves = blocks[0].encodings
        assert isinstance(table, Learned)
        assert table.grid == waves.grid
        assert table.table.shape == (table.grid.patches, DIMS[i])
        assert isinstance(blocks[1].encodings[0], PEG)
        assert not any(hasattr(block, "encodings") for block in blocks[2:])
    assert model(images(32, 96)).shape == (2, 5)


def test_home_grids_are_those_of_the_forward():
    for kind, size in (("pcpvt", (64, 64)), ("pvt v2", (224, 224))):
        model = equip(small(kind), "peg")
        seen: list[Grid] = []
        see = partial(lambda seen, _, inputs: seen.append(Grid(*inputs[1])), seen)
        for blocks in stages(model):
            blocks[1].register_forward_pre_hook(see)
        model(images(*size))
        assert seen == [peg.grid for peg in pegs(model)]


def test_copies_are_independent_and_equal(pyramid):
    model = equip(pyramid(), "peg")
    randomise(model)
    expected = model(images())
    expected.sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert type(twin) is type(model)
        torch.testing.assert_close(twin(images()), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
    torch.testing.assert_close(model(images()), expected)


def test_no_class_is_patched(pyramid):
    model = pyramid()
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert equip(model, "peg") is model
    assert isinstance(model, kinds[""])
    fresh = {name: type(module) for name, module in pyramid().named_modules()}
    assert fresh == kinds


def test_checkpointed_backward_after_a_forward_at_another_size():
    model = equip(small("pvt v2"), "peg").train()
    sizes = [(64, 96), (96, 64)]
    expected = []
    for size in sizes:
        model(images(*size)).square().sum().backward()
        expected.append([peg.weight.grad.clone() for peg in pegs(model)])
        model.zero_grad()
    model.set_grad_checkpointing()
    outputs = [model(images(*size)) for size in sizes]
    for out, gradients in zip(outputs, expected, strict=True):
        out.square().sum().backward()
        for peg, gradient in zip(pegs(model), gradients, strict=True):
            torch.testing.assert_close(peg.weight.grad, gradient)
        model.zero_grad()


@pytest.mark.parametrize("kind", ["pcpvt", "pvt v2"])
def test_compile_is_one_graph_and_follows_the_size(kind):
    model = equip(small(kind, depths=(2,), embed_dims=(8,), num_heads=(1,)), "peg")
    randomise(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((64, 64), (32, 96)):
        torch.testing.assert_close(compiled(images(*size)), model(images(*size)))


def test_export_with_any_size():
    model = equip(small("pvt v2", depths=(2, 2), embed_dims=(8, 16), num_heads=(1, 2)), "peg")
    randomise(model)
    size = {axis: 32 * torch.export.Dim(name, min=2, max=8) for axis, name in ((2, "height"), (3, "width"))}
    exported = torch.export.export(model, (images(96, 64),), dynamic_shapes=(size,)).module()
    for height, width in ((96, 64), (64, 160)):
        torch.testing.assert_close(exported(images(height, width)), model(images(height, width)))


def test_optimizer_groups(pyramid):
    model = equip(pyramid(), "peg")
    ours = {id(p) for peg in pegs(model) for p in peg.parameters()}
    for groups in (
        param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay()),
        param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay()),
    ):
        seen = [id(p) for group in groups for p in group["params"]]
        assert sorted(seen) == sorted(id(p) for p in model.parameters())
        assert ours <= {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}


def test_dtype_mode_and_device_are_taken_over(pyramid):
    model = equip(pyramid().double().train(), "peg")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(module.training for module in model.modules())
    with torch.device("meta"):
        empty = equip(pyramid(), "peg")
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    torch.testing.assert_close(empty.double().eval()(images().double()), model.eval()(images().double()))


def test_describe():
    found = describe(equip(small("pcpvt"), "peg"))
    assert found.grid == Grid(16, 16)
    assert found.own == ()
    assert [(seat.where, seat.grid, seat.parameters) for seat in found.seats] == [
        (f"blocks.{i}.1", Grid(16 >> i, 16 >> i), 10 * dim) for i, dim in enumerate(DIMS)
    ]
    text = str(found)
    assert "blocks.0.1: PEG(after=(0,), kernel_size=3), speaks at: tokens, parameters: 80" in text
    assert "blocks.3.1: PEG(after=(0,), kernel_size=3) on Grid(height=2, width=2, prefix=0)" in text


class Exploding(PositionEncoding):
    """Fits all stages but the last."""

    def __init__(self, dim, num_heads, grid):
        super().__init__(dim, num_heads, grid)
        if dim == DIMS[-1]:
            raise RuntimeError("no memory left")

    def tokens(self, x, grid):
        return x


class Late(PositionEncoding):
    def tokens(self, x, grid):
        return x

    def blocks(self, depth):
        return [depth]


@pytest.mark.parametrize(
    ("encoding", "match"),
    [
        ("peg(after=1)", "after=1, but of 2 blocks"),
        ("no_such", "unknown encoding 'no_such'"),
        ([PEG, Exploding], "no memory left"),
        ([PEG, Late], "block 2 of the 2 of a stage"),
        (lambda dim, heads, grid: nn.Identity(), "expected a PositionEncoding"),
    ],
)
def test_a_failure_leaves_the_model_as_it_was(pyramid, encoding, match):
    model = pyramid()
    before = {name: type(module) for name, module in model.named_modules()}
    expected = model(images())
    with pytest.raises((InputError, RuntimeError), match=match):
        equip(model, encoding)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert torch.equal(model(images()), expected)


def test_models_that_cannot(pyramid):
    with pytest.raises(InputError, match="has 'peg' already"):
        equip(equip(pyramid(), "peg"), "peg")
    model = pyramid()
    blocks = stages(model)[0]
    blocks[1] = blocks[0]
    with pytest.raises(InputError, match="several places"):
        equip(model, "peg")
