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

CONTEXTUAL: list[str] = []

BIASES: list[str] = []

ROTARY = [
    "rope1d",
    "rope1d(layout='half', scaling='pi')",
    "rope1d(scaling='ntk')",
    "rope_axial",
    "rope_axial(layout='half', scaling='yarn')",
    "rope_axial(theta=10000.0, scaling='yarn_paper')",
    "rope_pixel",
    "rope_pixel(bands='log', max_freq=224.0)",
    "rope_mixed",
    "rope_mixed(scaling='pi')",
    "eva02",
    "eva02(reference=None, grid_offset=1.0, order='x')",
    "dinov3",
    "dinov3(periods=(0.5, 40.0), normalise='max', shift=0.1, jitter=1.5)",
    "dinov3(normalise='min', rescale=None)",
    "pixtral",
    "pixtral(order='blocks', layout='half', scaling='ntk')",
    "qwen2_vl",
    "visionllama",
    "visionllama(scaling='yarn')",
    "vjepa2",
    "vjepa2(pairing='repeated', scaling='yarn')",
    "liere",
    "liere(block=3, shared=True, scaling='pi')",
    "mrope",
    "mrope(sections=(0, 1, 2), scaling='ntk')",
    "comrope",
    "comrope(kind='ap', block=4, perturb=1.0)",
    "golden_gate(max_freq=20.0)",
    "golden_gate(max_freq=20.0, zero_freqs=0.3, scaling='yarn')",
    "spiral",
    "spiral(directions=2, shared=True, clamped=True, scaling='none')",
    "nd_rope",
    "nd_rope(turned='scale', layout='half', scaling='ntk')",
    "nd_rope(turned='none')",
]

ALL = [*ABSOLUTE, *CONDITIONAL, *IRPE, *CONTEXTUAL, *BIASES, *ROTARY]

COMPILED = {
    *("learned", "sincos2d", "detr_learned(size=2, mode='interpolate')", "perceiver(bands=4, resolution=16)"),
    *("peg", "lepe"),
    *("irpe(on='qkv')", "irpe(method='quantization', quant='rank', on='qv')"),
    *("rope_axial(layout='half', scaling='yarn')", "rope_mixed(scaling='pi')", "liere", "dinov3"),
    *(
        "vjepa2(pairing='repeated', scaling='yarn')",
        "spiral(directions=2, shared=True, clamped=True, scaling='none')",
    ),
}
"""Compiling takes a second or more: one of each kind of code."""
