"""Encodings for models as they are: give, describe, load, convert."""

from whereformer.adapters.checkpoint import load_checkpoint
from whereformer.adapters.convert import convert
from whereformer.adapters.cpvt import cpvt
from whereformer.adapters.describe import describe
from whereformer.adapters.equip import equip
from whereformer.adapters.inspection import inspect

__all__ = ["convert", "cpvt", "describe", "equip", "inspect", "load_checkpoint"]
