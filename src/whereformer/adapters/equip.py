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
from whereformer.adapters.seats import Blocks, Encoding, Seat, seats_of, spelled, written
from whereformer.adapters.swap import Equipped, is_outermost, look, put, swap_all_back, swap_class
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError, check_bool
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
    for name, value in (("keep_own", keep_own), ("share", share)):
        check_bool(f"equip: {name}", value)
    host = host_of(model, grid) if host is None else _checked(host)
    like = next(p for p in model.parameters() if p.is_floating_point())
    text = spelled(encoding)
    stages = seats_of(host, encoding, like, share=share, keep_own=keep_own)
    first = stages[0][0].tokens if host.holds_first or host.first is not None else []
    if host.check_first is not None:
        host.check_first(first)
    names = {id(module): name for name, module in model.named_modules()}
    own = tuple(f"{names[id(o.module)]}.{o.name}".lstrip(".") for o in host.own if o.counts)

    heard = [attention for seats in stages for seat in seats for attention in seat.attentions]
    changes = [*host.switches, *(own for one in heard if one.encodings for own in one.attention.switches)]
    changes += () if keep_own else host.own
    before = [(change.module, change.name, look(change.module, change.name)) for change in changes]
    mine = {"encoding": text, "own": own, "before": before}
    mine["recipe"] = {"encoding": written(encoding), "keep_own": keep_own, "share": share}
    mine["recipe"] |= {"host": dict(host.options)} if host.options else {}
    modules = list(model.modules())
    try:
        for change in changes:
            put(change.module, change.name, change.silent)
        _change(model, host, stages, first, mine)
    except BaseException:  # an interruption too
        _take_back(modules, before)
        raise
    return model


def _change(
    model: nn.Module, host: Host, stages: list[list[Seat]], first: list[PositionEncoding], mine: dict[str, Any]
) -> None:
    """Let all parts of a model behave otherwise."""
    place = Place(host.stages[0].grid)
    if first:
        stages[0][0].tokens = []
    for stage, seats in zip(host.stages, stages, strict=True):
        for seat in seats:
            _fill(seat, place, stage)
    if host.first is not None:
        behaviour = host.first_behaviour or EquippedBlock
        _swap_block(host.first, first, place, host.stages[0].layout, behaviour)
    if host.entry is not None:
        module, grid_of = host.entry
        swap_class(module, EquippedEntry, place=place, grid_of=grid_of)
    for module, behaviour in host.swaps:
        swap_class(module, behaviour, place=place)
    if host.holds_first:
        mine["encodings"] = _modules(first, model)
    swap_class(model, host.behaviour or EquippedModel, place=place, **mine)


def _take_back(modules: Sequence[nn.Module], before: list[tuple[nn.Module, str, Any]]) -> None:
    for module in modules:
        swap_all_back(module)
    for module, name, value in reversed(before):
        put(module, name, value)


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
    if not like.is_meta and any(tensor.is_meta for _, _, value in before for tensor in _tensors(value)):
        raise InputError(
            "unequip: the model was loaded equipped, and the file did not hold what the model said itself"
        )
    _take_back(modules, before)
    for _, _, value in before:
        if isinstance(value, nn.Module):
            value.to(like.device, like.dtype).train(model.training)
        elif isinstance(value, Tensor):
            value.data = value.data.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
    return model


def _checked(host: Host) -> Host:
    """A description that someone wrote by hand."""
    if not isinstance(host, Host) or not host.stages or not all(stage.blocks for stage in host.stages):
        raise InputError(f"host={host!r}, expected a Host with stages of blocks")
    for own in host.own:
        if not hasattr(own.module, own.name):
            raise InputError(
                f"host: a {type(own.module).__name__} has no {own.name!r} that could say where tokens are"
            )
    return host


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [value] if isinstance(value, Tensor) else []


def _fill(seat: Seat, place: Place, stage: Stage) -> None:
    block, layout = seat.block, stage.layout
    speaking = [heard for heard in seat.attentions if heard.encodings]
    if block.behaviour is EquippedBlockThatAttends:
        (heard,) = seat.attentions
        both = list(dict.fromkeys([*seat.tokens, *heard.encodings]))
        more = {"grids": heard.attention.grids, "home": heard.attention.home or stage.grid}
        _swap_block(block.module, both, place, layout, block.behaviour, **more)
        return
    for heard in speaking:
        attention = heard.attention
        swap_class(
            attention.module,
            attention.behaviour or _behaviour(attention.module),
            encodings=_modules(heard.encodings, attention.module),
            place=place,
            grids=attention.grids,
            home=attention.home or stage.grid,
        )
    attentions = [heard.attention.module for heard in speaking]
    if block.module in attentions or not (layout is TOKENS or seat.tokens or attentions):
        return  # an attention alone; or a block that is told the grid, and is silent
    _swap_block(block.module, seat.tokens, place, layout, block.behaviour or EquippedBlock)


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
