"""Where a vision transformer's patches are: position encodings, exact and easy to swap."""

from whereformer import encodings, layers
from whereformer.adapters import describe, equip, load_checkpoint, resize, translate, unequip
from whereformer.attention import attention, encode, explain
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
    MatrixRotation,
    OffsetBias,
    Rotation,
    Scores,
)
from whereformer.grid import Grid, Points
from whereformer.images import Packed, Padded
from whereformer.index import Buckets
from whereformer.windows import Windows

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
    "MatrixRotation",
    "OffsetBias",
    "Packed",
    "Padded",
    "Points",
    "PositionEncoding",
    "Rotation",
    "Scores",
    "Windows",
    "attention",
    "describe",
    "encode",
    "encodings",
    "equip",
    "explain",
    "layers",
    "load_checkpoint",
    "parse",
    "resize",
    "translate",
    "unequip",
]
