"""Give a model another encoding, and take it back."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from whereformer.adapters.behaviours import (
    EquippedAttention,
    EquippedBlock,
    EquippedBlockThatAttends,
    EquippedEntry,
    EquippedModel,
)
from whereformer.adapters.find import host_of, refuse_wrapped
from whereformer.adapters.host import TOKENS, Host, Layout, Place, Stage
from whereformer.adapters.multihead import EquippedMultiheadAttention
from whereformer.adapters.seats import Blocks, Encoding, Seat, seats_of, spelled
from whereformer.adapters.swap import Equipped, is_outermost, put, swap_back, swap_class
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid

Model = TypeVar("Model", bound=nn.Module)


def equip(
    model: Model,
    encoding: Encoding | Mapping[Blocks, Encoding],
    *,
    keep_own: bool = False,
    share: bool = False,
    grid: Grid | None = None,
    host: Host | None = None,
) -> Model:
    """Give a vision transformer another position encoding, in place; weights and their names stay.

    What the model itself says of where tokens are is removed, unless `keep_own`; an encoding of that very kind
    ("learned" in a ViT, "swin" in a Swin, "peg" in Twins) starts from it. If anything fails, the model is left as
    it was. `unequip` takes it all back.

    In a pyramid each stage is a transformer of its own: an encoding stands in every stage where it would stand in
    a model of that depth, in the stage's width and on its grid. Where attention stays within windows, encodings
    speak on the grid of a window.

    Args:
        model: of timm, transformers or torchvision, or any with a `host`.
        encoding: a text for `whereformer.parse`, such as "learned + irpe(on='qkv')"; or an encoding class, a
            `functools.partial` of one, or a sequence of these; or different ones for different blocks,
            {range(0, 6): "rope_axial", (6, 7): "irpe"}, counted from 0 through the model: those named together are
            taken as a transformer of their own.
        keep_own: keep what the model itself says as well.
        share: one encoding, with one set of parameters, for all blocks of a stage; else each has its own.
        grid: the home grid, for what does not know it: torch's `nn.MultiheadAttention`, `nn.TransformerEncoder`
            and its layers. Their tokens are taken to lie there until `model.set_grid(grid)` says otherwise.
        host: where the parts of the model are, if it is none that is known.

    Returns:
        the same model.

    Raises:
        InputError: the model is of an unknown kind, or the encoding does not fit it.
    """
    if isinstance(model, EquippedModel):
        raise InputError(f"equip: the model has {model.encoding!r} already; whereformer.unequip it first")
    host = host_of(model, grid) if host is None else host
    like = next(p for p in model.parameters() if p.is_floating_point())
    text = spelled(encoding)
    stages = seats_of(host, encoding, like, share=share, keep_own=keep_own)
    names = {id(module): name for name, module in model.named_modules()}
    own = tuple(f"{names[id(o.module)]}.{o.name}".lstrip(".") for o in host.own if o.counts)

    place = Place(host.stages[0].grid)
    changes = [*host.switches, *(() if keep_own else host.own)]
    before = [(change.module, change.name, put(change.module, change.name, change.silent)) for change in changes]
    first = stages[0][0].tokens if host.holds_first or host.first is not None else []
    if first:
        stages[0][0].tokens = []
    for stage, seats in zip(host.stages, stages, strict=True):
        for seat in seats:
            _fill(seat, place, stage)
    if host.first is not None:
        _swap_block(host.first, first, place, host.stages[0].layout)
    if host.entry is not None:
        module, grid_of = host.entry
        swap_class(module, EquippedEntry, place=place, grid_of=grid_of)
    for module, behaviour in host.swaps:
        swap_class(module, behaviour, place=place)
    mine = {"place": place, "encoding": text, "own": own, "before": before}
    if host.holds_first:
        mine["encodings"] = _modules(first, model)
    swap_class(model, host.behaviour or EquippedModel, **mine)
    return model


def unequip(model: Model) -> Model:
    """Take back what `equip` did, in place: what the model said itself is there again, with its weights of then.

    Raises:
        InputError: the model is not equipped, or something else has changed it since then.
    """
    refuse_wrapped(model, "unequip")
    if not isinstance(model, EquippedModel):
        raise InputError(f"unequip: {type(model).__name__} is not equipped")
    modules = [module for module in model.modules() if isinstance(module, Equipped)]
    for module in modules:
        if not is_outermost(module):
            raise InputError(f"unequip: something else changed the class of a {type(module).__name__} since then")
    like, before = next(p for p in model.parameters() if p.is_floating_point()), model.before
    for module in modules:
        while isinstance(module, Equipped):
            swap_back(module)
    for module, name, value in reversed(before):
        put(module, name, value)
        if isinstance(value, nn.Module):
            value.to(like.device, like.dtype).train(model.training)
        elif isinstance(value, Tensor):
            value.data = value.data.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
    return model


def _fill(seat: Seat, place: Place, stage: Stage) -> None:
    block, layout, itself = seat.block, stage.layout, None
    for heard in seat.attentions:
        attention, module = heard.attention, heard.attention.module
        mine = {"place": place, "grids": attention.grids, "home": attention.home or stage.grid}
        if module is block.module and not isinstance(module, nn.MultiheadAttention):
            itself = mine, heard.encodings
        elif heard.encodings:
            behaviour = attention.behaviour or _behaviour(module)
            swap_class(module, behaviour, encodings=_modules(heard.encodings, module), **mine)
    speaking = [heard.attention.module for heard in seat.attentions if heard.encodings]
    if isinstance(block.module, Equipped) or not (layout is TOKENS or seat.tokens or speaking):
        return  # an attention alone; or a block that is told the grid, and is silent
    if itself is None:
        _swap_block(block.module, seat.tokens, place, layout, block.behaviour or EquippedBlock)
    else:
        mine, encodings = itself
        both = list(dict.fromkeys([*seat.tokens, *encodings]))
        _swap_block(
            block.module, both, layout=layout, behaviour=block.behaviour or EquippedBlockThatAttends, **mine
        )


def _swap_block(
    module: nn.Module,
    tokens: Sequence[PositionEncoding],
    place: Place,
    layout: Layout,
    behaviour: type[Equipped] = EquippedBlock,
    **more: Any,
) -> None:
    held = _modules(tokens, module)
    mine = {"encodings": held, "place": place, "layout": layout, "grad_checkpointing": False, **more}
    swap_class(module, behaviour, **mine)


def _behaviour(module: nn.Module) -> type[EquippedAttention]:
    return EquippedMultiheadAttention if isinstance(module, nn.MultiheadAttention) else EquippedAttention


def _modules(encodings: Sequence[PositionEncoding], like: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(encodings).train(like.training)
