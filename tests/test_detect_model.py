"""Detectors as experiments build them, and their loss."""

import math
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from official import of_detr
from whereformer import Grid, InputError, describe
from whereformer.lab.detect.experiment import SMALL_MODEL, DetectionExperiment
from whereformer.lab.detect.loss import WithLoss
from whereformer.lab.detect.model import build

TINY = DetectionExperiment(
    augmentation={"scaled": 64},
    model="detr",
    queries=None,
    model_args={**SMALL_MODEL, "d_model": 16, "num_queries": 6, "encoder_layers": 1, "decoder_layers": 2},
    backbone_args={"stem": 8, "layers": [1, 1], "channels": [8, 16]},
)
IRPE = "detr_sine + irpe(ratio=2)"


def batch(sizes=((64, 48), (40, 64)), boxes=(2, 0), seed=0):
    """Padded images with boxes."""
    torch.manual_seed(seed)
    pixels, mask = torch.zeros(len(sizes), 3, 64, 64), torch.zeros(len(sizes), 64, 64, dtype=torch.bool)
    for row, (height, width) in enumerate(sizes):
        pixels[row, :, :height, :width] = torch.randn(3, height, width)
        mask[row, :height, :width] = True
    labels = [
        {"class_labels": torch.randint(6, (n,)), "boxes": torch.cat([torch.rand(n, 2), torch.rand(n, 2) / 2], 1)}
        for n in boxes
    ]
    return {"pixel_values": pixels, "pixel_mask": mask, "labels": labels}


@pytest.mark.parametrize("model", ["detr", "conditional_detr"])
def test_encodings_start_from_the_same_shared_weights(model):
    experiment = replace(TINY, model=model)
    models = [build(experiment, encoding, 3, 6).state_dict() for encoding in ("none", "detr_sine", IRPE)]
    shared = set.intersection(*(set(one) for one in models))
    assert {
        "model.encoder.layers.0.mlp.fc1.weight",
        "model.backbone.model.stages_1.0.conv1_kxk.conv.weight",
    } <= shared
    assert all(torch.equal(models[0][name], one[name]) for one in models for name in shared)
    name, other = "model.encoder.layers.0.mlp.fc1.weight", build(experiment, "none", 4, 6).state_dict()
    assert not torch.equal(other[name], models[0][name])


def test_its_own_sines_are_gone_and_the_encoding_is_at_home():
    none, irpe = build(TINY, "none", 0, 6), build(TINY, IRPE, 0, 6)
    assert describe(none).own == describe(irpe).own == ()
    assert describe(irpe).grid == Grid(8, 14)  # 64 x 107 pixels, in cells of 8
    inputs = batch()
    out = [one.eval()(inputs["pixel_values"], inputs["pixel_mask"]).logits for one in (none, irpe)]
    assert not torch.equal(*out)
    tables = [p for name, p in irpe.named_parameters() if "encodings" in name]
    assert tables
    assert not any(table.any() for table in tables)


def test_it_starts_as_detr_does():
    """Standard deviations: of a uniform distribution to each side of 0 by b it is b/√3."""
    experiment = replace(TINY, model_args={**TINY.model_args, "d_model": 64, "num_queries": 100})
    model = build(experiment, "none", 0, 6)
    attention, queries = model.model.encoder.layers[0].self_attn, model.model.query_position_embeddings.weight
    assert attention.q_proj.weight.std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.05)
    assert queries.std().item() == pytest.approx(1, rel=0.05)
    assert model.class_labels_classifier.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.1)


def test_conditional_detr_starts_sure_of_nothing():
    model = build(replace(TINY, model="conditional_detr"), "detr_sine", 0, 6).eval()
    inputs = batch()
    scores = model(inputs["pixel_values"], inputs["pixel_mask"]).logits.sigmoid()
    assert 0.001 < scores.mean().item() < 0.05


def norms(model):
    return {type(module).__name__ for module in model.model.backbone.modules() if "Norm" in type(module).__name__}


def test_backbones_are_trained_where_they_should_be():
    small = build(TINY, "none", 0, 6)
    assert norms(small) == {"GroupNormAct", "ConvNormAct"}  # the second holds one of the first
    assert all(p.requires_grad for p in small.parameters())
    frozen = replace(TINY, backbone="resnet18", backbone_args={}, frozen_norm=True)
    model = build(frozen, "none", 0, 6)
    still = {name.split(".")[3] for name, p in model.named_parameters() if not p.requires_grad}
    trained = {n.split(".")[3] for n, p in model.named_parameters() if p.requires_grad and ".backbone." in n}
    assert (still, trained) == ({"conv1", "layer1"}, {"layer2", "layer3", "layer4"})
    assert norms(model) == {"FrozenBatchNorm2d"}
    none = build(replace(frozen, backbone_learning_rate=0), "none", 0, 6)
    assert not any(p.requires_grad for p in none.model.backbone.parameters())
    assert none.model.input_projection.weight.requires_grad


@pytest.mark.parametrize("frozen_norm", [True, False])
def test_norms_with_a_function_behind_them_keep_it(frozen_norm):
    experiment = replace(TINY, backbone="regnety_002", backbone_args={"out_indices": [1]}, frozen_norm=frozen_norm)
    ours = build(experiment, "none", 0, 6).model.backbone.model.eval()
    assert ours.feature_info.reduction() == [4]
    theirs = timm.create_model("regnety_002", features_only=True, out_indices=(1,)).eval()
    weights = ours.state_dict()
    theirs.load_state_dict({n: weights.get(n, v) for n, v in theirs.state_dict().items()})
    if not frozen_norm:  # no norm at all, on both sides
        for module in (*ours.modules(), *theirs.modules()):
            for name, child in module.named_children():
                if type(child).__name__ in ("GroupNormAct", "BatchNormAct2d"):
                    setattr(module, name, nn.Sequential(child.drop, child.act))
    pixels = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(ours(pixels), theirs(pixels))


def test_weights_of_a_backbone_come_from_a_file(tmp_path):
    whole = timm.create_model("resnet10t")
    torch.save(whole.state_dict(), tmp_path / "resnet.pth")
    experiment = replace(
        TINY,
        backbone="resnet10t",
        backbone_args={},
        frozen_norm=True,
        backbone_weights=str(tmp_path / "resnet.pth"),
    )
    ours = build(experiment, "none", 0, 6).model.backbone.model
    assert torch.equal(ours.layer4[0].conv1.weight, whole.layer4[0].conv1.weight)
    assert torch.equal(ours.bn1.running_var, whole.bn1.running_var)
    torch.save({"weight": torch.ones(2)}, tmp_path / "resnet.pth")
    with pytest.raises(InputError, match="nothing was loaded"):
        build(experiment, "none", 0, 6)
    assert build(experiment, "none", 0, 6, filled=False) is not None


def test_weights_to_start_from(tmp_path):
    """Another encoding and other classes start anew; all else is what the file holds."""
    file = tmp_path / "start.pth"
    given = build(TINY, "detr_sine", 5, 9).state_dict()
    torch.save(given, file)
    experiment = replace(TINY, weights=str(file))
    ours, fresh = (build(one, IRPE, 0, 6).state_dict() for one in (experiment, TINY))
    new = {name for name in ours if "encodings" in name or name.startswith("class_labels_classifier")}
    assert len(new) == 3
    assert all(torch.equal(ours[name], fresh[name] if name in new else given[name]) for name in ours)
    same = build(experiment, "detr_sine", 0, 9).state_dict()
    assert all(torch.equal(same[name], given[name]) for name in same)
    torch.save(build(TINY, IRPE, 0, 6).state_dict(), file)
    with pytest.raises(InputError, match=r"unexpected: .*encodings"):
        build(experiment, "detr_sine", 0, 6)
    with pytest.raises(InputError, match="query_position_embeddings"):
        build(replace(experiment, model_args={**TINY.model_args, "num_queries": 5}), IRPE, 0, 6)
    with pytest.raises(InputError, match=r"nowhere\.pth"):
        build(replace(TINY, weights="nowhere.pth"), IRPE, 0, 6)


def test_official_weights_of_detr_to_start_from(tmp_path):
    """Under the names of facebookresearch/detr, as another test's inverse renaming writes them."""
    experiment = replace(TINY, backbone="resnet18", backbone_args={}, frozen_norm=True)
    given = build(experiment, "detr_sine", 5, 9).state_dict()
    torch.save({"model": of_detr(given)}, tmp_path / "detr.pth")
    experiment = replace(experiment, weights=str(tmp_path / "detr.pth"))
    ours = build(experiment, IRPE, 0, 6).state_dict()
    assert all(torch.equal(ours[name], given[name]) for name in given if not name.startswith("class_labels"))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"backbone": "no_such_net"}, "backbone='no_such_net'"),
        ({"backbone": "resnet18", "backbone_args": {}, "backbone_weights": "no.pth"}, "no such file"),
        ({"backbone_weights": "pretrained"}, "'small' has none"),
        ({"backbone_args": {"stem": 12, "layers": [1, 1], "channels": [8, 16]}}, "12 channels"),
        ({"backbone_args": {"stem": 8, "layers": [1], "channels": [16, 16]}}, "backbone_args="),
        ({"backbone_args": {**TINY.backbone_args, "no_such": 1}}, "no_such"),
        ({"model_args": {"no_such": 1}}, "no_such unknown to a DetrConfig"),
        ({"model_args": {"d_model": "x"}}, "d_model"),
        ({"model_args": {"d_model": 30}}, "dim=30"),
        ({"model_args": {**TINY.model_args, "num_queries": 0}}, "num_queries=0"),
        ({"encodings": ("peg",), "baseline": "peg"}, "PEG"),
    ],
)
def test_what_cannot_be_built_is_named(changes, match):
    experiment = replace(TINY, **changes)
    with pytest.raises(InputError, match=match):
        build(experiment, experiment.encodings[0], 0, 6)


def test_object_queries_on_a_lattice():
    experiment = replace(TINY, queries=(2, 3), decoder_encoding="irpe", model_args={**SMALL_MODEL, "d_model": 16})
    model = build(experiment, IRPE, 0, 6)
    assert model.config.num_queries == 6
    seats = {seat.where.rpartition(".")[2]: seat.grid for seat in describe(model).seats}
    assert seats["encoder_attn"] == describe(model).grid == Grid(8, 14)
    assert Grid(2, 3) in {seat.grid for seat in describe(model).seats}


@pytest.mark.parametrize("model", ["detr", "conditional_detr"])
def test_the_loss_is_that_of_every_layer_as_published(model):
    """The loss of an earlier layer is that of a detector which ends there."""
    experiment = replace(TINY, model=model, model_args={**TINY.model_args, "decoder_layers": 3})
    detector = build(experiment, IRPE, 0, 6).eval()
    nn.init.uniform_(
        detector.model.decoder.layernorm.weight, 0.5, 2
    )  # as it starts, a second norm changes nothing
    inputs = batch(boxes=(3, 2))
    ours = {name: loss.item() for name, loss in WithLoss(detector)(inputs).items()}
    layers, expected = detector.model.decoder.layers, 0.0
    for count in (1, 2, 3):
        detector.model.decoder.layers = layers[:count]
        with torch.no_grad():
            out = detector(inputs["pixel_values"], inputs["pixel_mask"], labels=inputs["labels"])
        classes = 1 if model == "detr" else 2  # Conditional DETR's own weight, which transformers does not take
        parts = out.loss_dict
        expected += float(classes * parts["loss_ce"] + 5 * parts["loss_bbox"] + 2 * parts["loss_giou"])
    assert ours["loss"] == pytest.approx(expected, rel=1e-5)
    assert ours["loss_bbox"] == pytest.approx(5 * float(parts["loss_bbox"]), rel=1e-5)
    assert torch.isfinite(WithLoss(detector)(batch(boxes=(0, 0)))["loss"])


def test_a_batch_leaves_nothing_behind_for_the_next():
    model = build(TINY, "learned + irpe(on='qkv')", 0, 6).eval()
    wide, small = batch(), batch(((32, 40),), (1,))
    small["pixel_values"], small["pixel_mask"] = (
        small["pixel_values"][..., :32, :40],
        small["pixel_mask"][..., :32, :40],
    )
    before = model(small["pixel_values"], small["pixel_mask"]).logits
    model(wide["pixel_values"], wide["pixel_mask"])
    assert torch.equal(model(small["pixel_values"], small["pixel_mask"]).logits, before)
