"""Encodings by name: the catalog, and the text that asks for them."""

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Callable

from whereformer import encodings
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid

Factory = Callable[[int, int, Grid], PositionEncoding]
"""`factory(dim, num_heads, grid)` builds one encoding: a class, or a `functools.partial` of one."""

FAMILIES: dict[str, dict[str, type[PositionEncoding]]] = {
    "absolute": {
        "none": encodings.NoPositions,
        "learned": encodings.Learned,
        "vit2d": encodings.ViT2D,
        "sincos1d": encodings.SinCos1D,
        "sincos2d": encodings.SinCos2D,
        "sincos3d": encodings.SinCos3D,
        "detr_sine": encodings.DETRSine,
        "detr_learned": encodings.DETRLearned,
        "flexivit": encodings.FlexiViT,
        "abs_win": encodings.AbsWin,
        "navit": encodings.NaViT,
        "pix2struct": encodings.Pix2Struct,
        "fourier": encodings.Fourier,
        "learnable_fourier": encodings.LearnableFourier,
        "perceiver": encodings.Perceiver,
        "xcit": encodings.XCiT,
    },
    "conditional": {
        "peg": encodings.PEG,
        "lepe": encodings.LePE,
    },
    "contextual": {
        "irpe": encodings.IRPE,
        "vit_relative": encodings.ViTRelative,
        "shaw": encodings.Shaw,
        "transformer_xl": encodings.TransformerXL,
        "huang": encodings.Huang,
        "sasa": encodings.SASA,
        "botnet": encodings.BoTNet,
        "decomposed": encodings.Decomposed,
        "axial_deeplab": encodings.AxialDeepLab,
    },
    "biases": {
        "swin": encodings.Swin,
        "maxvit": encodings.MaxViT,
        "beit": encodings.BEiT,
        "levit": encodings.LeViT,
        "log_cpb": encodings.LogCPB,
        "dpb": encodings.DPB,
        "t5": encodings.T5,
        "alibi": encodings.ALiBi,
        "alibi2d": encodings.ALiBi2D,
        "lookhere": encodings.LookHere,
        "rmt": encodings.RMT,
        "kerple": encodings.KERPLE,
        "fire": encodings.FIRE,
    },
    "rotary": {
        "rope1d": encodings.RoPE1D,
        "rope_axial": encodings.RoPEAxial,
        "rope_pixel": encodings.RoPEPixel,
        "rope_mixed": encodings.RoPEMixed,
        "eva02": encodings.EVA02,
        "dinov3": encodings.DINOv3,
        "pixtral": encodings.Pixtral,
        "qwen2_vl": encodings.Qwen2VL,
        "visionllama": encodings.VisionLLaMA,
        "vjepa2": encodings.VJEPA2,
        "mrope": encodings.MRoPE,
        "liere": encodings.LieRE,
        "comrope": encodings.ComRoPE,
        "golden_gate": encodings.GoldenGate,
        "spiral": encodings.SpiralRoPE,
        "nd_rope": encodings.NDRoPE,
    },
}
"""Encodings of one kind, and their names."""

CATALOG: dict[str, type[PositionEncoding]] = {
    name: cls for names in FAMILIES.values() for name, cls in names.items()
}

MODULES = {
    "convit": "whereformer.layers.GPSA",
    "pape": "whereformer.layers.PaPE",
    "axial_attention": "whereformer.layers.AxialAttention",
}
"""Attention modules, for what no form can say."""

_OLD_NAME = re.compile(
    r"rpe-(?P<ratio>\d+(\.\d+)?)-(?P<method>euc|quant|cross|product)-(?P<mode>bias|ctx)-(?P<shared>[01])-(?P<on>[qkv]+)"
)


def parse(text: str) -> list[functools.partial[PositionEncoding]]:
    """What a text such as "learned + irpe(method='product', on='qkv')" asks for.

    Names are those of `CATALOG`, options are the keyword arguments of their classes, values are Python
    literals. The iRPE repository's names, rpe-{ratio}-{method}-{mode}-{shared heads}-{on}, are understood too.

    Returns:
        one factory each: `factory(dim, num_heads, grid)` builds the encoding.

    Raises:
        InputError: an unknown name or option, or a text that is not of this form.

    >>> [spell(factory) for factory in parse("learned + irpe(on='qkv')")]
    ['learned', "irpe(on='qkv')"]
    >>> [spell(factory) for factory in parse("rpe-2.0-product-ctx-1-k")]
    ["irpe(ratio=2.0, method='product', mode='contextual', shared=True, on='k')"]
    """
    if not isinstance(text, str):
        raise InputError(f"encoding {text!r}, expected a text such as \"learned + irpe(on='qkv')\"")
    try:
        tree = ast.parse(_OLD_NAME.sub(_from_old_name, text.strip()), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise InputError(f"encoding {text[:200]!r} cannot be read: {error}. {_EXAMPLE}") from None
    return [_factory(term, text) for term in _terms(tree.body)]


_EXAMPLE = "Expected names joined by +, such as \"learned + irpe(method='product', on='qkv')\""


def spell(factory: Factory) -> str:
    """The text of one factory: `parse` reversed."""
    options = factory.keywords if isinstance(factory, functools.partial) else {}
    cls = factory.func if isinstance(factory, functools.partial) else factory
    name = next((name for name, listed in CATALOG.items() if listed is cls), getattr(cls, "__name__", str(cls)))
    inside = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"{name}({inside})" if inside else name


def _from_old_name(old: re.Match[str]) -> str:
    mode = {"ctx": "contextual"}.get(old["mode"], old["mode"])
    return (
        f"irpe(ratio={old['ratio']}, method={old['method']!r}, mode={mode!r},"
        f" shared={old['shared'] == '1'}, on={old['on']!r})"
    )


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _factory(term: ast.expr, text: str) -> functools.partial[PositionEncoding]:
    call = term if isinstance(term, ast.Call) else ast.Call(term, [], [])
    if not isinstance(call.func, ast.Name) or call.args or any(key.arg is None for key in call.keywords):
        raise InputError(
            f"encoding {text!r}: {ast.unparse(term)!r} is not a name with keyword options. {_EXAMPLE}"
        )
    name = call.func.id
    if name in MODULES:
        raise InputError(f"{name!r} is an attention module of its own, not an encoding: see {MODULES[name]}")
    if name not in CATALOG:
        close = difflib.get_close_matches(name, CATALOG, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise InputError(f"unknown encoding {name!r}{hint}, expected one of {sorted(CATALOG)}")
    accepted = options(CATALOG[name])
    given = {}
    for key in call.keywords:
        if key.arg not in accepted:
            raise InputError(f"{name} has no option {key.arg!r}, expected one of {sorted(accepted)}")
        if key.arg in given:
            raise InputError(f"{name}: {key.arg} is given twice, in {text!r}")
        try:
            given[key.arg] = ast.literal_eval(key.value)
        except (ValueError, TypeError):
            value = ast.unparse(key.value)
            raise InputError(f"{name}: {key.arg}={value} is not a literal (text needs quotes)") from None
        if isinstance(accepted[key.arg], bool) and not isinstance(given[key.arg], bool):
            raise InputError(f"{name}: {key.arg}={given[key.arg]!r}, expected True or False")
    return functools.partial(CATALOG[name], **given)


def options(cls: type[PositionEncoding]) -> dict[str, object]:
    """The keyword arguments of an encoding's own, and their defaults."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
