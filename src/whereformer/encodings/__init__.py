"""One paper, one file."""

from whereformer.encodings.alibi import ALiBi
from whereformer.encodings.alibi2d import ALiBi2D
from whereformer.encodings.beit import BEiT
from whereformer.encodings.dpb import DPB
from whereformer.encodings.fire import FIRE
from whereformer.encodings.irpe import IRPE
from whereformer.encodings.kerple import KERPLE
from whereformer.encodings.learned import Learned
from whereformer.encodings.levit import LeViT
from whereformer.encodings.logcpb import LogCPB
from whereformer.encodings.lookhere import LookHere
from whereformer.encodings.maxvit import MaxViT
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.rmt import RMT
from whereformer.encodings.sincos import SinCos2D
from whereformer.encodings.swin import Swin
from whereformer.encodings.t5 import T5

__all__ = [
    "DPB",
    "FIRE",
    "IRPE",
    "KERPLE",
    "PEG",
    "RMT",
    "T5",
    "ALiBi",
    "ALiBi2D",
    "BEiT",
    "LeViT",
    "Learned",
    "LogCPB",
    "LookHere",
    "MaxViT",
    "NoPositions",
    "SinCos2D",
    "Swin",
]
