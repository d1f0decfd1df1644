"""Small detectors, what official files call their weights, and images for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import boxed
from official import of_detr, randomised, renamed
from whereformer.lab.detect.boxes import Annotations
from whereformer.lab.detect.load import load

SIZES: dict[str, Any] = {"d_model": 24, "num_queries": 4}
for _side in ("encoder", "decoder"):
    SIZES |= {f"{_side}_layers": 1, f"{_side}_attention_heads": 3, f"{_side}_ffn_dim": 16}
CONVOLUTIONS = {"embedding_size": 4, "hidden_sizes": [4, 4, 4, 8], "depths": [1, 1, 1, 1]}


def tiny(kind: str = "Detr", **options: Any) -> Any:
    """A model of transformers, with transformers' own small backbone."""
    config = getattr(hf, f"{kind}Config")
    backbone = hf.ResNetConfig(**CONVOLUTIONS, out_features=["stage4"])
    made = config(backbone_config=backbone, use_timm_backbone=False, **SIZES, **options)
    model = getattr(hf, f"{kind}ForObjectDetection")(made).eval()
    randomised(model)
    return model


def published(labels: int = 5, **options: Any) -> Any:
    """A model such as the official code has, on a ResNet-18."""
    model = hf.DetrForObjectDetection(hf.DetrConfig(backbone="resnet18", num_labels=labels, **SIZES, **options))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "backbone" not in name:
                value.normal_(std=0.2)
    return model.eval()


def official(model: nn.Module) -> dict[str, Tensor]:
    """Its weights under the names of iRPE's repository."""
    return renamed(
        of_detr(model.state_dict()),
        (r"\.encodings\.0\.tables\.([qkv])_rows", r".rpe_\1.rp_rows.lookup_table_KIND"),
        (r"\.encodings\.0\.tables\.([qkv])_columns", r".rpe_\1.rp_cols.lookup_table_KIND"),
        (r"\.encodings\.0\.tables\.([qkv])", r".rpe_\1.lookup_table_KIND"),
        ("KIND", "bias" if "mode='bias'" in getattr(model, "encoding", "") else "weight"),
        (r"model\.position_embedding\.row_embeddings", "backbone.1.row_embed"),
        (r"model\.position_embedding\.column_embeddings", "backbone.1.col_embed"),
    )


def data(root: Path, names: Mapping[int, str]) -> Annotations:
    """Two images of different sizes with the categories in COCO's format."""
    categories = [{"id": number, "name": name} for number, name in names.items()]
    sizes = {1: (40, 30), 2: (64, 48), 3: (50, 80)}
    for number, (width, height) in sizes.items():
        boxed.picture(root / "val" / f"{number}.png", width, height)
    listed = [boxed.image(number, f"{number}.png", *size) for number, size in sizes.items()]
    boxes = [boxed.box(number, number, (4, 3, 20, 10), category=min(names)) for number in sizes]
    boxed.write(root, {"annotations/instances_val.json": boxed.coco(listed, boxes, categories)})
    boxed.write(root, {"annotations/instances_train.json": boxed.coco(listed, boxes, categories)})
    return load(root).validation


def sure_of(model: Any, label: int) -> Any:
    """All its queries say this label."""
    head = model.class_labels_classifier
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[label] = 9
    return model
