"""One paper, one file."""

from whereformer.encodings._rotary import half_to_interleaved, interleaved_to_half
from whereformer.encodings.comrope import ComRoPE
from whereformer.encodings.dinov3 import DINOv3
from whereformer.encodings.eva02 import EVA02
from whereformer.encodings.golden_gate import GoldenGate
from whereformer.encodings.irpe import IRPE
from whereformer.encodings.learned import Learned
from whereformer.encodings.liere import LieRE
from whereformer.encodings.mrope import MRoPE
from whereformer.encodings.nd_rope import NDRoPE
from whereformer.encodings.none import NoPositions
from whereformer.encodings.peg import PEG
from whereformer.encodings.pixtral import Pixtral
from whereformer.encodings.qwen2_vl import Qwen2VL
from whereformer.encodings.rope1d import RoPE1D
from whereformer.encodings.rope_axial import RoPEAxial
from whereformer.encodings.rope_mixed import RoPEMixed
from whereformer.encodings.rope_pixel import RoPEPixel
from whereformer.encodings.sincos import SinCos2D
from whereformer.encodings.spiral import SpiralRoPE
from whereformer.encodings.visionllama import VisionLLaMA
from whereformer.encodings.vjepa2 import VJEPA2

__all__ = [
    "EVA02",
    "IRPE",
    "PEG",
    "VJEPA2",
    "ComRoPE",
    "DINOv3",
    "GoldenGate",
    "Learned",
    "LieRE",
    "MRoPE",
    "NDRoPE",
    "NoPositions",
    "Pixtral",
    "Qwen2VL",
    "RoPE1D",
    "RoPEAxial",
    "RoPEMixed",
    "RoPEPixel",
    "SinCos2D",
    "SpiralRoPE",
    "VisionLLaMA",
    "half_to_interleaved",
    "interleaved_to_half",
]
