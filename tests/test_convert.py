"""`convert` and `inspect`: a file of any layout becomes one of another, and says what it is."""

import argparse
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from official import CASES, VIT, randomised
from whereformer import InputError, equip, load_checkpoint
from whereformer.adapters import convert, inspect
from whereformer.adapters.convert import RECIPE_KEY, plan
from whereformer.adapters.files import _Shelf
from whereformer.cli import main

ENCODING = "learned + irpe(on='qk')"


def irpe() -> nn.Module:
    return equip(timm.create_model("deit_tiny_patch16_224"), ENCODING).eval()


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> tuple[Path, nn.Module]:
    """A file as the iRPE repository has them, and the model it is of."""
    torch.manual_seed(0)
    model = irpe()
    randomised(model)
    state = {}
    for name, value in model.state_dict().items():
        if name == "encodings.0.table":
            name, value = "pos_embed", value[None]
        state[re.sub(r"encodings\.0\.tables\.([qk])", r"rpe_\1.lookup_table_weight", name)] = value
    path = tmp_path_factory.mktemp("released") / "deit_tiny.pth"
    torch.save({"model": state, "args": argparse.Namespace(lr=1e-3), "epoch": 299}, path)
    return path, model


def recipe(path: Path) -> dict:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[RECIPE_KEY])


def test_there_and_back(released, tmp_path):
    path, model = released
    made = convert(path, tmp_path / "ours.safetensors", to="ours")
    assert made.layout is not None
    assert made.layout.name == "irpe-deit"
    assert len(made.steps) == 1 + 2 * 12
    ours = load_file(tmp_path / "ours.safetensors")
    assert ours.keys() == model.state_dict().keys()
    assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())
    said = recipe(tmp_path / "ours.safetensors")
    assert said == {
        "layout": "irpe-deit",
        "to": "ours",
        "architecture": "deit_tiny_patch16_224",
        "arguments": {},
        "encoding": ENCODING,
        "grid": [14, 14],
        "prefix": 1,
        "prefix_rows": 1,
        "resize": "deit",
        "part": "model",
    }
    other = equip(timm.create_model(said["architecture"], **said["arguments"]), said["encoding"]).eval()
    load_checkpoint(other, tmp_path / "ours.safetensors")
    image = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        assert torch.equal(other(image), model(image))
    biased = equip(timm.create_model("deit_tiny_patch16_224"), "learned + irpe(on='qk', mode='bias')")
    with pytest.raises(InputError, match=r"written for .*IRPE.*, but the model has .*mode='bias'"):
        load_checkpoint(biased, tmp_path / "ours.safetensors")

    convert(tmp_path / "ours.safetensors", tmp_path / "official.safetensors", to="irpe-deit")
    official = torch.load(path, weights_only=False)["model"]
    back = load_file(tmp_path / "official.safetensors")
    assert back.keys() == official.keys()
    assert all(torch.equal(back[name], value) for name, value in official.items())
    load_checkpoint(irpe(), tmp_path / "official.safetensors")


def test_nothing_is_read_to_see_and_to_plan(released, monkeypatch):
    def never(*arguments):
        raise AssertionError("read")

    monkeypatch.setattr(_Shelf, "_read", never)
    found = inspect(released[0])
    assert found.layout is not None
    assert (found.layout.name, found.encoding, found.grid) == ("irpe-deit", ENCODING, (14, 14))
    assert (found.prefix_tokens, found.prefix_rows, found.part) == (1, 1, "model")
    best = found.models[0]
    assert (best.name, best.encoding, best.fits) == ("deit_tiny_patch16_224", ENCODING, True)
    assert found.parameters == sum(p.numel() for p in released[1].parameters())
    assert found.dtypes == {"float32": 176}
    assert {table.kind for table in found.tables} == {"absolute", "kernel"}
    json.dumps(found.to_dict())


def test_metadata_is_kept_and_extended(tmp_path):
    state = timm.create_model("test_vit").state_dict()
    save_file(state, tmp_path / "a.safetensors", metadata={"author": "me", "format": "np"})
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')  # as timm's hub has it
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata()["author"] == "me"
        assert file.metadata()["format"] == "pt"
    said = recipe(tmp_path / "b.safetensors")
    assert (said["architecture"], said["layout"], said["encoding"]) == ("test_vit", "timm", "none")
    again = inspect(tmp_path / "b.safetensors")
    assert [match.name for match in again.models] == ["test_vit"]
    assert again.steps == ()


def test_a_model_of_timms_hub_names_itself(tmp_path):
    state = timm.create_model("test_vit", num_classes=7).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    (match,) = inspect(tmp_path).models
    assert (match.name, match.arguments, match.fits) == ("test_vit", {"num_classes": 7}, True)


def test_derived_buffers_are_left_out_and_told(tmp_path):
    case = CASES["swin"]
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=3)
    state = {**case.official(model.state_dict()), **case.besides}
    made = convert(state, tmp_path / "swin.safetensors")
    assert load_file(tmp_path / "swin.safetensors").keys() == model.state_dict().keys()
    found = inspect(state)
    assert set(found.dropped) == case.besides.keys()
    assert found.models[0].name == "swin_tiny_patch4_window7_224"
    assert {table.grid for table in found.tables if table.kind == "bias"} == {(7, 7)}
    lines = list(made.lines())
    assert any("relative_position_index" in line and "follows from the size" in line for line in lines)
    assert "layers.0.downsample.norm.weight 384 -> layers.1.downsample.norm.weight 384   (and 2 like it)" in lines


def test_a_model_of_no_known_size_is_told_what_does_not_fit():
    case = CASES["twins"]
    found = inspect(case.model().state_dict())
    assert found.layout is not None
    assert found.layout.name == "twins"
    assert not found.models[0].fits
    assert any(line.startswith("head.weight: (5, 8)") for line in found.models[0].problems)


def test_what_an_equipped_model_saved_without_saying_what_it_is(tmp_path):
    model = equip(timm.create_model("test_vit"), "learned")
    torch.save(model.state_dict(), tmp_path / "m.pth")
    found = inspect(tmp_path / "m.pth")
    assert (found.equipped, found.models, found.encoding) == (True, (), "unknown")
    with pytest.raises(InputError, match="does not say of which"):
        convert(tmp_path / "m.pth", tmp_path / "n.safetensors")


def test_other_models_are_copied_as_they_are(tmp_path):
    state = {"conv1.weight": torch.randn(3, 3), "fc.bias": torch.randn(3)}
    made = convert(state, tmp_path / "n.safetensors")
    assert (made.layout, made.models, made.steps) == (None, (), ())
    assert all(torch.equal(value, state[name]) for name, value in load_file(tmp_path / "n.safetensors").items())


def test_what_cannot_be(tmp_path, released):
    detr = {
        "transformer.encoder.layers.0.self_attn.in_proj_weight": torch.zeros(6, 2),
        "query_embed.weight": torch.zeros(2, 2),
    }
    assert list(plan(detr).entries)[:3] == [f"model.encoder.layers.0.self_attn.{s}_proj.weight" for s in "qkv"]
    twins = CASES["twins"].model().state_dict()
    for source, to, words in (
        (detr, "ours", "a model that timm does not have (irpe-detr)"),
        (twins, "ours", "fits no timm model with 'peg'"),
        (twins, "swin2", "to='swin2', expected one of ['timm', 'ours', 'irpe-deit'"),
        (released[0], "sam", "to='sam': the checkpoint is of a model of another kind"),
        (released[0], "dinov2-reg", "of another kind"),
    ):
        with pytest.raises(InputError) as error:
            convert(source, tmp_path / "n.safetensors", to=to)
        assert words in str(error.value)
    with pytest.raises(InputError, match=r"ends in \.safetensors"):
        convert(detr, tmp_path / "n.pth")
    save_file(twins, tmp_path / "t.safetensors", metadata={RECIPE_KEY: "[1"})
    with pytest.raises(InputError, match="is not JSON of an object"):
        inspect(tmp_path / "t.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_a_table_of_another_grid_says_which():
    model = timm.create_model("vit_small_patch16_224", **{**VIT, "img_size": 48})
    with pytest.raises(InputError) as error:
        load_checkpoint(model, timm.create_model("vit_small_patch16_224", **VIT).state_dict())
    told = "pos_embed: (1, 17, 48) (4 x 4 and 1 without a place), but the model has (1, 37, 48) (6 x 6 and 1"
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("case", "name", "encoding"),
    [
        ("rope-vit-mixed", "vit_small_patch16_rope_mixed_224", "rope_mixed"),
        ("dinov2, with registers", "vit_small_patch14_reg4_dinov2", "learned(prefix_rows=False, antialias=False)"),
        ("sam", "samvit_base_patch16", "learned + decomposed"),
        ("mmpretrain-swin", "swin_tiny_patch4_window7_224", "swin"),
    ],
)
def test_models_of_real_size_are_found(case, name, encoding):
    """By names and shapes alone: there is no memory behind these."""
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
        official = CASES[case].official(state)
    if case.startswith("dinov2"):
        official = {k: v for k, v in official.items() if k != "pos_embed"} | {
            "pos_embed": torch.empty(1, 1370, 384, device="meta"),
            "mask_token": torch.empty(1, 384, device="meta"),
        }
    found = plan(official)
    assert (found.models[0].name, found.models[0].arguments, found.models[0].fits) == (name, {}, True)
    assert found.recipe["encoding"] == encoding
    assert {key: entry.shape for key, entry in found.entries.items()} == {k: v.shape for k, v in state.items()}
    if case == "rope-vit-mixed":
        ours = plan(official, to="ours")
        assert (
            str(ours.models[0]) == "whereformer.equip(timm.create_model('deit3_small_patch16_224'), 'rope_mixed')"
        )


# The commands


def call(capsys, *arguments) -> tuple[int, str, str]:
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_commands(capsys, released, tmp_path):
    path, _ = released
    code, out, _ = call(capsys, "inspect", path)
    assert code == 0
    for word in (
        "irpe-deit: microsoft/Cream",
        ENCODING,
        "14 x 14",
        "5,794,216",
        "timm.create_model('deit_tiny_patch16",
    ):
        assert word in out
    code, out, error = call(capsys, "convert", path, "--out", tmp_path / "new.safetensors", "--shard", "9MB")
    assert (code, error) == (0, "")
    assert "irpe-deit -> timm: 176 tensors, 23.2 MB, 0 changes; written: " in out
    assert len(list(tmp_path.glob("new-*-of-00003.safetensors"))) == 3
    code, out, _ = call(capsys, "inspect", tmp_path / "new.safetensors", "--json")
    said = json.loads(out)
    assert said["layout"]["name"] == "irpe-deit"
    assert said["metadata"][RECIPE_KEY]
    code, out, _ = call(
        capsys,
        "convert",
        tmp_path / "new.safetensors",
        "--out",
        tmp_path / "o.safetensors",
        "--to",
        "ours",
        "--json",
    )
    said = json.loads(out)
    assert said["files"] == [str(tmp_path / "o.safetensors")]
    assert {"pos_embed": [1, 197, 192]} in [change["before"] for change in said["changes"]]


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_help(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"whereformer {command}" in out.partition("examples:")[2]


MISTAKES = {
    "no file": ["inspect", "nowhere.pth"],
    "nothing": ["inspect"],
    "no out": ["convert", "text.pth"],
    "no weights": ["convert", "text.pth", "--out", "n.safetensors"],
    "another ending": ["convert", "zeros.pth", "--out", "n.pth"],
    "no such layout": ["convert", "zeros.pth", "--out", "n.safetensors", "--to", "nonsense"],
    "no such part": ["inspect", "zeros.pth", "--part", "nonsense"],
    "size": ["convert", "zeros.pth", "--out", "n.safetensors", "--shard", "-5GB"],
    "size in words": ["convert", "zeros.pth", "--out", "n.safetensors", "--shard", "large"],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_costs_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("text.pth").write_text("no weights")
    torch.save({"model": {"a": torch.zeros(2)}}, "zeros.pth")
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("whereformer: error: ")
    assert not list(tmp_path.glob("n*"))


def test_a_torch_file_of_an_equipped_model_shows_what_its_encodings_learn(tmp_path, capsys):
    model = equip(timm.create_model("test_vit"), "learned + irpe")
    torch.save(model.state_dict(), tmp_path / "equipped.pth")
    found = inspect(tmp_path / "equipped.pth")
    learned = {name: tuple(p.shape) for name, p in model.named_parameters() if ".encodings." in f".{name}"}
    assert (found.equipped, found.encodings, found.prefix_tokens) == (True, learned, 1)
    main(["inspect", str(tmp_path / "equipped.pth")])
    shown = capsys.readouterr().out
    assert "the file does not say it" in shown
    assert "blocks.0.attn.encodings.0.tables.k ... blocks.5.attn.encodings.0.tables.k (6)" in shown


def test_weights_of_another_width_are_not_taken_for_another_size():
    other = timm.create_model("test_vit2").state_dict()
    wide = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
    with pytest.raises(InputError, match="does not fit the model") as raised:
        load_checkpoint(wide, other)
    assert "another size" not in str(raised.value)
