"""Detectors from folders and files give what the model that was written gives, under any data's numbering."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

import boxed
from detectors import data, official, published, sure_of, tiny
from official import randomised
from whereformer import InputError, equip
from whereformer.lab.detect.augment import Augmentation
from whereformer.lab.detect.boxes import Category
from whereformer.lab.detect.dataset import BoxedImages
from whereformer.lab.detect.detector import Detector, coco_names
from whereformer.lab.detect.evaluate import evaluate
from whereformer.lab.detect.images import images
from whereformer.lab.detect.predict import predictions


def batch() -> tuple[Tensor, Tensor]:
    """Images of two sizes, neither square, in one padded batch."""
    torch.manual_seed(1)
    pixels, real = torch.zeros(2, 3, 96, 160), torch.zeros(2, 96, 160, dtype=torch.bool)
    for row, (height, width) in enumerate([(64, 160), (96, 130)]):
        pixels[row, :, :height, :width] = torch.randn(3, height, width)
        real[row, :height, :width] = True
    return pixels, real


@torch.inference_mode()
def outputs(model: Any) -> tuple[Tensor, Tensor]:
    pixels, real = batch()
    out = model(pixels.to(next(model.parameters()).dtype), pixel_mask=real)
    assert out.logits.std() > 0.01
    return out.logits, out.pred_boxes


def same(model: Any, other: Any) -> None:
    for ours, theirs in zip(outputs(model), outputs(other), strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------------------------------------------------------
# Official files.

METHODS = {
    "rpe-2.0-product-ctx-1-k": "irpe(ratio=2)",
    "rpe-1.9-product-ctx-0-qkv": "irpe(shared=False, on='qkv')",
    "rpe-20-cross-ctx-1-k": "irpe(method='cross', ratio=20)",
    "rpe-20-euc-ctx-1-kv": "irpe(method='euclidean', ratio=20, on='kv')",
    "rpe-33-quant-ctx-1-qk": "irpe(method='quantization', ratio=33, on='qk')",
    "rpe-2.5-product-bias-0-k": "irpe(mode='bias', shared=False, ratio=2.5)",
}
"""The official option and our encoding."""


@pytest.mark.parametrize("option", METHODS)
def test_official_files_give_what_they_came_from(tmp_path, option):
    model = equip(published(), METHODS[option], keep_own=True)
    randomised(model.model.encoder.layers[0].self_attn.encodings[0])
    file = tmp_path / "last.pth"
    torch.save({"model": official(model), "epoch": 3, "args": Namespace(lr=1e-4)}, file)
    found = Detector.load(file, encoding=f"detr_sine + {option}")
    assert found.by == "id"
    same(found.model, model)
    assert found.model.config.encoder_attention_heads == 3
    # the options that the training kept in its file say the same
    torch.save({"model": official(model), "args": Namespace(enc_rpe2d=option, nheads=3)}, file)
    told = Detector.load(file)
    assert option in told.facts["encoding"]
    same(told.model, model)


def test_what_the_weights_do_not_tell_is_said(tmp_path):
    file = tmp_path / "x.pth"
    torch.save({"model": official(equip(published(), "irpe(ratio=2)", keep_own=True))}, file)
    facts = Detector.load(file).facts
    assert facts["encoding"].startswith("detr_sine + irpe(ratio=2) (tables of (1, 8, 81)")
    assert "assumed" in facts["encoding"]
    plain = published()
    torch.save(official(plain), file)
    found = Detector.load(file)
    assert "8 heads (assumed" in found.facts["model"]
    assert found.facts["encoding"].startswith("detr_sine (the weights")
    assert not torch.equal(outputs(found.model)[0], outputs(plain)[0])  # its three heads are not eight
    torch.save({"model": official(plain), "args": Namespace(nheads=3, enc_rpe2d="")}, file)
    same(Detector.load(file).model, plain)


def test_learned_positions_of_official_files(tmp_path):
    file = tmp_path / "x.pth"
    model = equip(published(position_embedding_type="learned"), "irpe(shared=False)", keep_own=True)
    torch.save({"model": official(model)}, file)
    found = Detector.load(file)
    assert found.facts["encoding"].startswith("detr_learned + irpe(shared=False)")
    same(found.model, model)


def test_models_with_dilation(tmp_path):
    """DC5: the weights are those of another model."""
    file = tmp_path / "x.pth"
    model = published(dilation=True)
    state = official(model)
    torch.save({"model": state, "args": Namespace(nheads=3, dilation=True)}, file)
    told = Detector.load(file)
    same(told.model, model)
    assert "stride 16" in told.facts["model"]
    torch.save({"model": state, "args": Namespace(nheads=3)}, file)
    same(Detector.load(file, dilation=True).model, model)
    assumed = Detector.load(file)
    assert "stride 32 (assumed" in assumed.facts["model"]
    assert not torch.equal(outputs(assumed.model)[0], outputs(model)[0])


DATA = Path(__file__).parent / "data"
RELEASED = json.loads((DATA / "irpe_models_reference.json").read_text())


@pytest.mark.parametrize("name", [name for name in RELEASED if name.startswith("detr/")])
def test_encoder_attention_is_that_of_the_released_code(tmp_path, name):
    """A whole official file in float64 with the attention of the reference, loaded as the command loads it."""
    case = RELEASED[name]
    values = load_file(DATA / "irpe_models_reference.safetensors")
    t = {key.removeprefix(name + "/"): value for key, value in values.items() if key.startswith(name + "/")}
    state = {key: value.double() for key, value in official(published()).items()}
    layer = "transformer.encoder.layers.0.self_attn."
    state |= {key.replace("state/", layer): value for key, value in t.items() if key.startswith("state/")}
    torch.save({"model": state}, tmp_path / "x.pth")
    model: Any = Detector.load(tmp_path / "x.pth").model
    attention, real = model.model.encoder.layers[0].self_attn, ~t["mask"]
    assert not real.all()
    assert case["height"] != case["width"]
    shape = torch.Size([2, 24, case["height"], case["width"]])
    model.model.position_embedding(shape, "cpu", torch.float64, mask=real)  # tells the grid
    out, weights = attention(
        t["src"].transpose(0, 1),
        attention_mask=real.flatten(1)[:, None, None].expand(-1, 1, real[0].numel(), -1),
        position_embeddings=t["pos"].transpose(0, 1),
        output_attentions=True,
    )
    torch.testing.assert_close(out.transpose(0, 1), t["output"], rtol=0, atol=1e-10)
    torch.testing.assert_close(weights.mean(1), t["weights"], rtol=0, atol=1e-10)


def test_files_that_are_no_detr(tmp_path):
    torch.save({"x": torch.zeros(2)}, tmp_path / "x.pth")
    torch.save(
        {"model": {**official(published()), "transformer.encoder.norm.weight": torch.zeros(24)}},
        tmp_path / "n.pth",
    )
    state = official(published())
    deeper = {**state, "backbone.0.body.layer1.2.conv1.weight": state["backbone.0.body.layer1.1.conv1.weight"]}
    torch.save({"model": deeper}, tmp_path / "d.pth")
    for file, says in (
        ("x.pth", "holds no DETR"),
        ("n.pth", "--pre_norm"),
        ("d.pth", "(3, 2, 2, 2)"),
        ("no", "expected"),
    ):
        with pytest.raises(InputError) as error:
            Detector.load(tmp_path / file)
        assert says in str(error.value)
    torch.save({"model": state}, tmp_path / "x.pth")
    with pytest.raises(InputError, match="does not fit"):
        Detector.load(tmp_path / "x.pth", encoding="detr_sine + irpe")


# ---------------------------------------------------------------------------------------------------------------
# Folders of transformers.


@pytest.mark.parametrize("kind", ["Detr", "ConditionalDetr"])
@pytest.mark.parametrize("encoding", [None, "irpe(on='qkv')", "learned + rope_axial"])
def test_folders_of_transformers(tmp_path, kind, encoding):
    model = tiny(kind, num_labels=2, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    if encoding:
        equip(model, encoding, keep_own="learned" not in encoding)
        randomised(model)
    model.save_pretrained(tmp_path)
    getattr(hf, f"{kind}ImageProcessor")(size={"shortest_edge": 64, "longest_edge": 100}).save_pretrained(tmp_path)
    found = Detector.load(tmp_path)
    same(found.model, model)
    assert found.augmentation == Augmentation(shorter=(64,), longest=100)
    assert found.categories == [Category(0, "cat"), Category(1, "dog")]
    assert (found.facts["encoding"] == "detr_sine") == (encoding is None)
    with pytest.raises(InputError, match="says itself"):
        Detector.load(tmp_path, encoding="irpe")


def test_folders_that_do_not_fit(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(says: str, **changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InputError) as error:
            Detector.load(tmp_path)
        assert says in str(error.value)
        assert "\n" not in str(error.value)

    refused("is a 'vit'", model_type="vit")
    refused("cannot be loaded", model_type="nothing")
    refused("does not fit its config.json", num_queries=9)
    hf.DetrImageProcessor(image_mean=[0.5, 0.5, 0.5]).save_pretrained(tmp_path)
    refused("'mean': (0.5, 0.5, 0.5)")
    with pytest.raises(InputError, match="expected a file"):
        Detector.load(tmp_path / "x")
    with pytest.raises(InputError, match="neither the folder of a run, nor one of transformers"):
        Detector.load(tmp_path.parent)


# ---------------------------------------------------------------------------------------------------------------
# What labels mean.

COCO = {1: "person", 18: "dog", 90: "toothbrush"}


@pytest.mark.parametrize(("label", "category"), [(1, 1), (18, 18), (90, 90), (12, None), (17, None), (0, None)])
def test_labels_of_official_files_are_cocos_numbers(tmp_path, label, category):
    """Of 92 logits the last is "no object"; 12 is no category of COCO, and 17 none of these images."""
    truth = data(tmp_path / "coco", COCO)
    torch.save({"model": official(sure_of(published(91), label))}, tmp_path / "x.pth")
    rows = Detector.load(tmp_path / "x.pth").looking_at(64).predict(truth, batch_size=2)
    assert {row["category_id"] for row in rows} == ({category} if category else set())
    assert len(rows) == (4 * 3 if category else 0)
    evaluate(truth, rows)


def test_official_files_of_other_sizes_go_by_the_numbers_of_the_data(tmp_path):
    torch.save({"model": official(sure_of(published(5), 3))}, tmp_path / "x.pth")
    detector = Detector.load(tmp_path / "x.pth").looking_at(64)
    rows = detector.predict(data(tmp_path / "a", {1: "x", 3: "y"}))
    assert {row["category_id"] for row in rows} == {3}
    with pytest.raises(InputError, match="none of the 5 that the detector knows, 0, 1, 2, 3, 4"):
        detector.predict(data(tmp_path / "b", {7: "x"}))


def test_named_labels_go_by_name_and_others_by_number(tmp_path):
    """The numbers of the data are not those of the model, and its order is another."""
    for folder, names in (("named", {0: "cat", 1: "dog"}), ("unnamed", {0: "LABEL_0", 1: "LABEL_1"})):
        sure_of(tiny(id2label=names), 0).save_pretrained(tmp_path / folder)
    named, unnamed = (Detector.load(tmp_path / folder).looking_at(64) for folder in ("named", "unnamed"))
    truth = data(tmp_path / "data", {4: "dog", 9: "cat"})
    assert {row["category_id"] for row in named.predict(truth)} == {9}
    truth = data(tmp_path / "more", {0: "x", 5: "y"})
    assert {row["category_id"] for row in unnamed.predict(truth)} == {0}
    assert "without names" in unnamed.facts["labels"]
    with pytest.raises(InputError, match="none of the 2 that the detector knows, 'cat', 'dog'"):
        named.predict(truth)


def test_cocos_names_stand_under_its_numbers():
    names = coco_names()
    assert len(names) == 91
    assert sum(name is not None for name in names) == 80
    assert {number: names[number] for number in COCO} == COCO


# ---------------------------------------------------------------------------------------------------------------
# Predictions.


@pytest.mark.parametrize("kind", ["Detr", "ConditionalDetr"])
def test_predictions_are_in_pixels_of_the_stored_image(tmp_path, kind):
    """Every score and box again, from the outputs of one image after another."""
    truth = data(tmp_path, {1: "a", 2: "b"})
    model = tiny(kind, num_labels=2).double()
    augmentation = Augmentation(shorter=(64,), longest=100)
    seen: list[int] = []
    rows = predictions(model, truth, augmentation, 1, on_batch=seen.append)
    assert seen == [1, 2, 3]
    dataset = BoxedImages(truth, augmentation.testing())
    for index, picture in enumerate(truth.pictures):
        with torch.inference_mode():
            out = model(dataset[index][0][None].double())
        scale = torch.tensor([picture.width, picture.height] * 2)
        centre, size = (out.pred_boxes[0] * scale).split(2, -1)
        boxes = torch.cat([centre - size / 2, size], -1).tolist()
        if kind == "Detr":
            scores, labels = out.logits[0].softmax(-1)[:, :2].max(-1)
            expected = list(zip(scores.tolist(), labels.tolist(), boxes, strict=True))
        else:
            scores = out.logits[0].sigmoid()
            expected = [(float(scores[q, c]), c, boxes[q]) for q in range(4) for c in range(2)]
        found = sorted(
            ((row["score"], row["category_id"] - 1, row["bbox"]) for row in rows if row["image_id"] == picture.id),
            key=lambda row: row[0],
        )
        assert len(found) == len(expected)
        for (score, label, box), right in zip(found, sorted(expected), strict=True):
            assert label == right[1]
            assert [score, *box] == pytest.approx([right[0], *right[2]], rel=1e-9, abs=1e-9)


def test_a_batch_of_several_sizes_changes_nothing_but_rounding(tmp_path):
    truth = data(tmp_path, {1: "a", 2: "b"})
    model, augmentation = tiny(num_labels=2).double(), Augmentation(shorter=(64,), longest=100)
    alone, together = (predictions(model.train(), truth, augmentation, batch_size=n) for n in (1, 3))
    assert model.training
    assert [row["image_id"] for row in alone] == [row["image_id"] for row in together]


# ---------------------------------------------------------------------------------------------------------------
# Images without boxes.


def test_images_are_numbered_in_the_order_of_their_names(tmp_path):
    for number, file in enumerate(["b.png", "a.png", "more/c.JPG"]):
        boxed.picture(tmp_path / file, 30 + number, 20)
    (tmp_path / "d.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("of other kinds")
    found, broken = images([tmp_path], [Category(5, "x")])
    assert [(p.id, p.file, p.width) for p in found.pictures] == [
        (1, "a.png", 31),
        (2, "b.png", 30),
        (3, "more/c.JPG", 32),
    ]
    assert [one.where for one in broken] == ["d.jpg"]
    assert len(found.boxes) == 0
    some, _ = images([tmp_path / "more" / "c.JPG", tmp_path / "b.png"], [Category(5, "x")])
    assert [(p.id, p.file) for p in some.pictures] == [(1, "more/c.JPG"), (2, "b.png")]
    assert some.tree.image("more/c.JPG", (32, 20)).size == (32, 20)
    for paths, says in (
        ([tmp_path / "d.jpg"], "none of them is an image: d.jpg"),
        ([tmp_path / "notes.txt"], "none of them is an image: notes.txt: no image"),
        ([tmp_path / "no.jpg"], "no.jpg', expected image files"),
        ([tmp_path, tmp_path / "b.png"], "expected image files, or one folder"),
    ):
        with pytest.raises(InputError) as error:
            images(paths, [Category(5, "x")])
        assert says in str(error.value)
