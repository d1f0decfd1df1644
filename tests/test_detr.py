"""transformers' DETR: its encoder, and its decoder where object queries are said to lie on a lattice."""

import copy
import itertools
import json
import math
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn

from whereformer import Grid, InputError, Points, describe, equip, resize, unequip
from whereformer.adapters import equip_detr, from_pretrained
from whereformer.adapters.transformers.lattice import over, to_the_map
from whereformer.adapters.transformers.padding import Corners
from whereformer.encodings import IRPE

SIZES: dict[str, Any] = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3}
SIZES |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 6}
SIZES |= {"use_timm_backbone": False, "num_labels": 2}
LATTICE = (2, 3)
MODELS = {
    "detr": (hf.DetrConfig, hf.DetrForObjectDetection),
    "conditional": (hf.ConditionalDetrConfig, hf.ConditionalDetrForObjectDetection),
}
PANOPTIC = {
    "detr": (hf.DetrConfig, hf.DetrForSegmentation),
    "conditional": (hf.ConditionalDetrConfig, hf.ConditionalDetrForSegmentation),
}
IMAGES = [(64, 160), (160, 96)]
"""Two images in a batch of 160 x 160 pixels: 2 x 5 and 5 x 3 patches on a map of 5 x 5."""


def build(name: str, models: dict[str, Any] = MODELS) -> Any:
    """A small model in float64 with random weights that matter."""
    config, kind = models[name]
    convolutions = {"embedding_size": 4, "hidden_sizes": [4, 4, 4, 8], "depths": [1, 1, 1, 1]}
    stages = ["stage1", "stage2", "stage3", "stage4"] if models is PANOPTIC else ["stage4"]
    backbone = hf.ResNetConfig(**convolutions, out_features=stages)
    sizes = SIZES
    if models is PANOPTIC:  # the head takes multiples of 8
        sizes = SIZES | {"d_model": 64, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    model = kind(config(backbone_config=backbone, **sizes)).double().eval()
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=p[0].numel() ** -0.5)
    nn.init.normal_(inner(model).query_position_embeddings.weight)
    return model


def inner(model: Any) -> Any:
    """The DetrModel within."""
    model = getattr(model, "detr", None) or getattr(model, "conditional_detr", None) or model
    return model.model


def speak(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "encodings"):
            for parameter in module.encodings.parameters():
                nn.init.normal_(parameter, std=0.5)
    return model


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (3, -1)).transpose(1, 2)


def batch() -> tuple[Tensor, Tensor]:
    pixels, real = torch.zeros(2, 3, 160, 160, dtype=torch.float64), torch.zeros(2, 160, 160, dtype=torch.long)
    for row, (height, width) in enumerate(IMAGES):
        pixels[row, :, :height, :width] = torch.randn(3, height, width, dtype=torch.float64)
        real[row, :height, :width] = 1
    return pixels, real


def run(model: Any) -> Tensor:
    torch.manual_seed(0)
    pixels, real = batch()
    out = model(pixels, pixel_mask=real)
    return torch.cat([out.logits, out.pred_boxes], -1)


# ---------------------------------------------------------------------------------------------------------------
# Where object queries are.


@pytest.mark.parametrize(("rows", "columns", "height", "width"), [(1, 1, 3, 4), (2, 3, 5, 7), (4, 4, 2, 9)])
def test_the_lattice_lies_over_the_image(rows, columns, height, width):
    """A cell's middle and that of a patch are at the same part of the image, where the same number says so."""
    places = over(
        Grid(rows, columns), Grid(height, width), torch.tensor([[0, 0]]), torch.tensor([[height, width]])
    )
    for (r, c), (y, x) in zip(itertools.product(range(rows), range(columns)), places.at[0].tolist(), strict=True):
        assert (y + 0.5) / height == pytest.approx((r + 0.5) / rows)
        assert (x + 0.5) / width == pytest.approx((c + 0.5) / columns)


def test_on_patches_like_itself_a_lattice_is_the_grid():
    grid = Grid(3, 5)
    places = over(grid, grid, torch.tensor([[0, 0]]), torch.tensor([[3, 5]]))
    assert torch.equal(places.at[0], grid.coords().float())


def test_in_a_padded_batch_the_lattice_lies_over_each_image():
    class Silent(nn.Module):
        encodings = ()

    mask = torch.zeros(3, 5, 7, dtype=torch.bool)
    mask[0, :2, :7] = mask[1, :5, :3] = mask[2, 1:4, 2:6] = True  # the last one not in the corner
    queries, keys = to_the_map(Silent(), Corners(5, 7, mask=mask), queries=Grid(2, 1))
    assert keys == Grid(5, 7)
    assert isinstance(queries, Points)
    expected = [[[0.0, 3.0], [1.0, 3.0]], [[0.75, 1.0], [3.25, 1.0]], [[1.25, 3.5], [2.75, 3.5]]]
    assert queries.at.tolist() == expected


# ---------------------------------------------------------------------------------------------------------------
# The encoder, on a grid that is not square, with padding: the four mappings of the released code. The layers of
# DETR in tests/data are of product alone (see test_transformers.py): these are its encodings, within a layer.

DATA = Path(__file__).parent / "data"
VALUES = load_file(DATA / "irpe_reference.safetensors")
CASES: dict[str, Any] = json.loads((DATA / "irpe_reference.json").read_text())
ON_3_BY_5 = [
    name for name in CASES if re.fullmatch(r"encoding/.*-(bias-shared|ctx-unshared)-[qkv]-3x5-skip0", name)
]


@pytest.mark.parametrize("name", ON_3_BY_5)
@torch.no_grad()
def test_encoder_attention_says_what_the_released_code_says(name):
    case, values = (
        CASES[name],
        {k.removeprefix(f"{name}/"): v for k, v in VALUES.items() if k.startswith(f"{name}/")},
    )
    side, given, said = case["on"], values["input"], values["output"]
    model = build("detr")
    options = {
        "method": case["method"],
        "mode": case["mode"],
        "shared": case["shared_head"],
        "ratio": case["ratio"],
    }
    equip(model, partial(IRPE, on=side, **options), keep_own=True)
    layer = model.model.encoder.layers[0].self_attn
    for key, table in values.items():
        if key.startswith("param/"):
            part = "_rows" if "rp_rows" in key else "_columns" if "rp_cols" in key else ""
            layer.encodings[0].tables[side + part].copy_(table)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        nn.init.normal_(projection.weight, std=0.2)
        nn.init.zeros_(projection.bias)
    nn.init.eye_(layer.o_proj.weight)
    real = torch.ones(2, 3, 5, dtype=torch.bool)
    if side == "v":  # given weights: logits of queries that are zero, and no values but what is said of them
        nn.init.zeros_(layer.q_proj.weight)
        nn.init.zeros_(layer.v_proj.weight)
        x, mask, expected = torch.randn(2, 15, 24, dtype=torch.float64), given.log(), said
    else:  # given queries, or keys, which the released code has scaled
        real[0, 2], real[1, :, 3:] = False, False
        nn.init.eye_((layer.q_proj if side == "k" else layer.k_proj).weight)
        x = (given * 8**0.5).transpose(1, 2).flatten(2)
        q, k, v = (heads(projection(x)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
        mask = real.flatten(1)[:, None, None].expand(-1, 1, 15, -1)
        logits = q @ k.mT / 8**0.5 + (said if side == "k" else said.mT)
        expected = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    model.model.position_embedding(torch.Size([2, 24, 3, 5]), "cpu", torch.float64, mask=real)  # tells the grid
    out, _ = layer(x, attention_mask=mask, position_embeddings=torch.zeros_like(x))
    torch.testing.assert_close(heads(out), expected, rtol=0, atol=1e-10)  # as test_official_irpe


# ---------------------------------------------------------------------------------------------------------------
# What comes to the decoder.


@pytest.mark.parametrize("on", ["self", "cross", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_what_starts_at_zero_changes_nothing_and_goes_without_a_trace(name, on):
    model = build(name)
    expected, keys, kinds = run(model), list(model.state_dict()), [type(m) for m in model.modules()]
    encoding = "irpe(on='qkv')" if name == "detr" or on == "self" else "irpe(on='qk')"
    assert equip_detr(model, "irpe", encoding, queries=LATTICE, on=on, keep_own=True) is model
    torch.testing.assert_close(run(model), expected, rtol=0, atol=1e-12)
    attentions = {"self": ["self_attn"], "cross": ["encoder_attn"], "both": ["self_attn", "encoder_attn"]}[on]
    places = {
        seat.where.removeprefix("model.decoder.layers.") for seat in describe(model).seats if "dec" in seat.where
    }
    assert places == {f"{layer}.{attention}" for layer in (0, 1) for attention in attentions}
    speak(model)
    spoken = run(model)
    assert (spoken - expected).abs().max() > 1e-3
    spoken.square().sum().backward()
    learned = {k: p.grad.abs().max().item() for k, p in model.named_parameters() if ".encodings." in k}
    silent = "layers.0.self_attn"  # whose values are all the same, so that weights do not matter
    assert all(size > 0 for k, size in learned.items() if f"decoder.{silent}" not in k)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(run(twin), spoken)
    unequip(model)
    assert torch.equal(run(model), expected)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds


def piecewise(x: float, alpha: float = 1.9, beta: float = 3.8, gamma: float = 15.2) -> int:
    """iRPE, eq. 18, as the released code cuts it."""
    if abs(x) <= alpha:
        return round(x)
    far = alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha)
    return int(math.copysign(min(beta, round(far)), x))


def slowly(q: Tensor, k: Tensor, v: Tensor, real: Tensor, offset: Any, tables: Any) -> Tensor:
    """iRPE by product on queries, keys and values, pair by pair: [batch, queries, heads * head_dim]."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    scale = q.shape[-1] ** -0.5
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        logits, values = [], []
        for j in range(k.shape[2]):
            if not real[b, j]:
                continue
            dy, dx = offset(b, i, j)
            here = (piecewise(dy) + 3) * 7 + piecewise(dx) + 3
            there = (piecewise(-dy) + 3) * 7 + piecewise(-dx) + 3
            logit = (
                q[b, h, i] @ k[b, h, j]
                + q[b, h, i] @ tables["k"][0, :, here]
                + k[b, h, j] @ tables["q"][0, :, there]
            )
            logits.append(logit * scale)
            values.append(v[b, h, j] + (tables["v"][0, here] if "v" in tables else 0))
        weights = torch.stack(logits).softmax(0)
        out[b, h, i] = (weights[:, None] * torch.stack(values)).sum(0)
    return out.transpose(1, 2).flatten(2)


class Heard:
    """What an attention is given, and what its function gives back, before the last projection."""

    def __init__(self, attention: nn.Module) -> None:
        self.given: dict[str, Tensor] = {}
        attention.register_forward_pre_hook(lambda m, args, kwargs: self.given.update(kwargs), with_kwargs=True)
        attention.o_proj.register_forward_pre_hook(lambda m, args: self.given.update(out=args[0]))


def offset_of_queries(b: int, i: int, j: int) -> tuple[float, float]:
    return i // 3 - j // 3, i % 3 - j % 3


def offset_to_patches(b: int, i: int, j: int) -> tuple[float, float]:
    height, width = (n // 32 for n in IMAGES[b])
    return (i // 3 + 0.5) * height / 2 - 0.5 - j // 5, (i % 3 + 0.5) * width / 3 - 0.5 - j % 5


@torch.no_grad()
def test_self_attention_is_that_of_a_slow_writing():
    model = speak(equip_detr(build("detr"), "irpe", "irpe(on='qkv')", queries=LATTICE, on="self"))
    attention = model.model.decoder.layers[1].self_attn
    heard = Heard(attention)
    run(model)
    x = heard.given["hidden_states"]
    place = x + heard.given["position_embeddings"]
    q, k, v = heads(attention.q_proj(place)), heads(attention.k_proj(place)), heads(attention.v_proj(x))
    found = slowly(q, k, v, torch.ones(2, 6).bool(), offset_of_queries, attention.encodings[0].tables)
    torch.testing.assert_close(heard.given["out"], found, rtol=0, atol=1e-12)


@torch.no_grad()
def test_cross_attention_is_that_of_a_slow_writing():
    model = speak(equip_detr(build("detr"), "irpe", "irpe(on='qkv')", queries=LATTICE, on="cross"))
    attention = model.model.decoder.layers[1].encoder_attn
    heard = Heard(attention)
    run(model)
    x, memory = heard.given["hidden_states"], heard.given["key_value_states"]
    q = heads(attention.q_proj(x + heard.given["position_embeddings"]))
    k = heads(attention.k_proj(memory + heard.given["encoder_position_embeddings"]))
    v = heads(attention.v_proj(memory))
    real = batch()[1][:, ::32, ::32].bool().flatten(1)
    found = slowly(q, k, v, real, offset_to_patches, attention.encodings[0].tables)
    torch.testing.assert_close(heard.given["out"], found, rtol=0, atol=1e-12)


@torch.no_grad()
def test_conditional_cross_attention_is_that_of_a_slow_writing():
    model = speak(equip_detr(build("conditional"), "irpe", "irpe(on='qk')", queries=LATTICE, on="cross"))
    attention = model.model.decoder.layers[1].encoder_attn  # whose queries get no learned place any more
    heard = Heard(attention)
    run(model)
    x, memory = heard.given["hidden_states"], heard.given["encoder_hidden_states"]
    q = [attention.q_content_proj(x), attention.q_pos_sine_proj(heard.given["query_sine_embed"])]
    places = heard.given["encoder_position_embeddings"]
    k = [attention.k_content_proj(memory), attention.k_pos_proj(places)]
    q, k = (torch.cat([heads(part) for part in parts], -1) for parts in (q, k))
    real = batch()[1][:, ::32, ::32].bool().flatten(1)
    found = slowly(q, k, heads(attention.v_proj(memory)), real, offset_to_patches, attention.encodings[0].tables)
    torch.testing.assert_close(heard.given["out"], found, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------
# Padding.


@pytest.mark.parametrize("encoding", ["irpe(on='qk')", "log_cpb(hidden=8) + eva02"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_patches_give_nothing_and_get_no_gradient(name, encoding):
    model = speak(equip_detr(build(name), encoding, encoding, queries=LATTICE, keep_own=True))
    real = batch()[1][:, None, ::32, ::32].bool()
    seen: list[Tensor] = []

    def noise(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen.append(torch.where(real, out, 100 * (1 + len(seen))).detach().requires_grad_())
        return seen[-1]

    inner(model).input_projection.register_forward_hook(noise)
    first, second = run(model), run(model)
    assert not torch.equal(seen[0], seen[1])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    second.square().sum().backward()
    gradient = seen[1].grad
    assert gradient is not None
    assert (gradient.masked_select(~real) == 0).all()
    assert (gradient.abs().amax(1, keepdim=True).masked_select(real) > 0).all()


@pytest.mark.parametrize("encoding", ["irpe(on='qk')", "log_cpb(hidden=8)", "eva02 + kerple", "rope_mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_object_queries_see_an_image_in_a_padded_batch_as_alone(name, encoding):
    model = inner(speak(equip_detr(build(name), encoding, encoding, queries=LATTICE)))
    pixels, real = batch()
    features = model.input_projection(model.backbone(pixels, real)[-1][0])
    together = model(pixels, pixel_mask=real).last_hidden_state
    for row, (height, width) in enumerate(IMAGES):
        size = (height // 32, width // 32)
        part = features[row : row + 1, :, : size[0], : size[1]].flatten(2).mT
        mask = torch.ones(1, *size, dtype=torch.bool)
        place = model.position_embedding(torch.Size([1, 24, *size]), "cpu", torch.float64, mask).flatten(2).mT
        memory = model.encoder(part, mask.flatten(1), place).last_hidden_state
        queries = model.query_position_embeddings.weight[None]
        alone = model.decoder(
            torch.zeros_like(queries), None, memory, mask.flatten(1), place, queries
        ).last_hidden_state
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------
# Saved, trained, with a head for masks.


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name, tmp_path):
    model = build(name).float()
    tokens = "detr_learned + irpe"
    equip_detr(model, tokens, "rope_axial + irpe(on='qk')", queries=Grid(*LATTICE), on="cross", share=True)
    speak(model)
    first, second = (layer.encoder_attn.encodings for layer in model.model.decoder.layers)
    assert first[0] is second[0]
    pixels = torch.randn(1, 3, 64, 96)
    expected = model(pixels).logits
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["whereformer"] == model.recipe
    loaded = from_pretrained(hf.AutoModelForObjectDetection, tmp_path, dtype=torch.float32)
    assert torch.equal(loaded(pixels).logits, expected)
    assert str(describe(loaded)) == str(describe(model))
    assert loaded.recipe == model.recipe
    assert loaded.recipe["host"] == {"queries": [2, 3]}
    config = json.loads((tmp_path / "config.json").read_text())
    config["whereformer"]["host"] = {"queries": [2, 2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"queries=\[2, 2\] are 4, but the model has 6 object queries"):
        from_pretrained(type(model), tmp_path)


def test_checkpointed_layers_are_computed_again_on_their_own_grid():
    model = speak(equip_detr(build("detr"), "irpe", "irpe(on='qkv')", queries=LATTICE)).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    for part in model.modules():
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.0
    pixels = [torch.randn(1, 3, *size, dtype=torch.float64) for size in ((64, 96), (96, 160))]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        outs = [model(x).logits.square().sum() for x in pixels]  # the place is then where the last one was
        outs[0].backward()
        return [p.grad.clone() for name, p in model.named_parameters() if ".encodings." in name]

    expected = gradients()
    model.activation_checkpointing_enable()
    found = gradients()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PANOPTIC)
def test_a_head_for_masks_is_not_in_the_way(name):
    model = build(name, PANOPTIC)
    pixels, real = batch()

    def masks() -> Tensor:
        return model(pixels, pixel_mask=real).pred_masks

    expected = masks()
    equip_detr(model, "irpe", "irpe", queries=LATTICE, keep_own=True)
    torch.testing.assert_close(masks(), expected, rtol=1e-9, atol=1e-9)
    speak(model)
    found = masks()
    assert (found - expected).abs().max() > 1e-3
    found.square().mean().backward()
    tables = [p for k, p in model.named_parameters() if "encoder_attn.encodings" in k]
    assert all(table.grad.abs().max() > 0 for table in tables)
    unequip(model)
    assert torch.equal(masks(), expected)


# ---------------------------------------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize(
    ("decoder", "options", "message"),
    [
        ("irpe", {"queries": (2, 2)}, r"queries=\(2, 2\) are 4, but the model has 6 object queries"),
        ("irpe", {"queries": 6}, r"queries=6, expected \(rows, columns\)"),
        ("irpe", {"queries": "ab"}, r"queries='ab', expected \(rows, columns\)"),
        ("irpe", {"queries": (6, 0.5)}, r"Grid: width=0.5, expected an integer"),
        ("irpe", {"queries": Grid(2, 2, prefix=2)}, r"queries=Grid\(.*prefix=2\), expected \(rows, columns\)"),
        ("irpe", {}, r"decoder='irpe', queries=None: expected both"),
        (None, {"queries": LATTICE}, r"decoder=None, queries=\(2, 3\): expected both"),
        (
            "irpe",
            {"queries": LATTICE, "on": "all"},
            r"equip_detr: on='all', expected one of \['self', 'cross', 'both'\]",
        ),
        ("swin", {"queries": LATTICE}, r"equip: swin in a DetrCrossAttention: .* lies between patches"),
        ("rope1d", {"queries": LATTICE}, r"equip: rope1d in a DetrCrossAttention: .* lies between patches"),
        ("dinov3", {"queries": LATTICE}, r"equip: dinov3 says nothing of queries on Points.* two grids"),
        ("lepe", {"queries": LATTICE}, r"equip: lepe says nothing of queries on Points.* two grids"),
        ("sincos2d", {"queries": LATTICE}, r"sincos2d speaks to tokens .* DetrSelfAttention alone is none"),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(decoder, options, message):
    model = build("detr")
    kinds, config = [type(m) for m in model.modules()], model.model.decoder.layers[0].self_attn.config
    with pytest.raises(InputError, match=message):
        equip_detr(model, "irpe", decoder, **options)
    assert [type(m) for m in model.modules()] == kinds
    assert model.model.decoder.layers[0].self_attn.config is config


def test_what_looks_up_whole_offsets_serves_among_queries():
    model = build("detr")
    expected = run(model)
    equip_detr(model, "none", "swin + lepe", queries=LATTICE, on="self", keep_own=True)
    assert (run(speak(model)) - expected).abs().max() > 1e-3


def test_in_conditional_cross_attention_nothing_speaks_of_values():
    with pytest.raises(InputError, match=r"speaks at values, but a ConditionalDetrDecoderCrossAttention takes"):
        equip_detr(build("conditional"), "irpe", "irpe(on='v')", queries=LATTICE)


def test_models_without_object_queries_and_other_sizes_are_refused():
    vit = hf.ViTModel(
        hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(InputError, match="queries given, which a ViTModel does not have"):
        equip_detr(vit, "irpe", "irpe", queries=LATTICE)
    with pytest.raises(InputError, match="queries given, which a MultiheadAttention does not have"):
        equip_detr(nn.MultiheadAttention(16, 2), "irpe", "irpe", queries=LATTICE)
    model = equip_detr(build("detr"), "irpe", "irpe", queries=LATTICE)
    with pytest.raises(InputError, match="has no image_size and patch_size"):
        resize(model, (8, 8))
    with pytest.raises(InputError, match=r"the model has .* already"):
        equip(model, "irpe")


def test_a_silent_decoder_is_the_encoder_alone():
    first, second = build("detr"), build("detr")
    second.load_state_dict(first.state_dict())
    equip_detr(first, "irpe", "none", queries=LATTICE)
    equip_detr(second, "irpe")
    torch.testing.assert_close(run(first), run(second), rtol=0, atol=1e-12)
