"""`whereformer resize`: checkpoints at another size."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import whereformer
from test_cli import call
from whereformer.adapters import convert
from whereformer.adapters.resize_weights import RESIZE_KEY
from whereformer.resample import RECIPES

TINY = {"num_classes": 3, "depth": 1, "embed_dim": 24, "num_heads": 2}


def vit(size: Any = 64) -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=size, **TINY)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "vit.safetensors"
    save_file(vit().state_dict(), path, {"format": "pt"})
    return path


def test_it_is_what_resizing_the_model_gives(capsys, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    code, shown, _ = call(capsys, "resize", str(saved), "--to", "96x48", "--out", str(out))
    assert code == 0
    assert "1x17x24" in shown
    assert "1x19x24" in shown
    found = load_file(out)
    expected = whereformer.resize(vit(), image_size=(96, 48)).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    vit((96, 48)).load_state_dict(found)
    with safe_open(out, "pt") as file:
        notes = file.metadata()
    assert notes["format"] == "pt"
    said = json.loads(notes[RESIZE_KEY])
    assert said["image_size"] == {"from": [64, 64], "to": [96, 48]}
    assert [(t["key"], t["recipe"]) for t in said["tables"]] == [("pos_embed", "timm")]
    assert [path.name for path in tmp_path.iterdir()] != [], "nothing unfinished is left"
    assert {path.name for path in tmp_path.iterdir()} == {"vit.safetensors", "new.safetensors"}


def test_what_lies_beside_the_weights_stays(capsys, tmp_path: Path) -> None:
    """Averages are resized too; arguments, counters and optimizers are as they were."""
    source, out = tmp_path / "run.pth", tmp_path / "new.pth"
    weights, beside = vit().state_dict(), {"lr": torch.tensor(0.1), "steps": [1, 2]}
    arguments = argparse.Namespace(model="deit")
    torch.save({"model": weights, "model_ema": dict(weights), "optimizer": beside, "args": arguments}, source)
    code, shown, _ = call(
        capsys, "resize", str(source), "--to", "96", "--recipe", "dinov2", "--out", str(out), "--json"
    )
    assert code == 0
    assert json.loads(shown)["recipe"] == "dinov2"
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(out, weights_only=True)
    rows = weights["pos_embed"][0, 1:].unflatten(0, (4, 4))
    expected = RECIPES["dinov2"].read(rows, (6, 6)).flatten(0, 1)
    for part in ("model", "model_ema"):
        assert torch.equal(found[part]["pos_embed"][0, 1:], expected)
        assert torch.equal(found[part]["pos_embed"][0, :1], weights["pos_embed"][0, :1])
        assert all(torch.equal(found[part][key], value) for key, value in weights.items() if key != "pos_embed")
    assert found["optimizer"] == beside
    assert found["args"] == arguments


def test_windows_and_what_follows_from_them(capsys, tmp_path: Path) -> None:
    table, key = torch.randn(49, 2), "layers.0.blocks.0.attn.relative_position_bias_table"
    index = "layers.0.blocks.0.attn.relative_position_index"
    weights = {key: table, index: torch.zeros(16, 16), "patch_embed.proj.weight": torch.randn(8, 3, 4, 4)}
    source, out = tmp_path / "swin.pth", tmp_path / "new.pth"
    torch.save(weights, source)
    options = ("resize", str(source), "--from", "64", "--to", "128", "--out", str(out))
    code, _, mistake = call(capsys, *options)
    assert code == 2
    assert "windows of (4, 4) stay, unless --window changes them" in mistake
    assert not out.exists()
    code, shown, _ = call(capsys, *options, "--window", "8")
    assert code == 0
    assert f"dropped {index}" in shown
    found = torch.load(out, weights_only=True)
    assert found.keys() == {key, "patch_embed.proj.weight"}
    expected = RECIPES["geometric"].read(table.unflatten(0, (7, 7)), (15, 15)).flatten(0, 1)
    assert torch.equal(found[key], expected)


def test_patch_kernels(capsys, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    options = ("--to", "64", "--patch", "16", "--new-patch", "8", "--out", str(out))
    assert call(capsys, "resize", str(saved), *options)[0] == 0
    expected = whereformer.resize(vit(), image_size=64, patch_size=8).state_dict()
    found = load_file(out)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "100"), "--to 100x100, expected multiples of the patches' 16x16"),
        (("--to", "96", "--from", "100"), "--from 100x100, expected multiples"),
        (("--to", "96x64x32"), "'96x64x32', expected a number, or HEIGHTxWIDTH"),
        (
            ("--to", "96", "--from", "128"),
            "pos_embed [1, 17, 24]: its rows, less the prefix tokens', are no square, nor",
        ),
        (("--to", "96", "--recipe", "dino"), "invalid choice: 'dino'"),
        (("--to", "96", "--new-patch", "8"), "expected --patch too"),
    ],
)
def test_mistakes_are_one_line(capsys, saved: Path, options: tuple[str, ...], message: str) -> None:
    out = saved.with_name("new.safetensors")
    code, shown, mistake = call(capsys, "resize", str(saved), "--out", str(out), *options)
    assert (code, shown) == (2, "")
    assert message in mistake
    assert mistake.count("\n") == 1
    assert not out.exists()


def test_files_that_cannot_be_resized(capsys, tmp_path: Path) -> None:
    out = str(tmp_path / "new.pth")
    cases: list[tuple[Any, str]] = [
        ({"fc.weight": torch.zeros(2, 2)}, "holds no table of places or offsets"),
        ({"pos_embed": torch.zeros(1, 61, 8), "patch_embed.proj.weight": torch.zeros(8, 3, 16, 16)}, "--from"),
        ({"pos_embed": torch.zeros(1, 0, 8)}, "pos_embed has shape (1, 0, 8), without numbers"),
        ([1, 2], "holds a list, expected a state dict"),
    ]
    for number, (content, message) in enumerate(cases):
        path = tmp_path / f"{number}.pth"
        torch.save(content, path)
        code, _, mistake = call(capsys, "resize", str(path), "--to", "96", "--out", out)
        assert code == 2
        assert message in mistake
    path = tmp_path / "equipped.safetensors"
    save_file(vit().state_dict(), path, {"whereformer.encoding": "Learned()"})
    assert (
        "load it into the model, and resize that"
        in call(capsys, "resize", str(path), "--to", "96", "--out", out)[2]
    )
    assert "is the checkpoint itself" in call(capsys, "resize", str(path), "--to", "96", "--out", str(path))[2]
    assert call(capsys, "resize", str(tmp_path / "none.pth"), "--to", "96", "--out", out)[0] == 2


def test_a_file_that_fails_leaves_the_old_one(capsys, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = saved.with_name("new.pth")
    out.write_bytes(b"old")

    def fail(content: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    code, _, mistake = call(capsys, "resize", str(saved), "--to", "96", "--out", str(out))
    assert (code, mistake) == (2, f"whereformer: error: No space left on device: {out}\n")
    assert out.read_bytes() == b"old"
    assert {path.name for path in saved.parent.iterdir()} == {"vit.safetensors", "new.pth"}


def test_what_may_be_one_grid_or_another_is_asked_for(capsys, tmp_path: Path) -> None:
    source, out = tmp_path / "wide.pth", str(tmp_path / "new.pth")
    torch.save(vit((96, 128)).state_dict(), source)  # 1 + 6 x 8 rows, or 7 x 7
    mistake = call(capsys, "resize", str(source), "--to", "64", "--out", out)[2]
    assert "7 x 7 patches, or others and rows for cls_token: give the size, --from" in mistake
    assert call(capsys, "resize", str(source), "--from", "96x128", "--to", "64", "--out", out)[0] == 0
    vit(64).load_state_dict(torch.load(out, weights_only=True))
    assert (
        "no tables of windows"
        in call(capsys, "resize", str(source), "--from", "96x128", "--to", "64", "--window", "7", "--out", out)[2]
    )
    torch.save(whereformer.equip(vit(), "learned + irpe").state_dict(), source)
    assert "weights of an equipped model" in call(capsys, "resize", str(source), "--to", "96", "--out", out)[2]
    assert (
        "expected a file that ends in" in call(capsys, "resize", str(source), "--to", "96", "--out", "new.foo")[2]
    )


def test_sharded_weights(capsys, saved: Path, tmp_path: Path) -> None:
    folder, one, several = tmp_path / "sharded", tmp_path / "one.safetensors", tmp_path / "several.safetensors"
    folder.mkdir()
    convert(saved, folder / "model.safetensors", shard=20_000)
    assert len(list(folder.iterdir())) > 3
    for source, out in ((saved, one), (folder, several)):
        assert call(capsys, "resize", str(source), "--to", "96", "--out", str(out))[0] == 0
    found, expected = load_file(several), load_file(one)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_help_shows_examples(capsys) -> None:
    code, shown, _ = call(capsys, "resize", "--help")
    assert code == 0
    assert "examples:" in shown
