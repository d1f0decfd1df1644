"""`load_checkpoint`: the released layout, our own files, and everything that does not fit."""

import argparse
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file, save_model

from whereformer import InputError, equip, load_checkpoint
from whereformer.adapters.checkpoint import metadata

DATA = Path(__file__).parent / "data"
CASES = {
    name.removeprefix("deit/"): case
    for name, case in json.loads((DATA / "irpe_models_reference.json").read_text()).items()
    if name.startswith("deit/")
}
TENSORS = load_file(DATA / "irpe_models_reference.safetensors")


def released(case: str) -> dict[str, torch.Tensor]:
    start = f"deit/{case}/state/"
    return {name.removeprefix(start): value for name, value in TENSORS.items() if name.startswith(start)}


def deit(case: str) -> timm.models.VisionTransformer:
    size = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "num_classes")
    model = timm.create_model("deit_tiny_patch16_224", **{name: CASES[case][name] for name in size})
    asked = CASES[case]
    text = f"rpe-{asked['ratio']}-{asked['method']}-{asked['mode']}-{int(asked['shared_head'])}-{asked['on']}"
    return equip(model, f"learned + {text}").double().eval()


def test_there_are_four_released_models():
    assert len(CASES) == 4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "wrap", [dict, lambda s: {"model": s}, lambda s: {f"module.{k}": v for k, v in s.items()}]
)
def test_released_models_give_their_logits(case, wrap):
    model = deit(case)
    assert load_checkpoint(model, wrap(released(case))) is model
    logits = model(TENSORS[f"deit/{case}/image"])
    torch.testing.assert_close(logits, TENSORS[f"deit/{case}/logits"], rtol=0, atol=1e-10)


def test_released_files_with_their_training_arguments(tmp_path):
    case = next(iter(CASES))
    content = {"model": released(case), "args": argparse.Namespace(lr=1e-3), "epoch": 299}
    torch.save(content, tmp_path / "released.pth")
    model = load_checkpoint(deit(case), tmp_path / "released.pth")
    logits = model(TENSORS[f"deit/{case}/image"])
    torch.testing.assert_close(logits, TENSORS[f"deit/{case}/logits"], rtol=0, atol=1e-10)


def small(text: str, **options: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3
    )
    model = equip(model, text, **options).eval()
    for name, parameter in model.named_parameters():
        if ".encodings." in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("kind", ["safetensors", "pth", "dict"])
def test_our_own_files(tmp_path, kind):
    model, image = small("learned + irpe(on='qkv')"), torch.randn(1, 3, 32, 32)
    source = tmp_path / f"model.{kind}"
    if kind == "safetensors":
        save_file(model.state_dict(), source, metadata=metadata(model))
    elif kind == "pth":
        torch.save(model.state_dict(), source)
    else:
        source = model.state_dict()
    other = equip(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2,
                                    num_heads=3), "learned + irpe(on='qkv')").eval()  # fmt: skip
    torch.testing.assert_close(load_checkpoint(other, source)(image), model(image))


def test_a_model_that_kept_its_own_table_has_two():
    def make() -> torch.nn.Module:
        return equip(timm.create_model("test_vit", num_classes=3), "learned", keep_own=True)

    model, other = make(), make()
    load_checkpoint(other, model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def refuse(model, source, *words):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as error:
        load_checkpoint(model, source)
    for word in words:
        assert word in str(error.value)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_all_that_is_wrong_is_named_in_one_error_and_nothing_is_loaded():
    model = small("learned + irpe")
    weights = {name: value + 1 for name, value in model.state_dict().items()}
    weights["stranger"] = weights.pop("norm.weight")
    weights["head.bias"] = torch.zeros(7)
    refuse(model, weights, "missing: norm.weight", "unexpected: stranger", "head.bias: (7,)", "(1000,)", "nothing")


def test_same_shapes_but_another_ratio_is_noticed(tmp_path):
    other = small("irpe(ratio=1.5)")
    save_file(other.state_dict(), tmp_path / "other.safetensors", metadata=metadata(other))
    refuse(small("irpe"), tmp_path / "other.safetensors", "alpha=1.5", "alpha=1.9")
    load_checkpoint(small("irpe(ratio=1.5, mode='ctx')"), tmp_path / "other.safetensors")


def test_a_plain_timm_checkpoint_does_not_fit_an_equipped_model():
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3
    )
    refuse(
        small("irpe"), plain.state_dict(), "missing: blocks.0.attn.encodings.0.tables.k", "unexpected: pos_embed"
    )


def test_a_table_of_another_grid_is_named():
    case = "product-1.9-ctx-shared-k"
    weights = released(case)
    weights["pos_embed"] = torch.zeros(1, 50, 24)
    refuse(deit(case), weights, "encodings.0.table: (50, 24)", "(17, 24)")


def test_files_that_are_no_weights(tmp_path):
    model = small("irpe")
    (tmp_path / "text.pth").write_text("not a checkpoint")
    (tmp_path / "text.safetensors").write_text("not a checkpoint")
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "junk.pth").write_bytes(b"hello" * 99)
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"model": {"a": 1}}, tmp_path / "number.pth")
    for name, word in [("text.pth", "safely"), ("text.safetensors", "not a safetensors"), ("empty.pth", "safely"),
                       ("junk.pth", "safely"),
                       ("list.pth", "holds a list"), ("number.pth", "'a' is a int")]:  # fmt: skip
        refuse(model, tmp_path / name, word)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(model, tmp_path / "nowhere.pth")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(model, tmp_path / "nowhere.safetensors")


class Malicious:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_nothing_in_a_file_is_run(tmp_path, capsys):
    torch.save({"model": Malicious()}, tmp_path / "bad.pth")
    refuse(small("irpe"), tmp_path / "bad.pth", "safely")
    assert capsys.readouterr().out == ""


def test_a_model_without_memory_is_refused():
    with torch.device("meta"):
        model = small("learned")
    with pytest.raises(InputError, match="meta device"):
        load_checkpoint(model, small("learned").state_dict())


def test_wrapped_models_and_other_sources_are_refused():
    with pytest.raises(InputError, match="_orig_mod"):
        load_checkpoint(torch.compile(small("irpe")), {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="source=3"):
        load_checkpoint(small("irpe"), 3)  # pyright: ignore[reportArgumentType]


def test_an_unequipped_model_is_refused():
    with pytest.raises(InputError, match="not equipped"):
        load_checkpoint(timm.create_model("test_vit"), {})


def test_what_blocks_share_is_loaded_from_either_name(tmp_path):
    model, path = small("learned + irpe", share=True), tmp_path / "shared.safetensors"
    save_model(model, str(path))
    again = small("learned + irpe", share=True)
    torch.nn.init.zeros_(again.blocks[0].attn.encodings[0].tables["k"])
    load_checkpoint(again, path)
    assert torch.equal(
        again.blocks[1].attn.encodings[0].tables["k"], model.blocks[0].attn.encodings[0].tables["k"]
    )
    apart = small("learned + irpe").state_dict()
    apart["blocks.1.attn.encodings.0.tables.k"] = torch.randn_like(apart["blocks.1.attn.encodings.0.tables.k"])
    with pytest.raises(InputError, match="differ, but the model has one for both"):
        load_checkpoint(again, apart)
