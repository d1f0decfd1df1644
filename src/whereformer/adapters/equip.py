"""Give a model another encoding, and take it back."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, EquippedBlock, EquippedEntry, EquippedModel
from whereformer.adapters.find import host_of
from whereformer.adapters.host import TOKENS, Host, Layout, Place
from whereformer.adapters.seats import Blocks, Encoding, Seat, seats_of, spelled
from whereformer.adapters.swap import Equipped, put, swap_back, swap_class
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError

Model = TypeVar("Model", bound=nn.Module)


def equip(
    model: Model,
    encoding: Encoding | Mapping[Blocks, Encoding],
    *,
    keep_own: bool = False,
    share: bool = False,
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
        host: where the parts of the model are, if it is none that is known.

    Returns:
        the same model.

    Raises:
        InputError: the model is of an unknown kind, or the encoding does not fit it.
    """
    if isinstance(model, EquippedModel):
        raise InputError(f"equip: the model has {model.encoding!r} already; whereformer.unequip it first")
    host = host_of(model) if host is None else host
    like = next(p for p in model.parameters() if p.is_floating_point())
    text = spelled(encoding)
    stages = seats_of(host, encoding, like, share=share, keep_own=keep_own)
    names = {id(module): name for name, module in model.named_modules()}
    own = tuple(f"{names[id(o.module)]}.{o.name}".lstrip(".") for o in host.own if o.counts)

    place = Place(host.stages[0].grid)
    changes = [*host.switches, *(() if keep_own else host.own)]
    before = [(change.module, change.name, put(change.module, change.name, change.silent)) for change in changes]
    first = stages[0][0].tokens if host.holds_first else []
    if first:
        stages[0][0].tokens = []
    for stage, seats in zip(host.stages, stages, strict=True):
        for seat in seats:
            _fill(seat, place, stage.layout)
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
        InputError: the model is not equipped.
    """
    if not isinstance(model, EquippedModel):
        raise InputError(f"unequip: {type(model).__name__} is not equipped")
    like, before = next(p for p in model.parameters() if p.is_floating_point()), model.before
    for module in list(model.modules()):
        if isinstance(module, Equipped):
            swap_back(module)
    for module, name, value in reversed(before):
        put(module, name, value)
        if isinstance(value, nn.Module):
            value.to(like.device, like.dtype).train(model.training)
        elif isinstance(value, Tensor):
            value.data = value.data.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
    return model


def _fill(seat: Seat, place: Place, layout: Layout) -> None:
    for heard in seat.attentions:
        if heard.encodings:
            attention = heard.attention
            swap_class(
                attention.module,
                attention.behaviour or EquippedAttention,
                encodings=_modules(heard.encodings, attention.module),
                place=place,
                grids=attention.grids,
            )
    block = seat.block
    if layout is not TOKENS and not (seat.tokens or any(heard.encodings for heard in seat.attentions)):
        return  # the others are told the grid, and compute themselves again on it
    swap_class(
        block.module,
        block.behaviour or EquippedBlock,
        encodings=_modules(seat.tokens, block.module),
        place=place,
        layout=layout,
        grad_checkpointing=False,
    )


def _modules(encodings: Sequence[PositionEncoding], like: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(encodings).train(like.training)
