"""Attention modules whose positions no form can say: one paper, one file."""

from whereformer.layers.axial_deeplab import AxialAttention
from whereformer.layers.convit import GPSA
from whereformer.layers.pape import PaPE

__all__ = ["GPSA", "AxialAttention", "PaPE"]
