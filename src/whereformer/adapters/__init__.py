"""Encodings for models as they are: give, take back, resize, describe, load."""

from whereformer.adapters.checkpoint import load_checkpoint
from whereformer.adapters.cpvt import cpvt
from whereformer.adapters.describe import describe
from whereformer.adapters.equip import equip, unequip
from whereformer.adapters.host import Attention, Block, Host, Own, Stage
from whereformer.adapters.pretrained import from_pretrained
from whereformer.adapters.resize import resize

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
    "resize",
    "unequip",
]
