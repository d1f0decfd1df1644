"""Where a vision transformer's patches are: position encodings, exact and easy to swap."""

from whereformer import encodings
from whereformer.adapters import describe, equip, load_checkpoint
from whereformer.attention import attention
from whereformer.catalog import parse
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import (
    AddedValues,
    AxisBias,
    BucketBias,
    BucketValues,
    DenseBias,
    LowRankBias,
    OffsetBias,
    Rotation,
)
from whereformer.grid import Grid
from whereformer.index import Buckets

__version__ = "0.1.0"

__all__ = [
    "AddedValues",
    "AxisBias",
    "BucketBias",
    "BucketValues",
    "Buckets",
    "DenseBias",
    "Grid",
    "InputError",
    "LowRankBias",
    "OffsetBias",
    "PositionEncoding",
    "Rotation",
    "attention",
    "describe",
    "encodings",
    "equip",
    "load_checkpoint",
    "parse",
]
