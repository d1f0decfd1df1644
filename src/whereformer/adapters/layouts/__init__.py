"""Official layouts: one file per repository, each a value."""

from whereformer.adapters.files import Entries
from whereformer.adapters.layouts import (
    beit,
    deit3,
    detectron2,
    dinov2,
    dinov3,
    eva02,
    irpe,
    lookhere,
    mae,
    mmpretrain,
    rope_vit,
    sam,
    swin,
    twins,
    vjepa2,
)
from whereformer.adapters.layouts.layout import Layout
from whereformer.errors import InputError

LAYOUTS = (
    irpe.DEIT,
    irpe.DETR,
    twins.LAYOUT,
    rope_vit.MIXED,
    rope_vit.SWIN_ROPE,
    swin.SWIN,
    swin.SWIN_V2,
    beit.LAYOUT,
    sam.LAYOUT,
    dinov2.WITH_REGISTERS,
    dinov2.LAYOUT,
    dinov2.TEACHER,
    dinov3.LAYOUT,
    eva02.LAYOUT,
    lookhere.LAYOUT,
    vjepa2.LAYOUT,
    vjepa2.TRANSFORMERS,
    mae.LAYOUT,
    detectron2.LAYOUT,
    mmpretrain.VIT,
    mmpretrain.BEIT,
    mmpretrain.SWIN,
    mmpretrain.SWIN_V2,
    deit3.LAYOUT,
    rope_vit.AXIAL,
)
"""Every layout, in the order in which they are tried."""


def recognise(entries: Entries) -> Layout | None:
    """The layout of these names and shapes; None: none of these, so timm's own, or an unknown one."""
    return next((layout for layout in LAYOUTS if layout.fits(entries)), None)


def layout_of(name: str) -> Layout:
    """The layout of that name."""
    found = [layout for layout in LAYOUTS if layout.name == name]
    if not found:
        raise InputError(f"layout {name!r}, expected one of {[layout.name for layout in LAYOUTS]}")
    return found[0]
