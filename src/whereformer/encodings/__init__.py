"""One paper, one file."""

from whereformer.encodings.axial_attention import AxialAttention
from whereformer.encodings.axial_deeplab import AxialDeepLab
from whereformer.encodings.botnet import BoTNet
from whereformer.encodings.decomposed import Decomposed
from whereformer.encodings.huang import Huang
from whereformer.encodings.irpe import IRPE
from whereformer.encodings.learned import Learned
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.sasa import SASA
from whereformer.encodings.shaw import Shaw
from whereformer.encodings.sincos import SinCos2D
from whereformer.encodings.transformer_xl import TransformerXL
from whereformer.encodings.vit_relative import ViTRelative

__all__ = [
    "IRPE",
    "PEG",
    "SASA",
    "AxialAttention",
    "AxialDeepLab",
    "BoTNet",
    "Decomposed",
    "Huang",
    "Learned",
    "NoPositions",
    "Shaw",
    "SinCos2D",
    "TransformerXL",
    "ViTRelative",
]
