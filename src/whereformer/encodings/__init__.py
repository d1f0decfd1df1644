"""One paper, one file."""

from whereformer.encodings.abs_win import AbsWin
from whereformer.encodings.detr_learned import DETRLearned
from whereformer.encodings.detr_sine import DETRSine
from whereformer.encodings.flexivit import FlexiViT
from whereformer.encodings.fourier import Fourier
from whereformer.encodings.irpe import IRPE
from whereformer.encodings.learnable_fourier import LearnableFourier
from whereformer.encodings.learned import Learned
from whereformer.encodings.navit import NaViT
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.perceiver import Perceiver
from whereformer.encodings.pix2struct import Pix2Struct
from whereformer.encodings.sincos import SinCos2D
from whereformer.encodings.sincos1d import SinCos1D
from whereformer.encodings.sincos3d import SinCos3D
from whereformer.encodings.vit2d import ViT2D
from whereformer.encodings.xcit import XCiT

__all__ = [
    "IRPE",
    "PEG",
    "AbsWin",
    "DETRLearned",
    "DETRSine",
    "FlexiViT",
    "Fourier",
    "LearnableFourier",
    "Learned",
    "NaViT",
    "NoPositions",
    "Perceiver",
    "Pix2Struct",
    "SinCos1D",
    "SinCos2D",
    "SinCos3D",
    "ViT2D",
    "XCiT",
]
