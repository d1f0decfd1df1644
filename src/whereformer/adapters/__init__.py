"""Encodings for models as they are: give, take back, resize, describe, load, convert."""

from whereformer.adapters.checkpoint import load_checkpoint
from whereformer.adapters.convert import convert
from whereformer.adapters.cpvt import cpvt
from whereformer.adapters.describe import describe
from whereformer.adapters.detection import equip_detr
from whereformer.adapters.equip import equip, unequip
from whereformer.adapters.host import Attention, Block, Host, Own, Stage
from whereformer.adapters.inspection import inspect
from whereformer.adapters.pretrained import from_pretrained
from whereformer.adapters.resize import resize
from whereformer.adapters.translate import start_from, translate

__all__ = [
    "Attention",
    "Block",
    "Host",
    "Own",
    "Stage",
    "convert",
    "cpvt",
    "describe",
    "equip",
    "equip_detr",
    "from_pretrained",
    "inspect",
    "load_checkpoint",
    "resize",
    "start_from",
    "translate",
    "unequip",
]
