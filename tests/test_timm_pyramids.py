"""`equip` on timm's families with windows, pyramids and attention on maps."""

import copy
import pickle
from functools import partial

import pytest
import torch
from timm.models.edgenext import EdgeNeXt
from timm.models.nextvit import NextViT
from torch import nn

from pyramids_small import SMALL, byob, images, small
from whereformer import Grid, InputError, PositionEncoding, describe, equip, unequip
from whereformer.adapters.find import host_of
from whereformer.resample import resample_offsets

KINDS = list(SMALL)
OWN_KIND = [kind for kind in SMALL if SMALL[kind].equal]
ANY_SIZE = [kind for kind in SMALL if SMALL[kind].other]


def randomise(model: nn.Module, std: float = 0.5) -> None:
    torch.manual_seed(2)
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=std)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(1, scale))


@pytest.mark.parametrize("kind", KINDS)
def test_silent_encodings_beside_its_own_change_nothing_and_unequip_takes_all_back(kind):
    model, x = small(kind), images(kind)
    expected = model(x)
    state, kinds = dict(model.state_dict()), {name: type(m) for name, m in model.named_modules()}
    equip(model, "irpe(on='qk')", keep_own=True)
    close(model(x), expected)
    kept = {name: value for name, value in model.state_dict().items() if "encodings." not in name}
    assert kept.keys() == state.keys()
    assert str(describe(model))
    unequip(model)
    assert torch.equal(model(x), expected)
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_the_model_whose_own_says_nothing(kind):
    model, x = small(kind), images(kind)
    before = model(x)
    silent = small(kind)
    equip(model, "none")
    with torch.no_grad():
        for path in model.own:  # pyright: ignore[reportGeneralTypeIssues]
            where, _, name = path.rpartition(".")
            own = getattr(silent.get_submodule(where), name)
            for parameter in own.parameters() if isinstance(own, nn.Module) else [own]:
                parameter.zero_()
    close(model(x), silent(x))
    if model.own:
        assert (model(x) - before).abs().max() > 1e-5
    assert describe(model).own == ()


@pytest.mark.parametrize("kind", OWN_KIND)
def test_encodings_of_its_own_kind_go_on(kind):
    model, x = small(kind), images(kind)
    expected = model(x)
    equip(model, SMALL[kind].equal)
    close(model(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_encodings_speak_learn_and_travel(kind):
    model, x = small(kind), images(kind)
    before = model(x)
    equip(model, f"{SMALL[kind].speaks} + learned")
    randomise(model)
    out = model(x)
    assert (out - before).abs().max() > 1e-3
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        if "encodings." in name:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), out)


@pytest.mark.parametrize("kind", ANY_SIZE)
def test_other_sizes_in_turn(kind):
    model = small(kind)
    equip(model, f"{SMALL[kind].speaks} + sincos2d")
    randomise(model)
    sizes = (SMALL[kind].size, SMALL[kind].other, SMALL[kind].size)
    expected = [copy.deepcopy(model)(images(kind, size)) for size in sizes]
    for size, out in zip(sizes, expected, strict=True):
        close(model(images(kind, size)), out)


# ---------------------------------------------------------------------------------------------------------------
# By hand, where no model's own says the same: keys that stand for several patches, and tokens in another order.


def by_hand(q, k, v, table, at_q, at_k):
    """softmax(q·k/√d + B[p_i − p_j]) v, tokens [n, heads, d] at whole places [n, 2]."""
    middle = torch.tensor(table.shape[1:]) // 2
    dy, dx = (at_q[:, None] - at_k[None] + middle).unbind(-1)
    logits = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5 + table[:, dy, dx]
    return torch.einsum("hnm,mhd->nhd", logits.softmax(-1), v)


def lattice(height: int, width: int, step: int = 1, first: int = 0) -> torch.Tensor:
    rows, columns = (first + step * torch.arange(n) for n in (height, width))
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)


@torch.no_grad()
def test_pooled_keys_lie_in_the_middle_of_their_patches():
    model = small("pvt v2")
    equip(model, "swin")
    randomise(model)
    m = model.stages[0].blocks[0].attn
    m.place.grid = Grid(16, 24)
    x = torch.randn(1, 16 * 24, 8, dtype=torch.float64)
    keys = m.norm(m.sr(x.mT.reshape(1, 8, 16, 24)).flatten(2).mT)
    k, v = m.kv(keys)[0].unflatten(-1, (2, m.num_heads, -1)).unbind(1)
    q = m.q(x)[0].unflatten(-1, (m.num_heads, -1))
    table = resample_offsets(m.encodings[0].table, (16, 24), (16, 24))
    expected = by_hand(q, k, v, table, lattice(16, 24), lattice(2, 3, step=8, first=3))
    close(m(x, (16, 24))[0], m.proj(expected.flatten(1)))


@torch.no_grad()
@pytest.mark.parametrize("number", [0, 1, 2])
def test_mask_units_are_small_grids_whatever_the_order_of_tokens(number):
    """Block 1 pools its queries; block 2 does too, and attends to the whole image."""
    model = small("hiera")
    equip(model, "swin + learned")
    randomise(model)
    block = list(model.blocks)[number]
    m = block.attn
    layout, after = [stage.layout for stage in host_of(small("hiera")).stages for _ in stage.blocks][
        number : number + 2
    ]
    side = 16 >> max(0, number - 1)
    x = torch.randn(1, side * side, m.dim, dtype=torch.float64)
    got = after.tokens(m(layout.back(x, x)))[0]
    unit = 8 >> max(0, number - 1) if m.use_mask_unit_attn else side
    q, k, v = m.qkv(x)[0].unflatten(-1, (3, m.heads, -1)).unbind(1)
    windows = [
        t.unflatten(0, (side // unit, unit, side // unit, unit)).transpose(1, 2).flatten(0, 1) for t in (q, k, v)
    ]
    outs, step = [], 2 if m.q_stride > 1 else 1
    for q, k, v in zip(*windows, strict=True):
        q = q.unflatten(0, (unit // step, step)).unflatten(2, (unit // step, step)).amax((1, 3)).flatten(0, 1)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        outs.append(
            by_hand(q, k, v, m.encodings[0].table, lattice(unit // step, unit // step, step), lattice(unit, unit))
        )
    across = side // unit
    out = torch.stack(outs).unflatten(1, (unit // step, -1)).unflatten(0, (across, across)).transpose(1, 2)
    close(got, m.proj(out.flatten(0, 3).flatten(1)))


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (
            partial(EdgeNeXt, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), global_block_counts=(0, 1, 1, 1)),
            "between channels",
        ),
        (partial(NextViT, 3, depths=(1, 1, 5, 1)), "takes nothing: its attention has for keys the means of runs"),
        (partial(byob, "lambda", num_heads=2), "lambda layer"),
    ],
)
def test_attention_that_takes_nothing_says_why(build, why):
    with torch.device("meta"):
        model = build()
    kinds = {name: type(m) for name, m in model.named_modules()}
    with pytest.raises(InputError, match=why):
        equip(model, "irpe")
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    equip(model, "sincos2d")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of how timm resizes its table
def test_windows_follow_the_model():
    model = small("swin")
    equip(model, "swin + rope_axial")
    randomise(model)
    x, plain = torch.randn(1, 3, 48, 48, dtype=torch.float64), small("swin")
    for one in (model, plain):
        one.set_input_size((48, 48), window_size=6)
    assert model(x).shape == (1, 5)
    assert torch.equal(unequip(model)(x), plain(x))


def test_blocks_that_are_told_their_grid_are_computed_again_on_it():
    model = equip(small("caformer"), "sincos2d + irpe").train()
    randomise(model)
    x = [images("caformer", size) for size in ((64, 64), (64, 96))]
    grads = []
    for on in (False, True):
        model.set_grad_checkpointing(on)
        model.zero_grad()
        sum(out.square().sum() for out in [model(image) for image in x]).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if "encodings." in name})
    for name, grad in grads[0].items():
        close(grads[1][name], grad, 1e-4)
