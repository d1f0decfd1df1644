"""One paper, one file."""

from whereformer.encodings.abs_win import AbsWin
from whereformer.encodings.axial_attention import AxialAttention
from whereformer.encodings.axial_deeplab import AxialDeepLab
from whereformer.encodings.botnet import BoTNet
from whereformer.encodings.decomposed import Decomposed
from whereformer.encodings.detr_learned import DETRLearned
from whereformer.encodings.detr_sine import DETRSine
from whereformer.encodings.flexivit import FlexiViT
from whereformer.encodings.fourier import Fourier
from whereformer.encodings.huang import Huang
from whereformer.encodings.irpe import IRPE
from whereformer.encodings.learnable_fourier import LearnableFourier
from whereformer.encodings.learned import Learned
from whereformer.encodings.lepe import LePE
from whereformer.encodings.navit import NaViT
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.perceiver import Perceiver
from whereformer.encodings.pix2struct import Pix2Struct
from whereformer.encodings.sasa import SASA
from whereformer.encodings.shaw import Shaw
from whereformer.encodings.sincos import SinCos2D
from whereformer.encodings.sincos1d import SinCos1D
from whereformer.encodings.sincos3d import SinCos3D
from whereformer.encodings.transformer_xl import TransformerXL
from whereformer.encodings.vit2d import ViT2D
from whereformer.encodings.vit_relative import ViTRelative
from whereformer.encodings.xcit import XCiT

__all__ = [
    "IRPE",
    "PEG",
    "SASA",
    "AbsWin",
    "AxialAttention",
    "AxialDeepLab",
    "BoTNet",
    "DETRLearned",
    "DETRSine",
    "Decomposed",
    "FlexiViT",
    "Fourier",
    "Huang",
    "LePE",
    "LearnableFourier",
    "Learned",
    "NaViT",
    "NoPositions",
    "Perceiver",
    "Pix2Struct",
    "Shaw",
    "SinCos1D",
    "SinCos2D",
    "SinCos3D",
    "TransformerXL",
    "ViT2D",
    "ViTRelative",
    "XCiT",
]
