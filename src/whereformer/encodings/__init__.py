"""One paper, one file."""

from whereformer.encodings.abs_win import AbsWin
from whereformer.encodings.alibi import ALiBi
from whereformer.encodings.alibi2d import ALiBi2D
from whereformer.encodings.beit import BEiT
from whereformer.encodings.detr_learned import DETRLearned
from whereformer.encodings.detr_sine import DETRSine
from whereformer.encodings.dpb import DPB
from whereformer.encodings.fire import FIRE
from whereformer.encodings.flexivit import FlexiViT
from whereformer.encodings.fourier import Fourier
from whereformer.encodings.irpe import IRPE
from whereformer.encodings.kerple import KERPLE
from whereformer.encodings.learnable_fourier import LearnableFourier
from whereformer.encodings.learned import Learned
from whereformer.encodings.levit import LeViT
from whereformer.encodings.logcpb import LogCPB
from whereformer.encodings.lookhere import LookHere
from whereformer.encodings.maxvit import MaxViT
from whereformer.encodings.navit import NaViT
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.perceiver import Perceiver
from whereformer.encodings.pix2struct import Pix2Struct
from whereformer.encodings.rmt import RMT
from whereformer.encodings.sincos import SinCos2D
from whereformer.encodings.sincos1d import SinCos1D
from whereformer.encodings.sincos3d import SinCos3D
from whereformer.encodings.swin import Swin
from whereformer.encodings.t5 import T5
from whereformer.encodings.vit2d import ViT2D
from whereformer.encodings.xcit import XCiT

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
    "AbsWin",
    "BEiT",
    "DETRLearned",
    "DETRSine",
    "FlexiViT",
    "Fourier",
    "LeViT",
    "LearnableFourier",
    "Learned",
    "LogCPB",
    "LookHere",
    "MaxViT",
    "NaViT",
    "NoPositions",
    "Perceiver",
    "Pix2Struct",
    "SinCos1D",
    "SinCos2D",
    "SinCos3D",
    "Swin",
    "ViT2D",
    "XCiT",
]
