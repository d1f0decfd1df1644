"""Official layouts give the outputs of the model that they came from: to the bit, where nothing is computed."""

import json
import re
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from official import CASES, VIT, lookhere, of_detr, randomised, renamed, small
from whereformer import Grid, InputError, attention, equip, load_checkpoint, parse
from whereformer.adapters.files import Entry
from whereformer.adapters.fit import fitted, in_timms_names, shapes_of
from whereformer.adapters.layouts import LAYOUTS, layout_of, recognise
from whereformer.adapters.layouts.names import DERIVED, synonyms
from whereformer.adapters.layouts.rules import Drop, Rule, backwards, translate
from whereformer.adapters.writing import write_weights
from whereformer.catalog import CATALOG
from whereformer.encodings import IRPE, BEiT, RoPEMixed


def entries(state: dict[str, Tensor]) -> dict[str, Entry]:
    return {name: Entry.of(value) for name, value in state.items()}


def same(model: nn.Module, other: nn.Module, x: Tensor, *, exact: bool = True) -> None:
    with torch.inference_mode():
        got, expected = model(x), other(x)
    assert expected.std() > 0
    if exact:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_official_weights_give_their_outputs(name):
    case = CASES[name]
    model = case.model()
    state = {**case.official(model.state_dict()), **case.besides}
    layout = recognise(entries(state))
    assert layout is not None
    assert layout.name == case.layout
    torch.manual_seed(1)
    other = case.model()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    load_checkpoint(other, state)
    for key, value in model.state_dict().items():
        if case.exact:
            assert torch.equal(other.state_dict()[key], value), key
    same(other, model, case.image(), exact=case.exact)


@pytest.mark.parametrize("name", CASES)
def test_every_change_is_told_and_nothing_else_changes(name):
    case = CASES[name]
    state = {**case.official(case.model().state_dict()), **case.besides}
    found, steps = in_timms_names(entries(state), layout_of(case.layout))
    changed = {key for step in steps for key, _ in step.before}
    for key in state:
        if key not in changed:
            assert torch.equal(found[key].read(), state[key])
    made = {key for step in steps for key, _ in step.after}
    assert found.keys() - made == state.keys() - changed
    assert set(case.besides) <= changed
    for step in steps:
        if len(step.before) == len(step.after) == 1 and case.exact and step.before[0][1] == step.after[0][1]:
            old, new = state[step.before[0][0]], found[step.after[0][0]].read()
            assert torch.equal(old.sort().values, new.sort().values)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.back])
def test_the_way_back_leads_to_the_official_names(name, tmp_path):
    case = CASES[name]
    official = case.official(case.model().state_dict())
    layout = layout_of(case.layout)
    found, _ = in_timms_names(entries({**official, **case.besides}), layout)
    back, _ = translate(found, backwards(layout.rules))
    assert {key for key in official if "bias_mask" not in key} == back.keys()
    write_weights(tmp_path / "back.safetensors", back, {})
    for key, value in load_file(tmp_path / "back.safetensors").items():
        if case.exact and "qkv.bias" not in key:
            assert torch.equal(value, official[key]), key
        else:
            assert value.shape == official[key].shape


def test_every_layout_is_tried():
    elsewhere = {"irpe-deit", "irpe-detr", "rope-swin", "lookhere", "vjepa2", "vjepa2-transformers"}
    assert {case.layout for case in CASES.values()} | elsewhere == {layout.name for layout in LAYOUTS}
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_every_layout_is_in_the_documentation():
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert {name for name, _ in rows} == {layout.name for layout in LAYOUTS}
    for name, whose in rows:
        assert whose.split(",")[0].split(";")[0] in layout_of(name).source


@pytest.mark.parametrize("name", ["mixed", "axial"])
def test_rope_vit_is_deit3_equipped(name):
    """timm has RoPE-ViT as an EVA; ours is a DeiT-III with another encoding."""
    case = CASES[f"rope-vit-{name}"]
    model = case.model()
    ours = equip(timm.create_model("deit3_small_patch16_224", **VIT, num_classes=5), f"rope_{name}").eval()
    load_checkpoint(ours, {**case.official(model.state_dict()), **case.besides})
    same(ours, model, case.image(), exact=False)


def test_dinov2_keeps_its_table_in_an_encoding():
    case = CASES["dinov2"]
    model = case.model()
    ours = equip(timm.create_model("vit_small_patch14_dinov2", **VIT, num_classes=0), "learned").eval()
    load_checkpoint(ours, {**case.official(model.state_dict()), **case.besides})
    same(ours, model, case.image())


def test_twins_keeps_its_convolutions_in_encodings():
    model, other = CASES["twins"].model(), equip(CASES["twins"].model(), "peg")
    randomised(other)
    load_checkpoint(other, model.state_dict())
    same(other, model, CASES["twins"].image(), exact=False)


EQUIPPED = {
    "swin": "swin",
    "swinv2": "log_cpb",
    "beit": "beit",
    "dinov3": "dinov3",
    "eva02, base": "learned + eva02",
    "sam": "learned + decomposed",
    "detectron2": "learned + decomposed",
    "rope-vit-mixed": "rope_mixed",
    "mmpretrain-swin": "swin",
}


@pytest.mark.parametrize("name", EQUIPPED)
def test_official_weights_come_to_the_encodings_of_an_equipped_model(name):
    """The encoding that a layout names is the one that the weights were trained with."""
    case = CASES[name]
    model, ours = case.model(), equip(case.model(), EQUIPPED[name])
    randomised(ours)
    official = {**case.official(model.state_dict()), **case.besides}
    found, _ = in_timms_names(entries(official), layout_of(case.layout))
    assert layout_of(case.layout).encoding(found) == EQUIPPED[name]
    load_checkpoint(ours.eval(), official)
    same(ours, model, case.image(), exact=False)


def test_lookhere():
    model = lookhere()
    torch.manual_seed(1)
    other = lookhere()
    state = model.state_dict()
    layout = recognise(entries(state))
    assert layout is not None
    assert layout.name == "lookhere"
    load_checkpoint(other, state)
    same(other, model, torch.randn(2, 3, 40, 24))


@pytest.fixture(scope="module")
def vjepa2() -> nn.Module:
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 4.0}
    predictor = {"pred_num_hidden_layers": 1, "pred_hidden_size": 24, "pred_num_attention_heads": 2}
    config = VJEPA2Config(**sizes, **predictor, crop_size=32, patch_size=8, frames_per_clip=2)
    config._attn_implementation = "eager"
    model = VJEPA2Model(config).eval()
    randomised(model)
    return model


def of_meta(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of transformers' V-JEPA 2 under Meta's names."""
    found = {}
    for name, value in state.items():
        if not name.startswith("encoder.") or ".key." in name or ".value." in name:
            continue
        name = name.removeprefix("encoder.")
        if ".query." in name:
            value = torch.cat(
                [state["encoder." + name.replace("query", side)] for side in ("query", "key", "value")]
            )
        found[name] = value
    return renamed(
        found,
        (r"embeddings\.patch_embeddings\.", "patch_embed."),
        (r"layer\.(\d)\.attention\.query", r"blocks.\1.attn.qkv"),
        (r"layer\.(\d)\.attention", r"blocks.\1.attn"),
        (r"layer\.", "blocks."),
        (r"layernorm", "norm"),
    )


@pytest.mark.parametrize("layout", ["vjepa2", "vjepa2-transformers"])
def test_vjepa2_with_its_pairing_is_a_vision_transformer_for_a_still_image(vjepa2, layout):
    state = vjepa2.state_dict()
    if layout == "vjepa2":
        inner = of_meta(state)
        state = {
            "encoder": {f"module.backbone.{k}": v for k, v in inner.items()},
            "predictor": {"a": state["encoder.layernorm.bias"]},
        }
        inner["pos_embed"] = torch.zeros(1, 16, 48)
        assert recognise(entries(inner)) is layout_of(layout)
    else:
        assert recognise(entries(state)) is layout_of(layout)
    options = {"class_token": False, "global_pool": "", "pos_embed": "none", "num_classes": 0}
    plain = timm.create_model("vit_small_patch16_224", **VIT, **options)
    ours = equip(plain, "vjepa2(pairing='repeated')").eval()
    load_checkpoint(ours, state)
    image = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = vjepa2(image[:, None].repeat(1, 2, 1, 1, 1), skip_predictor=True).last_hidden_state
        torch.testing.assert_close(ours(image), expected, rtol=1e-5, atol=1e-5)
        turned = equip(timm.create_model("vit_small_patch16_224", **VIT, **options), "vjepa2").eval()
        load_checkpoint(turned, state)
        assert (turned(image) - expected).abs().max() > 1e-3  # a proper rotation is not what it was trained with


def test_vjepa2_from_meta_to_transformers(vjepa2):
    official = of_meta(vjepa2.state_dict())
    found, _ = in_timms_names(entries(official), layout_of("vjepa2"))
    back, _ = translate(found, backwards(layout_of("vjepa2-transformers").rules))
    for name, entry in back.items():
        assert torch.equal(entry.read(), vjepa2.state_dict()[name]), name
    assert len(back) == sum(name.startswith("encoder.") for name in vjepa2.state_dict())


@pytest.mark.parametrize("frequencies", ["mixed"])
def test_rope_swin_has_its_frequencies_in_each_block(frequencies):
    model = small(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 4)
    )
    official = {k: v for k, v in CASES["swin"].official(model.state_dict()).items() if "bias_table" not in k}
    for stage, heads in ((0, 2), (1, 4)):
        attention = model.get_submodule(f"layers.{stage}.blocks.0.attn")
        attention.encodings = nn.ModuleList([RoPEMixed(8 * heads, heads, Grid(4, 4))])
        attention.relative_position_bias_table = None
        stem = f"layers.{stage}.blocks.0.attn.rope_"
        official |= {
            f"{stem}freqs": torch.randn(2, heads, 4),
            f"{stem}t_x": torch.zeros(9),
            f"{stem}t_y": torch.zeros(9),
        }
    layout = recognise(entries(official))
    assert layout is not None
    assert layout.name == "rope-swin"
    load_checkpoint(model, official)
    held = model.get_submodule("layers.1.blocks.0.attn.encodings.0")
    assert isinstance(held, RoPEMixed)
    assert torch.equal(held.frequencies, official["layers.1.blocks.0.attn.rope_freqs"])


def test_one_table_for_all_blocks_is_as_many_copies_and_the_way_back_wants_equal_ones():
    model = CASES["beit"].model()
    state = model.state_dict()
    tables = [name for name in state if name.endswith("relative_position_bias_table")]
    shared = "rel_pos_bias.relative_position_bias_table"
    official = {name: value for name, value in state.items() if name not in tables} | {shared: torch.randn(52, 2)}
    load_checkpoint(model, official)
    assert len(tables) == 2
    assert all(torch.equal(model.state_dict()[name], official[shared]) for name in tables)

    per_block = entries(model.state_dict())
    rule = Rule(shared, tuple(tables), *_shared_rule(per_block))
    back, _ = translate(per_block, backwards([rule]))
    assert torch.equal(back[shared].read(), official[shared])
    with torch.no_grad():
        model.get_parameter(tables[1]).add_(1)
    back, _ = translate(entries(model.state_dict()), backwards([rule]))
    with pytest.raises(InputError, match="differ"):
        back[shared].read()


def _shared_rule(wanted):
    shared = "rel_pos_bias.relative_position_bias_table"
    shapes = {name: entry.shape for name, entry in wanted.items()}
    rule = next(rule for rule in synonyms(wanted, shapes) if rule.theirs == shared)
    return rule.there, rule.back


def test_beit_tables_become_ours():
    model = CASES["beit"].model()
    state = model.state_dict()
    for block in range(2):
        attention = model.get_submodule(f"blocks.{block}.attn")
        attention.encodings = nn.ModuleList([BEiT(48, 2, Grid(4, 4, prefix=1))])
        attention.relative_position_bias_table = None
    load_checkpoint(model, state)
    held = model.get_submodule("blocks.1.attn.encodings.0")
    assert isinstance(held, BEiT)
    table = state["blocks.1.attn.relative_position_bias_table"]
    for dy in range(-3, 4):
        for dx in range(-3, 4):  # the released index: (dy + 3) 7 + dx + 3
            assert torch.equal(held.table[:, dy + 3, dx + 3], table[(dy + 3) * 7 + dx + 3])
    assert held.prefix is not None
    assert torch.equal(held.prefix, table[49:].mT)


# DETR


@pytest.fixture(scope="module")
def detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, TimmBackboneConfig

    torch.manual_seed(0)
    stack = {
        f"{s}_{k}": v
        for s in ("encoder", "decoder")
        for k, v in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    backbone = TimmBackboneConfig(backbone="resnet10t", out_indices=[4], use_pretrained_backbone=False)
    options = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    config = DetrConfig(**options, backbone_config=backbone, d_model=16, **stack, num_queries=3, num_labels=2)
    model = DetrForObjectDetection(config).eval()
    randomised(model)
    return model


def test_detr(detr):
    official = of_detr(detr.state_dict())
    assert recognise(entries(official)) is layout_of("irpe-detr")
    other = deepcopy(detr)
    randomised(other)
    load_checkpoint(other, {"model": official, "epoch": 3})
    for name, value in detr.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    found, _ = in_timms_names(entries(official), layout_of("irpe-detr"))
    back, _ = translate(found, backwards(layout_of("irpe-detr").rules))
    assert all(torch.equal(back[name].read(), value) for name, value in official.items())
    assert back.keys() == official.keys()


DATA = Path(__file__).parent / "data"
RELEASED = json.loads((DATA / "irpe_models_reference.json").read_text())


@pytest.mark.parametrize("name", [name for name in RELEASED if name.startswith("detr/")])
def test_released_detr_attention_under_transformers_names(name):
    """What the released code gave, from its weights after the translation and from the text of their encoding."""
    case = RELEASED[name]
    values = load_file(DATA / "irpe_models_reference.safetensors")
    t = {key.removeprefix(name + "/"): value for key, value in values.items() if key.startswith(name + "/")}
    stem = "transformer.encoder.layers.0.self_attn."
    state = {key.replace("state/", stem): value for key, value in t.items() if key.startswith("state/")}
    state["query_embed.weight"] = torch.zeros(2, 24)
    layout = recognise(entries(state))
    assert layout is layout_of("irpe-detr")
    found, _ = in_timms_names(entries(state), layout)
    w = {key.removeprefix("model.encoder.layers.0.self_attn."): entry.read() for key, entry in found.items()}
    (factory,) = parse(layout.encoding(found))
    grid = Grid(case["height"], case["width"])
    encoding = factory(24, 3, grid).double()
    encoding.load_state_dict({f"tables.{side}": w[f"rpe_{side}.lookup_table_weight"] for side in case["on"]})
    place, src = (t["src"] + t["pos"]).transpose(0, 1), t["src"].transpose(0, 1)
    q, k, v = (
        nn.functional.linear(x, w[f"{side}_proj.weight"], w[f"{side}_proj.bias"])
        .unflatten(-1, (3, 8))
        .transpose(1, 2)
        for x, side in ((place, "q"), (place, "k"), (src, "v"))
    )
    out = (
        attention(q, k, v, grid, [encoding], mask=~t["mask"].flatten(1)[:, None, None]).transpose(1, 2).flatten(2)
    )
    out = nn.functional.linear(out, w["o_proj.weight"], w["o_proj.bias"])
    torch.testing.assert_close(out.transpose(0, 1), t["output"], rtol=0, atol=1e-10)


def test_irpe_detr_tables_come_to_the_encodings_of_an_equipped_detr(detr):
    model = equip(deepcopy(detr), "irpe(ratio=2)", keep_own=True)
    official = of_detr(detr.state_dict())
    official["transformer.encoder.layers.0.self_attn.rpe_k.lookup_table_weight"] = table = torch.randn(1, 8, 81)
    named, _ = in_timms_names(entries(official), layout_of("irpe-detr"))
    assert layout_of("irpe-detr").encoding(named) == "irpe(ratio=2)"
    load_checkpoint(model, official)
    held = [module for module in model.modules() if isinstance(module, IRPE)]
    assert len(held) == 1
    assert torch.equal(held[0].tables["k"], table)


# What does not fit, and the language of rules


def test_derived_buffers_are_no_parameters_of_ours():
    """No state dict of ours has what is dropped from others'."""
    for cls in CATALOG.values():
        grid = Grid(4, 4, frames=2) if 2 not in cls.axes else Grid(4, 4)
        for name in cls(96, 12, grid).state_dict():
            assert not any(fnmatchcase(name, pattern) for pattern in DERIVED), (cls, name)


def test_a_layout_that_does_not_fit_names_everything():
    model = small(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=2, embed_dim=12, depths=(1, 2), num_heads=(1, 2)
    )
    case = CASES["swin"]
    with pytest.raises(InputError) as error:
        load_checkpoint(model, {**case.official(case.model().state_dict()), "stranger": torch.zeros(2)})
    for word in ("unexpected: stranger", "layers.0.blocks.0.attn.relative_position_bias_table: (49, 1)", "(9, 1)"):
        assert word in str(error.value)


def test_a_bias_that_is_not_zero_is_not_dropped():
    case = CASES["dinov3"]
    official = case.official(case.model().state_dict())
    official["blocks.0.attn.qkv.bias"][:1] = 1
    with pytest.raises(InputError, match=r"unexpected: blocks\.0\.attn\.q_bias"):
        load_checkpoint(case.model(), official)


def test_rules():
    state = entries({"a.0.w": torch.arange(6.0).reshape(6, 1), "a.1.w": torch.zeros(6, 1), "b": torch.ones(2)})
    thirds = Rule("a.{n}.w", tuple(f"c.{{n+1}}.{side}" for side in "qkv"), lambda t, _: t[0].chunk(3))
    found, steps = translate(state, [thirds, Drop("b", "no need")])
    assert list(found) == ["c.1.q", "c.1.k", "c.1.v", "c.2.q", "c.2.k", "c.2.v"]
    assert found["c.1.k"].read().tolist() == [[2], [3]]
    assert [str(step) for step in steps][-1] == "b 2 -> dropped: no need"
    assert thirds.reversed() is None
    with pytest.raises(InputError, match=r"cannot become c\.1\.q"):
        translate(state, [Rule("a.{n}.w", ("c.{n+1}.q", "c.{n+1}.k"), lambda t, _: t[0].chunk(3))])
    with pytest.raises(InputError, match="would be called b"):
        translate(state, [Rule("a.0.w", "b")])
    found, _ = translate(state, [Rule("a.{n}.w", "c.{n}")], wanted={"c.0": (6, 1)})
    assert list(found) == ["c.0", "a.1.w", "b"]


def test_an_unknown_layout_is_named():
    with pytest.raises(InputError, match="'dinov4', expected one of"):
        layout_of("dinov4")


def test_shapes_are_told_without_reading():
    case = CASES["dinov2, with registers"]
    official = case.official(case.model().state_dict())

    def never() -> Tensor:
        raise AssertionError("read")

    unread = {name: Entry(tuple(value.shape), value.dtype, never) for name, value in official.items()}
    unread |= {"mask_token": Entry((1, 48), torch.float32, never)}
    found, _ = fitted(unread, case.model())
    assert {name: entry.shape for name, entry in found.items()} == shapes_of(case.model())


# What timm reads itself


def pvt(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """PVT v2 as whai362/PVT has it."""
    found = {}
    for name, value in state.items():
        name = re.sub(r"^stages\.(\d)\.blocks", lambda m: f"block{int(m[1]) + 1}", name)
        name = re.sub(r"^stages\.(\d)\.norm", lambda m: f"norm{int(m[1]) + 1}", name)
        name = re.sub(r"^stages\.(\d)\.downsample", lambda m: f"patch_embed{int(m[1]) + 1}", name)
        name = re.sub(r"^patch_embed\.", "patch_embed1.", name).replace("mlp.dwconv", "mlp.dwconv.dwconv")
        found[name] = value
    return found


def test_files_that_timm_knows():
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "num_heads": (1, 1, 2, 2)}
    model, other = (small("pvt_v2_b0", **sizes) for _ in range(2))
    state = pvt(model.state_dict())
    assert recognise(entries(state)) is None
    load_checkpoint(other, state)
    same(other, model, torch.randn(1, 3, 64, 64))
    with pytest.raises(InputError, match=r"missing: blocks\.0"):
        load_checkpoint(small("vit_small_patch16_224", **VIT), {"a": torch.zeros(1)})


def test_open_clip_goes_into_an_encoding_and_is_not_resized_on_the_way():
    model = small("vit_small_patch16_224", **VIT)
    state = {f"visual.trunk.{name}": value for name, value in model.state_dict().items()} | {
        "logit_scale": torch.ones(())
    }
    ours = equip(small("vit_small_patch16_224", **VIT), "learned").eval()
    load_checkpoint(ours, state)
    same(ours, model, torch.randn(1, 3, 32, 32))
    with pytest.raises(InputError, match=r"pos_embed: the checkpoint is for another size"):
        load_checkpoint(small("vit_small_patch16_224", **{**VIT, "img_size": 48}), state)
