"""Encodings for models as they are: give, describe, load."""

from whereformer.adapters.checkpoint import load_checkpoint
from whereformer.adapters.cpvt import cpvt
from whereformer.adapters.describe import describe
from whereformer.adapters.equip import equip
from whereformer.adapters.translate import start_from, translate

__all__ = ["cpvt", "describe", "equip", "load_checkpoint", "start_from", "translate"]
