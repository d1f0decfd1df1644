"""transformers' models: equipped, given back, saved and loaded; tiny ones, with random weights that matter."""

import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from whereformer import Grid, InputError, describe, equip, unequip
from whereformer.adapters import from_pretrained
from whereformer.adapters.find import host_of
from whereformer.attention import attention, attention_weights
from whereformer.encodings import IRPE, RoPEAxial, RoPEMixed

TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 16, "image_size": 24, "patch_size": 8}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
TEXT |= {"vocab_size": 9, "max_position_embeddings": 4}
DETR: dict[str, Any] = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3}
DETR |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 3}
CONVOLUTIONS = {"embedding_size": 4, "hidden_sizes": [4, 4, 4, 8], "depths": [1, 1, 1, 1]}


def detr_config(kind: type, **options: Any) -> Any:
    backbone = hf.ResNetConfig(**CONVOLUTIONS, out_features=["stage4"])
    return kind(backbone_config=backbone, use_timm_backbone=False, **DETR, **options)


def rt_detr() -> Any:
    backbone = hf.RTDetrResNetConfig(**CONVOLUTIONS, out_features=["stage2", "stage3", "stage4"])
    sizes = {"encoder_in_channels": [4, 4, 8], "decoder_in_channels": [24] * 3, "encoder_hidden_dim": 24}
    sizes |= {**DETR, "encoder_layers": 1, "num_denoising": 0}
    return hf.RTDetrModel(hf.RTDetrConfig(backbone_config=backbone, **sizes))


def swin(**options: Any) -> hf.SwinConfig:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2]}
    return hf.SwinConfig(**sizes, window_size=4, **options)


def sam() -> Any:
    sizes = {**TINY, "image_size": 48, "output_channels": 8, "window_size": 4, "global_attn_indexes": [1]}
    return hf.SamVisionModel(hf.SamVisionConfig(**sizes))


BIASES = {"use_relative_position_bias": True, "use_absolute_position_embeddings": True}
MODELS: dict[str, Callable[[], Any]] = {
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**TINY)),
    "deit": lambda: hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**TINY)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**TINY)),
    "dinov2 backbone": lambda: hf.Dinov2Backbone(hf.Dinov2Config(**TINY)),
    "dinov2 registers": lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**TINY)),
    "dinov3": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**TINY, num_register_tokens=2)),
    "clip": lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**TINY, projection_dim=8)),
    "siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**TINY)),
    "beit": lambda: hf.BeitForImageClassification(hf.BeitConfig(**TINY, **BIASES)),
    "beit shared": lambda: hf.BeitModel(hf.BeitConfig(**TINY, use_shared_relative_position_bias=True)),
    "data2vec": lambda: hf.Data2VecVisionModel(hf.Data2VecVisionConfig(**TINY, **BIASES)),
    "swin": lambda: hf.SwinForImageClassification(swin(use_absolute_embeddings=True)),
    "swin backbone": lambda: hf.SwinBackbone(swin(out_features=["stage2"])),
    "sam": sam,
    "detr": lambda: hf.DetrModel(detr_config(hf.DetrConfig)),
    "detr learned": lambda: hf.DetrModel(detr_config(hf.DetrConfig, position_embedding_type="learned")),
    "conditional detr": lambda: hf.ConditionalDetrModel(detr_config(hf.ConditionalDetrConfig)),
    "rt-detr": rt_detr,
}
MOST_ACCURATE = {"atol": 1e-5, "rtol": 1e-5}  # sums of < 100 float32 products of size 1, through two layers


def wake(module: nn.Module) -> None:
    """Weights of a size that makes positions matter, tables too."""
    for name, p in module.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.5 if "pos" in name or "encodings" in name else p[0].numel() ** -0.5)


def build(name: str, **options: Any) -> Any:
    model = MODELS[name]()
    if options:
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **options}))
    model.eval()
    wake(model)
    return model


def speak(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "encodings"):
            for parameter in module.encodings.parameters():
                nn.init.normal_(parameter, std=0.5)
    return model


def images(name: str, height: int = 24, width: int = 24) -> Tensor:
    if name.startswith("swin"):
        height, width = 32, 32
    if name == "sam":
        height, width = 48, 48
    if "detr" in name:
        height, width = 128, 96
    return torch.randn(2, 3, height, width)


def run(model: Any, x: Tensor, **options: Any) -> Tensor:
    if isinstance(model, hf.RTDetrModel):  # what attends, before convolutions
        seen: list[Tensor] = []
        hook = model.encoder.aifi[0].register_forward_hook(lambda module, args, out: seen.append(out))
        model(x)
        hook.remove()
        return seen[0]
    out = model(x, **options)
    for name in ("encoder_last_hidden_state", "logits", "image_embeds", "last_hidden_state", "feature_maps"):
        if (found := getattr(out, name, None)) is not None:
            return found if isinstance(found, Tensor) else found[0]
    raise AssertionError(type(out))


def silenced(model: Any) -> None:
    """An independent way to take out what a model itself says of positions."""
    for name, parameter in model.named_parameters():
        if any(
            part in name for part in ("position_embedding", "pos_embed", "bias_table", "rel_pos", "position_bias")
        ):
            nn.init.zeros_(parameter)
    for name, module in model.named_modules():
        if name.endswith("position_embedding") and "detr" in type(model).__module__:
            module.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
        if name.endswith("rope_embeddings"):
            module.inv_freq.zero_()


@pytest.mark.parametrize("name", MODELS)
def test_every_family(name):
    model, x = build(name), images(name)
    expected, keys = run(model, x), list(model.state_dict())
    kinds, equal = [type(m) for m in model.modules()], host_of(model).equal
    before = {key: value.clone() for key, value in model.state_dict().items()}
    implementation = model.config._attn_implementation

    equip(model, "irpe(on='qkv')", keep_own=True)
    torch.testing.assert_close(run(model, x), expected, **MOST_ACCURATE)
    assert [key for key in model.state_dict() if ".encodings." not in key] == keys
    speak(model)
    spoken = run(model, x)
    assert (spoken - expected).abs().max() > 1e-3
    spoken.square().sum().backward()
    learned = {k: p for k, p in model.named_parameters() if ".encodings." in k}
    assert learned
    assert all(p.grad is not None for p in learned.values())
    assert sum(p.grad.abs().max() > 0 for p in learned.values() if p.grad is not None) >= len(learned) - 1
    twin = copy.deepcopy(model)
    if "backbone" not in name:  # hooks of transformers that record hidden states do not pickle
        twin = pickle.loads(pickle.dumps(twin))
    torch.testing.assert_close(run(twin, x), spoken)
    with pytest.raises(InputError):
        equip(twin, "irpe")  # is equipped already

    assert unequip(model) is model
    assert torch.equal(run(model, x), expected)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    assert model.config._attn_implementation == implementation

    assert (equal is None) == (name == "rt-detr")  # whose own goes to queries and keys alone
    if equal is not None:
        equip(model, equal)
        torch.testing.assert_close(run(model, x), expected, **MOST_ACCURATE)
        unequip(model)
    equip(model, "none")
    silent = build(name)
    silent.load_state_dict(before)
    silenced(silent)
    plain = run(silent, x)
    torch.testing.assert_close(run(model, x), plain, **MOST_ACCURATE)
    assert (plain - expected).abs().max() > 1e-3
    unequip(model)
    with pytest.raises(InputError):
        equip(model, "irpe + lookhere(heads=3)")
    assert torch.equal(run(model, x), expected)


SAVED = ("vit", "clip", "dinov3", "beit", "data2vec", "swin", "sam", "detr", "rt-detr")


@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded(name, tmp_path, monkeypatch):
    model, x = build(name), images(name)
    kind = type(model)
    tokens = "detr_learned" if name == "detr" else "sincos2d"
    equip(model, f"{tokens} + irpe(on='qkv') + log_cpb" + ("" if name == "swin" else " + rope_axial"))
    speak(model)
    expected = run(model, x)
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "whereformer")
    loaded = from_pretrained(kind, tmp_path)
    assert torch.equal(run(loaded, x), expected)
    assert type(loaded) is type(model)
    assert not hasattr(loaded.config, "whereformer")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    again = from_pretrained(type(model), tmp_path, output_loading_info=True)
    assert not again[1]["missing_keys"]
    loaded.save_pretrained(tmp_path / "again")
    first, second = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("", "again"))
    assert first["whereformer"] == second["whereformer"] == model.recipe
    assert first["architectures"] == second["architectures"] == [kind.__name__]
    if "detr" in name:  # its own is not learned
        torch.testing.assert_close(run(unequip(loaded), x), run(unequip(model), x))
        return
    with pytest.raises(InputError, match="unequip: the model was loaded equipped"):
        unequip(loaded)


def test_loading_onto_devices(tmp_path):
    model, x = speak(equip(build("vit"), "learned + irpe")), images("vit")
    model.save_pretrained(tmp_path)
    kind, expected = hf.ViTForImageClassification, run(model, x)
    assert torch.equal(run(from_pretrained(kind, tmp_path, device_map="cpu"), x), expected)
    half = from_pretrained(kind, tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    places = {"vit.embeddings": "cpu", "vit.layers.0": "disk", "vit.layers.1": "cpu", "vit.layernorm": "cpu"}
    places["classifier"] = "cpu"
    with pytest.raises(InputError, match=r"vit\.layers\.0\.attention\.encodings\.0\.tables\.k is offloaded"):
        from_pretrained(kind, tmp_path, device_map=places, offload_folder=tmp_path / "disk")
    plain = kind(hf.ViTConfig(**TINY))
    plain.save_pretrained(tmp_path / "plain")
    away = kind.from_pretrained(tmp_path / "plain", device_map=places, offload_folder=tmp_path / "disk")
    with pytest.raises(InputError, match="hooks of accelerate"):
        equip(away, "irpe")


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        ("learned + irpe", {"share": True}),
        ({(0,): "swin", (1,): "rope_axial"}, {"keep_own": True}),
        ("fourier + golden_gate + kerple", {}),
        ("lookhere + perceiver + liere", {}),
    ],
)
def test_what_was_asked_for_is_kept(encoding, options, tmp_path):
    model, x = build("vit"), images("vit")
    equip(model, encoding, **options)
    speak(model)
    expected, described = run(model, x), str(describe(model))
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    loaded = from_pretrained(hf.AutoModelForImageClassification, tmp_path, dtype=torch.float32)
    assert torch.equal(run(loaded, x), expected)
    assert str(describe(loaded)) == described
    assert (loaded.recipe, loaded.encoding) == (model.recipe, model.encoding)
    if options.get("share"):
        first, second = (layer.attention.encodings[0] for layer in loaded.vit.layers)
        assert first is second


def test_loading_in_transformers_own_way_says_what_is_missing(tmp_path):
    model = equip(build("vit"), "rope_axial", keep_own=True)  # nothing of it is learned
    model.save_pretrained(tmp_path)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = hf_logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        plain = hf.ViTForImageClassification.from_pretrained(tmp_path)
        said_then = " ".join(said)
        said.clear()
        from_pretrained(hf.ViTForImageClassification, tmp_path)
    finally:
        logger.removeHandler(handler)
    assert "whereformer.adapters.from_pretrained" in said_then
    assert "UNEXPECTED" in said_then
    assert "UNEXPECTED" not in " ".join(said)
    assert not hasattr(plain, "encoding")
    assert plain.config.whereformer == {"encoding": "rope_axial", "keep_own": True, "share": False}


def test_loading_refuses_what_it_cannot_give(tmp_path):
    hf.ViTForImageClassification(hf.ViTConfig(**TINY)).save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match=r"no entry 'whereformer' in its config\.json"):
        from_pretrained(hf.ViTForImageClassification, tmp_path / "plain")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["whereformer"] = {"encoding": "irpe", "keep_own": True, "share": False}
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"does not hold what its config says: .*encodings\.0\.tables\.k"):
        from_pretrained(hf.ViTForImageClassification, tmp_path / "plain")
    config["whereformer"] = {"encoding": 7}
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"whereformer=.*cannot be read"):
        from_pretrained(hf.ViTForImageClassification, tmp_path / "plain")
    with pytest.raises(InputError, match="AutoModelForDepthEstimation has no class for ViTConfig"):
        from_pretrained(hf.AutoModelForDepthEstimation, tmp_path / "plain")


def test_other_models_with_the_same_config_are_left_alone():
    model, x = build("vit"), images("vit")
    other = hf.ViTForImageClassification(model.config).eval()
    assert other.config is model.config
    expected = run(other, x)
    speak(equip(model, "irpe"))
    assert torch.equal(run(other, x), expected)
    assert all(layer.attention.config is other.config for layer in other.vit.layers)
    assert other.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")  # says how masks come; encodings still speak
    assert type(model.vit.layers[0].attention.encodings[0]) is IRPE
    spoken = run(model, x)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(run(model, x), spoken)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_and_weights(implementation):
    model, x = build("vit"), images("vit")
    model.set_attn_implementation(implementation)
    equip(model, "irpe(on='qk') + swin")
    speak(model)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    seen: list[Any] = []
    first = model.vit.layers[0].attention
    first.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    out = model(x, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    hidden, (given, weights) = seen[0]
    assert len(out.attentions) == 2
    assert len(out.hidden_states) == 3
    assert torch.equal(out.attentions[0], weights)
    assert (weights[1, :, :, 6:] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 10))
    v = first.v_proj(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(first.o_proj((weights @ v).transpose(1, 2).flatten(2)), given, **MOST_ACCURATE)
    assert not model(x).attentions
    if implementation == "eager":
        model.config.output_attentions = True
        assert len(model(x).attentions) == 2
    with pytest.raises(InputError, match="attention_mask is a str, expected a tensor"):
        first(hidden, "mask")
    flat = first(hidden, mask)[0]  # as flash attention gets it
    torch.testing.assert_close(flat, first(hidden, mask[:, None, None].bool())[0])


@pytest.mark.parametrize("name", ["deit", "dinov3", "clip", "siglip", "beit", "data2vec", "swin", "sam", "detr"])
def test_attentions_are_given(name):
    model, x = speak(equip(build(name, attn_implementation="eager"), "irpe(on='qk')")), images(name)
    out = model(x, output_attentions=True)
    found = out.encoder_attentions if name == "detr" else out.attentions
    assert len(found) == 2
    for weights in found:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_a_whole_attention_behind_a_prefix_by_hand():
    model, x = build("dinov2 registers"), images("dinov2 registers", 16, 40)
    equip(model, "swin")
    speak(model)
    seen: list[Any] = []
    layer = model.encoder.layer[1].attention
    layer.register_forward_hook(lambda module, args, out: seen.append((args[0], out[0])))
    model(x)
    (hidden, given), prefix = seen[0], 1 + model.config.num_register_tokens
    table = nn.functional.interpolate(layer.encodings[0].table[None], (3, 9), mode="bicubic", align_corners=False)
    q, k, v = (
        project(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    logits = q @ k.mT / 8**0.5
    for i in range(10):
        for j in range(10):
            dy, dx = i // 5 - j // 5, i % 5 - j % 5
            logits[..., prefix + i, prefix + j] += table[0, :, dy + 1, dx + 4]
    out = layer.o_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(given, out, **MOST_ACCURATE)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2", "dinov2 registers", "dinov3", "clip", "siglip", "beit"])
def test_other_sizes_as_the_models_themselves(name):
    model, x = build(name), torch.randn(1, 3, 40, 16)
    options = {"interpolate_pos_encoding": True} if name in ("vit", "deit", "clip", "siglip") else {}
    expected = run(model, x, **options)
    equip(model, host_of(model).equal)
    torch.testing.assert_close(run(model, x, **options), expected, **MOST_ACCURATE)
    assert describe(model).grid.size == (3, 3)


def test_a_size_that_the_model_refuses_is_refused():
    model = equip(build("vit"), "irpe")
    with pytest.raises(ValueError, match="doesn't match model"):
        model(torch.randn(1, 3, 40, 16))


def test_windows_of_other_sizes():
    model = build("swin backbone")
    x = torch.randn(1, 3, 32, 56)  # 8 x 14 patches: windows with padding; then 4 x 7
    expected = run(model, x)
    equip(model, "swin")
    torch.testing.assert_close(run(model, x), expected, **MOST_ACCURATE)
    unequip(model)
    speak(equip(model, "irpe(on='qkv')"))
    assert run(model, torch.randn(1, 3, 12, 20)).shape[-2:] == (2, 3)  # smaller than a window
    shrinking = speak(equip(build("swin"), "irpe(on='qkv')"))
    assert run(shrinking, torch.randn(1, 3, 16, 16)).shape == (1, 2)  # windows no larger than the grid


def test_checkpointed_layers_are_computed_again_on_their_own_grid():
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = build("dinov2").train()
        if checkpointed:
            model.activation_checkpointing_enable()
            assert model.encoder.layer[0].gradient_checkpointing
        equip(model, "learned + irpe(on='qkv') + swin")
        speak(model)
        first, second = run(model, torch.randn(1, 3, 16, 24)), run(model, torch.randn(1, 3, 24, 16))
        (first.sin().sum() + 0 * second.sum()).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=lambda m, name=name: f"{name}: {m}", **MOST_ACCURATE)


def test_it_compiles_as_one_graph():
    model, x = build("clip"), images("clip")
    equip(model, "learned + irpe")
    speak(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled, x), run(model, x), **MOST_ACCURATE)


def test_half_precision_and_training():
    model = build("vit").to(torch.bfloat16)
    equip(model, "learned + irpe(on='qkv') + rope_axial").train()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    out = model(images("vit").bfloat16(), labels=torch.tensor([0, 1]))
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------------------
# DETR.

DATA = Path(__file__).parent / "data"
OFFICIAL = load_file(DATA / "irpe_models_reference.safetensors")
CASES = json.loads((DATA / "irpe_models_reference.json").read_text())


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("detr/")])
def test_detr_encoder_attention_is_that_of_the_released_code(case):
    options, t = CASES[case], {k.removeprefix(f"{case}/"): v for k, v in OFFICIAL.items() if k.startswith(case)}
    model = hf.DetrModel(detr_config(hf.DetrConfig)).double().eval()
    on, ratio, shared = options["on"], options["ratio"], options["shared_head"]
    equip(model, f"irpe(on='{on}', ratio={ratio}, shared={shared})", keep_own=True)
    layer = model.encoder.layers[0].self_attn
    state = {k.removeprefix("state/"): v for k, v in t.items() if k.startswith("state/")}
    mapped = {f"encodings.0.tables.{side}": state[f"rpe_{side}.lookup_table_weight"] for side in on}
    for part in ("weight", "bias"):
        chunks = state[f"in_proj_{part}"].chunk(3)
        mapped |= {f"{name}_proj.{part}": chunk for name, chunk in zip("qkv", chunks, strict=True)}
        mapped[f"o_proj.{part}"] = state[f"out_proj.{part}"]
    layer.load_state_dict(mapped)
    real = ~t["mask"]
    model.position_embedding(
        torch.Size([2, 24, *real.shape[1:]]), "cpu", torch.float64, mask=real
    )  # tells the grid
    out, weights = layer(
        t["src"].transpose(0, 1),
        attention_mask=real.flatten(1)[:, None, None].expand(-1, 1, real[0].numel(), -1),
        position_embeddings=t["pos"].transpose(0, 1),
        output_attentions=True,
    )
    torch.testing.assert_close(out.transpose(0, 1), t["output"], rtol=0, atol=1e-10)  # as test_official_irpe
    torch.testing.assert_close(weights.mean(1), t["weights"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "encoding",
    ["irpe(on='qkv')", "learned + swin", "detr_sine + rope_axial", "dinov3", "rope_mixed(scaling='pi')"],
)
@pytest.mark.parametrize("keep_own", [True, False])
def test_an_image_in_a_padded_batch_is_what_it_is_alone(encoding, keep_own):
    model = build("detr")
    speak(equip(model, encoding, keep_own=keep_own))
    wide, high = torch.randn(1, 3, 64, 160), torch.randn(1, 3, 160, 96)
    batch, real = torch.zeros(2, 3, 160, 160), torch.zeros(2, 160, 160, dtype=torch.long)
    batch[0, :, :64], real[0, :64] = wide, 1
    batch[1, :, :, :96], real[1, :, :96] = high, 1
    together = model(batch, pixel_mask=real)
    for number, size in enumerate(((2, 5), (5, 3))):
        # convolutions see beyond an image's edge: it comes to them as in the batch, and is cut behind them
        features = model.input_projection(model.backbone(batch, real)[-1][0])[number : number + 1]
        features = features[..., : size[0], : size[1]]
        place = model.position_embedding(features.shape, "cpu", torch.float32, mask=torch.ones(1, *size).bool())
        alone = model.encoder(
            features.flatten(2).mT,
            attention_mask=torch.ones(1, size[0] * size[1]),
            spatial_position_embeddings=place.flatten(2).mT,
        ).last_hidden_state
        found = together.encoder_last_hidden_state[number].unflatten(0, (5, 5))[: size[0], : size[1]].flatten(0, 1)
        torch.testing.assert_close(found, alone[0], **MOST_ACCURATE)


def test_detr_refuses_what_it_cannot_add():
    model, x = build("detr"), images("detr")
    expected = run(model, x)
    with pytest.raises(InputError, match="PEG does not say what to add"):
        equip(model, "peg(after=-1)")
    assert torch.equal(run(model, x), expected)
    equip(model, "swin")
    holes = torch.ones(2, 128, 96, dtype=torch.long)
    holes[:, :64] = 0
    with pytest.raises(InputError, match="not in the top left corner"):
        model(x, pixel_mask=holes)


def test_detr_finds_objects():
    model = hf.DetrForObjectDetection(detr_config(hf.DetrConfig))
    equip(model, "irpe(on='qkv')", keep_own=True).train()
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}]
    model(torch.randn(1, 3, 64, 96), labels=labels).loss.backward()
    assert model.model.encoder.layers[1].self_attn.encodings[0].tables["v"].grad.abs().max() > 0


# ---------------------------------------------------------------------------------------------------------------
# Which part of a model.


def test_the_vision_tower_is_found():
    config = hf.CLIPConfig(vision_config=TINY, text_config=TEXT, projection_dim=8)
    model = hf.CLIPModel(config).eval()
    wake(model)
    words, x = torch.arange(4)[None], images("clip")
    text = model.get_text_features(words).pooler_output
    before = model.get_image_features(x).pooler_output
    equip(model, "rope_axial", keep_own=True)
    assert torch.equal(model.get_text_features(words).pooler_output, text)
    assert (model.get_image_features(x).pooler_output - before).abs().max() > 1e-4
    assert "vision_model.encoder.layers.1.self_attn" in str(describe(model))


def test_layers_are_kept_whole_where_models_are_split():
    model = equip(build("vit"), "irpe")
    names = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules <= names


def test_what_has_no_tower_or_several_is_refused():
    with pytest.raises(InputError, match="CLIPTextModel has no vision model inside that is known"):
        equip(hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), "irpe")

    class Two(hf.PreTrainedModel):
        config_class = hf.ViTConfig

        def __init__(self, config):
            super().__init__(config)
            self.one, self.other = hf.ViTModel(config), hf.ViTModel(config)

    with pytest.raises(InputError, match="Two has several vision models, one, other: equip one"):
        equip(Two(hf.ViTConfig(**TINY)), "irpe")


# ---------------------------------------------------------------------------------------------------------------
# What attention itself learned for this.


@pytest.mark.parametrize("encoding", [IRPE, RoPEAxial, RoPEMixed])
def test_encodings_that_do_not_go_by_size_do_not(encoding):
    small, large = Grid(2, 3), Grid(4, 5)
    one = encoding(16, 2, Grid(3, 3))
    assert not one.by_size
    for parameter in one.parameters():
        nn.init.normal_(parameter)
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    inside = torch.zeros(4, 5, dtype=torch.bool)
    inside[:2, :3] = True
    index = inside.flatten().nonzero()[:, 0]
    alone = attention(*(t[:, :, index] for t in (q, k, v)), small, [one])
    padded = attention(q, k, v, large, [one], mask=inside.flatten())
    torch.testing.assert_close(padded[:, :, index], alone)


def test_weights_are_those_of_attention():
    grid, keys = Grid(2, 3, prefix=1), Grid(3, 2, prefix=1)
    encodings = [IRPE(8, 2, grid, on="qk"), RoPEAxial(8, 2, grid)]
    nn.init.normal_(encodings[0].tables["k"])
    q, k, v = torch.randn(3, 1, 2, 7, 4)
    mask = torch.rand(7, 7) > 0.3
    weights = attention_weights(q, k, grid, encodings, keys=keys, mask=mask)
    out = attention(q, k, v, grid, encodings, keys=keys, mask=mask, backend="reference")
    torch.testing.assert_close(weights @ v, out)
