"""DETR from the official files: facebookresearch/detr, and iRPE's DETR (microsoft/Cream)."""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from whereformer.adapters import equip, load_checkpoint
from whereformer.adapters.files import Checkpoint, Entries, open_checkpoint, torch_content
from whereformer.adapters.fit import in_timms_names
from whereformer.adapters.layouts import irpe, recognise
from whereformer.catalog import parse, spell
from whereformer.encodings import DETRLearned, DETRSine, NoPositions
from whereformer.errors import InputError

HEADS = 8
"""Of the released models; the weights alone do not tell them."""

LEARNED = "model.position_embedding.row_embeddings.weight"
BODY = "backbone.0.body."
RESNETS: dict[tuple[bool, tuple[int, ...]], str] = {
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "resnet34",
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "resnet101",
    (True, (3, 8, 36, 3)): "resnet152",
}
"""Whether blocks have three convolutions, and blocks of each stage -> timm's name."""


def released(
    source: str | os.PathLike[str],
    encoding: str | None = None,
    part: str | None = None,
    dilation: bool | None = None,
) -> tuple[Any, dict[str, str]]:
    """The model that an official file holds, as transformers' `DetrForObjectDetection`, and what it is.

    What names and shapes do not tell is taken from the arguments that files of a training keep, or else assumed;
    the facts say which.

    Args:
        source: the file; nothing in it is run.
        encoding: what the weights were trained with, such as "detr_sine + rpe-2.0-product-ctx-1-k". None: as the
            file says it.
        part: which state dict, if the file holds several.
        dilation: whether the backbone's last stage has dilation in the place of its stride (DC5); None: as the
            file says it, or else not.

    Raises:
        InputError: it is no such file, or it does not fit the encoding.
    """
    checkpoint = open_checkpoint(source, part)
    if recognise(checkpoint.entries) is not irpe.DETR:
        raise InputError(
            f"{str(source)!r} holds no DETR under the names of facebookresearch/detr, expected such a file, the"
            " folder or a file of a run of `whereformer detect train`, or a folder of transformers"
        )
    entries = checkpoint.entries
    if "transformer.encoder.norm.weight" in entries:
        raise InputError(f"{str(source)!r} was trained with --pre_norm, which transformers' DETR does not have")
    arguments = _arguments(Path(source))
    if dilation is not None:
        arguments["dilation"] = dilation
    named, _ = in_timms_names(entries, irpe.DETR)
    text, where = _encoding(named, arguments, encoding)
    heads, heads_from = _heads(named, arguments)
    model = equipped(_built(entries, named, arguments, heads), text)
    model.to(torch.promote_types(torch.float32, entries["class_embed.weight"].dtype))
    try:
        load_checkpoint(model, source, part=part)
    except InputError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise InputError(f"{lines[0]} {'; '.join(lines[1:])} (the encoding is {text!r}, {where})") from None
    return model, {
        "weights": f"{irpe.DETR.source}{_part(checkpoint)}",
        "encoding": f"{text} ({where})",
        "model": f"{_backbone(entries)}, {_stride(arguments)}; {heads} heads ({heads_from})",
    }


def equipped(model: Any, encoding: str) -> Any:
    """DETR with an encoding; where its text begins with what the model says itself, that stays, to the bit."""
    own = DETRLearned if model.config.position_embedding_type == "learned" else DETRSine
    first, *rest = parse(encoding)
    kept = first.func is own and not first.keywords
    others = [spell(factory) for factory in ([] if kept else [first]) + rest if factory.func is not NoPositions]
    return model if kept and not others else equip(model, " + ".join(others) or "none", keep_own=kept)


def _built(entries: Entries, named: Entries, arguments: Mapping[str, Any], heads: int) -> Any:
    """The model with random weights."""
    from transformers import DetrConfig, DetrForObjectDetection

    queries, dim = entries["query_embed.weight"].shape
    options: dict[str, Any] = {
        "backbone": _backbone(entries),
        "d_model": dim,
        "num_queries": queries,
        "num_labels": entries["class_embed.weight"].shape[0] - 1,
        "dilation": bool(arguments.get("dilation", False)),
        "position_embedding_type": "learned" if LEARNED in named else "sine",
    }
    for side in ("encoder", "decoder"):
        stem = f"transformer.{side}.layers."
        options[f"{side}_layers"] = 1 + max(_number(name, stem) for name in entries if name.startswith(stem))
        options[f"{side}_ffn_dim"] = entries[f"{stem}0.linear1.weight"].shape[0]
        options[f"{side}_attention_heads"] = heads
    return DetrForObjectDetection(DetrConfig(**options)).eval()


def _encoding(named: Entries, arguments: Mapping[str, Any], given: str | None) -> tuple[str, str]:
    """The text of the encoding, and where that is from."""
    if given is not None:
        return given, "as asked"
    own = "detr_learned" if LEARNED in named else "detr_sine"
    if "enc_rpe2d" in arguments:
        said = arguments["enc_rpe2d"]
        text = f"{own} + {said}" if said and said != "none" else own
        return text, "the arguments of the training, in the file"
    read = irpe.DETR.encoding(named)
    if read == "none":
        return own, "the weights: they hold no relative positions"
    tables = ", ".join(sorted({str(tuple(named[name].shape)) for name in named if irpe.TABLE.fullmatch(name)}))
    return f"{own} + {read}", (
        f"tables of {tables}, which tell how many buckets there are; that {read} made them is assumed"
    )


def _heads(named: Entries, arguments: Mapping[str, Any]) -> tuple[int, str]:
    dim = named["model.query_position_embeddings.weight"].shape[1]
    for name, entry in named.items():
        if match := irpe.TABLE.fullmatch(name):
            if entry.shape[0] > 1:
                return entry.shape[0], "from the tables of the encoding"
            if match["kind"] == "weight":
                return dim // entry.shape[2 if match["side"] == "v" else 1], "from the tables of the encoding"
    if "nheads" in arguments:
        return int(arguments["nheads"]), "from the arguments of the training, in the file"
    return HEADS, "assumed: the weights do not tell"


def _backbone(entries: Entries) -> str:
    names = [name.removeprefix(BODY) for name in entries if name.startswith(f"{BODY}layer")]
    depths = tuple(
        1 + max(_number(n, f"layer{s}.") for n in names if n.startswith(f"layer{s}.")) for s in range(1, 5)
    )
    bottleneck = "layer1.0.conv3.weight" in names
    if (bottleneck, depths) not in RESNETS:
        raise InputError(f"backbone: blocks of stages {depths}, expected those of {list(RESNETS.values())}")
    return RESNETS[bottleneck, depths]


def _stride(arguments: Mapping[str, Any]) -> str:
    if "dilation" in arguments:
        return "of stride 16, by dilation" if arguments["dilation"] else "of stride 32"
    return "of stride 32 (assumed: the weights do not tell)"


def _number(name: str, stem: str) -> int:
    return int(name.removeprefix(stem).partition(".")[0])


def _arguments(path: Path) -> dict[str, Any]:
    """The command's options that a file of a training keeps under "args"; none in others."""
    if path.suffix == ".safetensors" or not path.is_file():
        return {}
    found = torch_content(path).get("args")
    return vars(found) if isinstance(found, Namespace) else {}


def _part(checkpoint: Checkpoint) -> str:
    return f", under {checkpoint.part!r}" if checkpoint.part else ""
