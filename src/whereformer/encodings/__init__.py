"""One paper, one file.

Letters that mean the same in all of them:

    x_n                 token n, of D features (dim)
    q_i, k_j, v_j       a query, a key, a value, of one head: d = D / num_heads features
    e_ij                the logit of query i and key j: q_i·k_j/√d, and what the encoding adds
    a_ij, z_i           a_ij = softmax_j(e_ij), and z_i = Σ_j a_ij v_j, what attention gives to token i
    p_i = (y_i, x_i)    the place of patch i in patches, its row and column, from 0; in a video (t_i, y_i, x_i)
    dy, dx              offsets of two patches, in patches: query − key unless a file says key − query
    height, width       rows and columns of the home grid; H, W those of the grid at hand
    h, H                in biases of one slope per head, the head, from 0, and how many there are
    R(α)                a turn by the angle α, in radians, of each pair of features of queries and keys
"""

from whereformer.encodings.abs_win import AbsWin
from whereformer.encodings.alibi import ALiBi
from whereformer.encodings.alibi2d import ALiBi2D
from whereformer.encodings.axial_deeplab import AxialDeepLab
from whereformer.encodings.beit import BEiT
from whereformer.encodings.botnet import BoTNet
from whereformer.encodings.common.rotary import half_to_interleaved, interleaved_to_half
from whereformer.encodings.comrope import ComRoPE
from whereformer.encodings.decomposed import Decomposed
from whereformer.encodings.detr_learned import DETRLearned
from whereformer.encodings.detr_sine import DETRSine
from whereformer.encodings.dinov3 import DINOv3
from whereformer.encodings.dpb import DPB
from whereformer.encodings.eva02 import EVA02
from whereformer.encodings.fire import FIRE
from whereformer.encodings.flexivit import FlexiViT
from whereformer.encodings.fourier import Fourier
from whereformer.encodings.golden_gate import GoldenGate
from whereformer.encodings.huang import Huang
from whereformer.encodings.irpe import IRPE
from whereformer.encodings.kerple import KERPLE
from whereformer.encodings.learnable_fourier import LearnableFourier
from whereformer.encodings.learned import Learned
from whereformer.encodings.lepe import LePE
from whereformer.encodings.levit import LeViT
from whereformer.encodings.liere import LieRE
from whereformer.encodings.logcpb import LogCPB
from whereformer.encodings.lookhere import LookHere
from whereformer.encodings.maxvit import MaxViT
from whereformer.encodings.mrope import MRoPE
from whereformer.encodings.navit import NaViT
from whereformer.encodings.nd_rope import NDRoPE
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.perceiver import Perceiver
from whereformer.encodings.pix2struct import Pix2Struct
from whereformer.encodings.pixtral import Pixtral
from whereformer.encodings.qwen2_vl import Qwen2VL
from whereformer.encodings.rmt import RMT
from whereformer.encodings.rope1d import RoPE1D
from whereformer.encodings.rope_axial import RoPEAxial
from whereformer.encodings.rope_mixed import RoPEMixed
from whereformer.encodings.rope_pixel import RoPEPixel
from whereformer.encodings.sasa import SASA
from whereformer.encodings.shaw import Shaw
from whereformer.encodings.sincos import SinCos2D
from whereformer.encodings.sincos1d import SinCos1D
from whereformer.encodings.sincos3d import SinCos3D
from whereformer.encodings.spiral import SpiralRoPE
from whereformer.encodings.swin import Swin
from whereformer.encodings.t5 import T5
from whereformer.encodings.transformer_xl import TransformerXL
from whereformer.encodings.visionllama import VisionLLaMA
from whereformer.encodings.vit2d import ViT2D
from whereformer.encodings.vit_relative import ViTRelative
from whereformer.encodings.vjepa2 import VJEPA2
from whereformer.encodings.xcit import XCiT

__all__ = [
    "DPB",
    "EVA02",
    "FIRE",
    "IRPE",
    "KERPLE",
    "PEG",
    "RMT",
    "SASA",
    "T5",
    "VJEPA2",
    "ALiBi",
    "ALiBi2D",
    "AbsWin",
    "AxialDeepLab",
    "BEiT",
    "BoTNet",
    "ComRoPE",
    "DETRLearned",
    "DETRSine",
    "DINOv3",
    "Decomposed",
    "FlexiViT",
    "Fourier",
    "GoldenGate",
    "Huang",
    "LePE",
    "LeViT",
    "LearnableFourier",
    "Learned",
    "LieRE",
    "LogCPB",
    "LookHere",
    "MRoPE",
    "MaxViT",
    "NDRoPE",
    "NaViT",
    "NoPositions",
    "Perceiver",
    "Pix2Struct",
    "Pixtral",
    "Qwen2VL",
    "RoPE1D",
    "RoPEAxial",
    "RoPEMixed",
    "RoPEPixel",
    "Shaw",
    "SinCos1D",
    "SinCos2D",
    "SinCos3D",
    "SpiralRoPE",
    "Swin",
    "TransformerXL",
    "ViT2D",
    "ViTRelative",
    "VisionLLaMA",
    "XCiT",
    "half_to_interleaved",
    "interleaved_to_half",
]
