"""CPVT models in one call."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from whereformer.adapters.equip import equip
from whereformer.encodings import PEG
from whereformer.errors import InputError

if TYPE_CHECKING:
    from timm.models import VisionTransformer

SIZES = {"tiny": "CPVT-Ti", "small": "CPVT-S", "base": "CPVT-B"}


def cpvt(
    size: str = "small", *, gap: bool = False, after: int | Sequence[int] = (0, 1, 2, 3, 4), **options: Any
) -> "VisionTransformer":
    """A CPVT of Chu et al. 2021: DeiT with position encoding generators instead of a position table.

    Args:
        size: "tiny" (CPVT-Ti), "small" (CPVT-S) or "base" (CPVT-B).
        gap: CPVT-GAP, without class token: the head reads the mean of the patches. The mean comes after the final
            norm, as in Twins by the same authors; CPVT's own code was not published.
        after: the blocks after which a generator stands, counted from 0. The default is one after each of the
            first five blocks, the paper's "0-5" (‡ in its tables); 0 is its models without ‡.
        options: for timm's `create_model`, such as num_classes, img_size, drop_path_rate.

    Returns:
        a timm `VisionTransformer`, equipped; it takes images of any size whose sides its patches divide.

    Raises:
        InputError: a size that is not there, or options that timm does not take.

    >>> from whereformer import describe
    >>> print(describe(cpvt("tiny", gap=True, after=0, num_classes=10)))
    EquippedVisionTransformer on Grid(height=14, width=14, prefix=0)
      own position encoding: none
      blocks.1: PEG(after=(0,), kernel_size=3), speaks at: tokens, parameters: 1,920
    """
    if size not in SIZES:
        raise InputError(f"cpvt: size={size!r}, expected one of {list(SIZES)}")
    try:
        from timm import create_model
    except ModuleNotFoundError as error:
        raise InputError(f'cpvt needs {error.name}: pip install "whereformer[lab]"') from None
    pooling = {"class_token": False, "global_pool": "avg", "fc_norm": False} if gap else {}
    chosen = {"pos_embed": "none", "dynamic_img_size": True, **pooling, **options}
    try:
        model = create_model(f"deit_{size}_patch16_224", **chosen)
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        raise InputError(f"cpvt: {options} does not fit DeiT: {' '.join(str(error).split())}") from error
    return equip(cast("VisionTransformer", model), partial(PEG, after=after))
