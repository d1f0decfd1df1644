"""One paper, one file."""

from whereformer.encodings.irpe import IRPE
from whereformer.encodings.learned import Learned
from whereformer.encodings.lepe import LePE
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.sincos import SinCos2D

__all__ = ["IRPE", "PEG", "LePE", "Learned", "NoPositions", "SinCos2D"]
