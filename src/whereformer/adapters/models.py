"""timm's architectures: which of them attend over a grid, and what can be attached to each."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whereformer.adapters.attends import attending
from whereformer.adapters.find import host_of
from whereformer.adapters.host import Attention, Host
from whereformer.adapters.seats import spelled
from whereformer.encoding import MOMENTS
from whereformer.errors import InputError

_attends: dict[type[nn.Module], bool] = {}
"""The classes of modules that have been watched, and whether they attend over a grid."""


@dataclass(frozen=True)
class Architecture:
    """What `equip` can do with one of timm's architectures as it is built without options.

    Args:
        name: timm's.
        family: the module of timm that it comes from.
        attends: whether it attends over a grid: softmax attention between several tokens of an image.
        equips: whether `equip` knows it.
        takes: at which moments encodings can speak: in "all" of its blocks, in "some", or not at all, "".
        own: what it says itself of where tokens are: an encoding that equals it, or the names of its attributes.
        equal: whether `own` is an encoding: given to `equip`, it goes on from the weights and changes nothing.
        grid: (height, width) of its tokens at home, in a pyramid those of the first stage.
        prefix: tokens without a place before them.
        heads, head_dim: of its first attention.
        why: what cannot be, and why; "" if all can.
    """

    name: str
    family: str
    attends: bool = False
    equips: bool = False
    takes: Mapping[str, str] | None = None
    own: str = ""
    equal: bool = False
    grid: tuple[int, int] | None = None
    prefix: int = 0
    heads: int = 0
    head_dim: int = 0
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Share:
    """How many of some architectures attend over a grid, and how many of these equip in one call."""

    architectures: int
    attending: int
    equipped: int
    others: int
    """Those that equip although they do not attend over a grid: encodings of tokens alone."""

    @classmethod
    def of(cls, found: Sequence[Architecture]) -> "Share":
        attend = [one for one in found if one.attends]
        equipped = sum(one.equips for one in attend)
        return cls(len(found), len(attend), equipped, sum(one.equips for one in found) - equipped)

    @property
    def percent(self) -> float:
        return 100 * self.equipped / self.attending if self.attending else 100.0

    def __str__(self) -> str:
        others = f"; {self.others} more take encodings of tokens" if self.others else ""
        share = f", {self.equipped} of these equip in one call: {self.percent:.1f} %" if self.attending else ""
        return f"{self.architectures} architectures, {self.attending} attend over a grid{share}{others}."


def names(pattern: str = "") -> list[str]:
    """timm's architectures with this in their names; or, with * or ? in it, whose whole names are like it.

    Raises:
        InputError: there are none.
    """
    import timm

    found = timm.list_models(pattern if any(c in pattern for c in "*?[") else f"*{pattern}*")
    if not found:
        close = difflib.get_close_matches(pattern.strip("*?"), timm.list_models(), 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise InputError(f"pattern={pattern!r}: no architecture of timm is like it{hint}")
    return found


def architectures(pattern: str = "") -> Iterator[Architecture]:
    """One after the other, in timm's order; each is built, without memory for its weights, to be looked at."""
    for name in names(pattern):
        yield look(name)


def look(name: str, *, watch: bool = True) -> Architecture:
    """One of timm's architectures; without watching it only what `equip` knows of it."""
    import timm

    try:
        with torch.device("meta"), _Unfilled():
            model: Any = timm.create_model(name).eval()
        family = type(model).__module__.rpartition(".")[2]
        attends = watch and _attends_over_a_grid(model)
    except Exception as error:  # whatever timm, or a device without numbers, has against it
        said = " ".join(str(error).split())
        return Architecture(name, family="", why=f"cannot be looked at: {type(error).__name__}: {said}")
    try:
        host = host_of(model)
    except InputError as error:
        return Architecture(name, family, attends, why=_reason(error) if attends else "no attention over a grid")
    return _described(name, family, attends, host)


def _described(name: str, family: str, attends: bool, host: Host) -> Architecture:
    stage = host.stages[0]
    blocks = [block for stage in host.stages for block in stage.blocks]
    heard = [[a if isinstance(a, Attention) else Attention(a) for a in block.attentions] for block in blocks]
    takes = {"tokens": "all"}
    for moment in MOMENTS[1:]:
        hearing = sum(any(moment in attention.takes for attention in found) for found in heard)
        takes[moment] = "all" if hearing == len(blocks) else "some" if hearing else ""
    first = next((attention for found in heard for attention in found), None)
    dim = first.dim if first is not None and first.dim else stage.dim
    heads = first.heads if first is not None and first.heads else stage.heads
    own = {own.name: None for own in host.own if own.counts and getattr(own.module, own.name, None) is not None}
    return Architecture(
        name,
        family,
        attends,
        True,
        takes,
        ", ".join(own) if host.equal is None else _text(host.equal),
        host.equal is not None,
        (stage.grid.height, stage.grid.width),
        stage.grid.prefix,
        heads,
        dim // heads,
        next((f"attention {block.deaf}" for block in blocks if block.deaf), ""),
    )


def _text(equal: str | Mapping[Any, str]) -> str:
    return equal if isinstance(equal, str) else spelled(equal)


def _attends_over_a_grid(model: nn.Module) -> bool:
    """Found by watching; a model all of whose modules have been watched in others is not watched again."""
    kinds = {type(module) for module in model.modules()}
    if not any(_attends.get(kind) for kind in kinds) and not kinds <= _attends.keys():
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
        found = attending(model, torch.zeros(1, *size, device="meta"))
        for kind in kinds:
            _attends[kind] = _attends.get(kind, False) or kind in found
    return any(_attends.get(kind) for kind in kinds)


class _Unfilled(TorchFunctionMode):
    """What fills tensors fills none that have no memory, and takes no time: most of that of building a model."""

    FILLS = re.compile(
        r"(uniform|normal|trunc_normal|constant|ones|zeros|zero|fill|copy|erfinv|mul|div|add|clamp)_"
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        filled = args[0] if args else None
        if isinstance(filled, Tensor) and filled.is_meta and self.FILLS.fullmatch(getattr(func, "__name__", "")):
            return filled
        return func(*args, **(kwargs or {}))


def _reason(error: InputError) -> str:
    text = str(error).removeprefix("equip: ")
    return "nobody has described its parts" if "none of the models that are known" in text else text
