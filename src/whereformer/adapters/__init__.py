"""Encodings for models as they are: give, take back, describe, load."""

from whereformer.adapters.checkpoint import load_checkpoint
from whereformer.adapters.cpvt import cpvt
from whereformer.adapters.describe import describe
from whereformer.adapters.equip import equip, unequip
from whereformer.adapters.host import Attention, Block, Host, Own, Stage
from whereformer.adapters.pretrained import from_pretrained
from whereformer.adapters.translate import start_from, translate

__all__ = [
    "Attention",
    "Block",
    "Host",
    "Own",
    "Stage",
    "cpvt",
    "describe",
    "equip",
    "from_pretrained",
    "load_checkpoint",
    "start_from",
    "translate",
    "unequip",
]
