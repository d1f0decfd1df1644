"""What of the catalog is held to the contract: one spelling for each kind of code."""

ABSOLUTE = [
    "none",
    "learned",
    "learned(prefix_rows=False)",
    "learned(mode='bilinear', antialias=False)",
    "vit2d",
    "sincos1d",
    "sincos1d(layout='half', temperature=20.0)",
    "sincos2d",
    "sincos2d(layout='moco')",
    "sincos2d(layout='timm')",
    "sincos2d(layout='big_vision')",
    "sincos2d(layout='detr', temperature=20.0)",
    "sincos3d",
    "detr_sine",
    "detr_sine(normalize=False)",
    "detr_sine(offset=-0.5, scale=3.0)",
    "detr_learned(size=300)",
    "detr_learned(size=2, mode='interpolate')",
    "flexivit",
    "flexivit(size=(3, 5), antialias=False)",
    "abs_win",
    "abs_win(window=(2, 3), size=(4, 2), antialias=False)",
    "navit(size=300)",
    "navit(size=2, mode='interpolate', combine='concat')",
    "navit(coordinate='fractional', combine='product')",
    "pix2struct",
    "fourier",
    "fourier(layout='sam', sigma=1.0)",
    "learnable_fourier(features=16)",
    "learnable_fourier(features=16, groups='apart', gamma=10.0)",
    "perceiver(bands=4, resolution=16)",
    "xcit",
]

CONDITIONAL = [
    "peg",
    "peg(after=(0, 1, 2, 3, 4), kernel_size=5)",
    "peg(after=-1, bias=False)",
    "lepe",
    "lepe(kernel_size=5)",
]

IRPE = [
    "irpe",
    "irpe(on='qkv')",
    "irpe(on='v', shared=False)",
    "irpe(on='qk', index='clip')",
    "irpe(method='cross', on='qkv', shared=False)",
    "irpe(method='euclidean', ratio=20, on='qkv')",
    "irpe(method='euclidean', rounded=False, on='k')",
    "irpe(method='quantization', ratio=33, on='qk')",
    "irpe(method='quantization', quant='rank', on='qv')",
    "irpe(mode='bias', on='qk')",
    "irpe(mode='bias', method='cross', shared=False, scale_bias=True)",
    "irpe(mode='bias', method='euclidean', index='clip', on='q')",
    "rpe-2.0-product-ctx-1-k",
]

CONTEXTUAL = [
    "vit_relative",
    "shaw",
    "shaw(on='k')",
    "shaw(on='v', shared=False)",
    "shaw(offsets='raster', clip=5)",
    "transformer_xl",
    "transformer_xl(shared=True, clip=2)",
    "transformer_xl(offsets='raster', clip=4)",
    "huang",
    "huang(offsets='raster', shared=False)",
    "huang(method=1)",
    "huang(method=1, offsets='raster', shared=False)",
    "huang(method=2, shared=False)",
    "huang(method=3)",
    "huang(method=3, shared=False)",
    "sasa",
    "sasa(window=3, scaled=False)",
    "botnet",
    "botnet(scaled=False)",
    "decomposed",
    "decomposed(scaled=True, std=0)",
    "axial_deeplab",
    "axial_deeplab(axis='width')",
]

BIASES: list[str] = []

ROTARY: list[str] = []

ALL = [*ABSOLUTE, *CONDITIONAL, *IRPE, *CONTEXTUAL, *BIASES, *ROTARY]

COMPILED = {
    *("learned", "sincos2d", "detr_learned(size=2, mode='interpolate')", "perceiver(bands=4, resolution=16)"),
    *("peg", "lepe"),
    *("shaw", "transformer_xl", "decomposed"),
    *("irpe(on='qkv')", "irpe(method='quantization', quant='rank', on='qv')"),
}
"""Compiling takes a second or more: one of each kind of code."""
