"""Parameters and multiply-adds, against the iRPE paper's and against torch's own counter."""

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from whereformer import InputError, equip
from whereformer.lab.cost import costs, macs, paper_costs, parameters

PAPER = list(paper_costs())


@pytest.mark.parametrize("cost", PAPER, ids=lambda cost: f"{cost.model} {cost.encoding}")
def test_the_papers_counts(cost):
    assert round(cost.parameters / 1e6, 2) == cost.paper_parameters
    if "qkv" in cost.encoding:  # the paper's are dense on values: depth n² dim more than products per bucket
        assert cost.macs / 1e6 < cost.paper_macs
    else:
        assert cost.macs / 1e6 == pytest.approx(cost.paper_macs, rel=2e-3)


def test_every_count_of_the_paper_is_there():
    assert {cost.paper_parameters for cost in PAPER} == {5.76, 22.05, 22.09, 22.13, 22.17, 22.28, 86.61, 86.68}


def test_dense_values_would_cost_what_the_paper_counts():
    ours = next(c for c in PAPER if c.model.startswith("deit_small") and "qkv" in c.encoding)
    tokens, dim, depth, buckets = 197, 384, 12, 50
    dense = ours.macs + depth * (tokens**2 * dim - tokens * buckets * dim)
    assert dense / 1e6 == pytest.approx(ours.paper_macs, rel=2e-3)


@pytest.mark.parametrize(("name", "size"), [("test_vit", (160, 160)), ("vit_tiny_patch16_224", (96, 160))])
def test_products_against_torchs_counter(name, size):
    model = timm.create_model(name, img_size=size).eval()
    ours = macs(model, *size)
    others = 0  # what torch's counter leaves out: activations, scaled queries, norms

    def count(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        nonlocal others
        others += output.numel() * (5 if isinstance(module, nn.LayerNorm) else 1)

    for module in model.modules():
        if isinstance(module, timm.layers.Attention):
            module.fused_attn = False  # the counter does not see fused attention on CPUs
        if isinstance(module, nn.GELU | timm.layers.Attention | nn.LayerNorm):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, *size))
    assert ours - others == counter.get_total_flops() // 2


def test_encodings_cost_what_they_multiply():
    def added(text: str, height: int = 32, width: int = 48) -> int:
        options = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
        plain = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, pos_embed="none", **options)
        before = macs(plain, height, width)
        return macs(equip(plain, text), height, width) - before

    tokens = 1 + 4 * 6
    assert added("none") == added("learned") == added("irpe(mode='bias')") == 0
    assert added("irpe") == 2 * tokens * 24 * 50
    assert added("irpe(on='qkv')") == 3 * added("irpe")
    assert added("irpe(method='cross')") == 2 * tokens * 24 * 2 * (7 + 1)
    assert added("peg") == 24 * 24 * 9
    assert added("irpe", 64, 48) == 2 * (1 + 8 * 6) * 24 * 50
    assert added("learned + irpe", 64, 48) == added("irpe", 64, 48)


def test_counting_leaves_the_model_alone():
    model = equip(timm.create_model("test_vit"), "irpe")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    macs(model, 160, 160)
    assert all(not module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert parameters(model) == sum(p.numel() for p in model.parameters())


def test_costs_of_any_timm_model():
    none, irpe = costs("test_vit", ["none", "irpe"], image_size=96)
    assert irpe.parameters > none.parameters
    assert irpe.macs > none.macs
    with pytest.raises(InputError, match="no_such_model"):
        list(costs("no_such_model", ["none"]))


def test_pyramids_are_refused_rather_than_counted_in_part():
    with torch.device("meta"):
        model = equip(timm.create_model("pvt_v2_b0"), "peg")
    with pytest.raises(InputError, match="EquippedPyramidVisionTransformerV2, expected a timm VisionTransformer"):
        macs(model, 224, 224)


def test_a_pyramid_has_no_costs_here() -> None:
    with pytest.raises(InputError, match="pvt_v2_b0' is a PyramidVisionTransformerV2"):
        list(costs("pvt_v2_b0", ["peg"]))
