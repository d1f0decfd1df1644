"""Hugging Face transformers' vision models as hosts, one family a file."""

from dataclasses import replace
from importlib import import_module
from inspect import signature
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Host
from whereformer.adapters.pretrained import EquippedPreTrained
from whereformer.errors import InputError

FILES = {
    "vit": "vit",
    "deit": "vit",
    "dinov2": "vit",
    "dinov2_with_registers": "vit",
    "dinov3_vit": "dinov3",
    "clip": "clip",
    "siglip": "clip",
    "beit": "beit",
    "data2vec": "data2vec",
    "swin": "swin",
    "detr": "detr",
    "conditional_detr": "detr",
    "rt_detr": "rt_detr",
    "sam": "sam",
}
"""Which of our files knows the models of which of transformers' folders; each has `TOWERS`, class -> function."""


def tower_inside(model: PreTrainedModel, **options: Any) -> Host:
    """The host of the vision model in a model: of itself, or of its backbone.

    Args:
        options: for the function that describes it, such as `queries` for DETR's.

    Raises:
        InputError: there is none that is known, or there are several, or it has no such options; or hooks of
            accelerate hold its modules.
    """
    towers: dict[str, nn.Module] = {}
    for name, tower in model.named_modules():
        within = any(name.startswith(f"{outer}." if outer else "") for outer in towers)
        if not within and _known(tower):
            towers[name] = tower
    if not towers:
        raise InputError(
            f"equip: {type(model).__name__} has no vision model inside that is known, expected one of"
            f" {', '.join(sorted(FILES))}; describe its parts: host=Host(...), as docs/equip.md shows"
        )
    if len(towers) > 1:
        raise InputError(
            f"equip: {type(model).__name__} has several vision models, {', '.join(towers)}: equip one"
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise InputError(
            "equip: hooks of accelerate hold the modules (device_map over several devices, or offloading); equip"
            " before, save, and load with whereformer.adapters.from_pretrained(..., device_map=...)"
        )
    (tower,) = towers.values()
    make = _known(tower)[type(tower)]
    if unknown := [name for name in options if name not in signature(make).parameters]:
        raise InputError(f"equip: {unknown[0]} given, which a {type(tower).__name__} does not have")
    return replace(make(tower, **options), behaviour=EquippedPreTrained)


def _known(module: nn.Module) -> Hosts:
    """The functions of a file, if it knows the class of a module."""
    folders = type(module).__module__.split(".")
    file = FILES.get(folders[2]) if folders[:2] == ["transformers", "models"] else None
    towers: Hosts = import_module(f"{__name__}.{file}").TOWERS if file else {}
    return towers if type(module) in towers else {}


HOSTS: Hosts = {PreTrainedModel: tower_inside}
