"""Hosts of models that are told by the classes of their parts, and by a forward without numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from whereformer.adapters.behaviours import EquippedOnMap
from whereformer.adapters.host import Attention, Block, Channels, Host, Image, Layout, Own, Place, Stage
from whereformer.adapters.swap import Equipped
from whereformer.errors import InputError
from whereformer.grid import Grid

CHANNELS, IMAGE = Channels(), Image()

NARROW = ("rotations", "biases")
"""At what encodings may speak that know the width of keys, where values are wider."""


class Tells(Equipped, *((nn.Module,) if TYPE_CHECKING else ())):
    """Gives a map [batch, dim, height, width], whose tokens go on without it."""

    place: Place

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward(x, *args, **kwargs)
        self.place.grid = Grid(*out.shape[2:])
        return out


@dataclass(frozen=True)
class Family:
    """A family of models; called with one of them it gives the host.

    Blocks come in the order in which a forward calls them: those that attend. Where they are, and how wide their
    tokens, is seen by a forward at the home size on the meta device, which computes nothing.

    Args:
        blocks: the classes of blocks, and how they get their tokens: a layout, or a function of the block.
        attentions: the classes of attentions; from such a module to its description, or several of its parts.
        own: the classes of modules that say where tokens are; from such a module to what it says.
        deaf: from a block to why its attention takes no encoding (see `Block.deaf`), or "". If others attend it is
            left out, unless that attention is described.
        tells: from a model to the modules that behave as `Tells`, for blocks that are not told the grid.
        swaps: the classes of other modules that must behave in another way, and how.
        size: from a model to the height and width of its images, in pixels; by default where timm keeps them.
        behaviour: how the model itself behaves.
    """

    blocks: Mapping[type[nn.Module], Layout | Callable[[Any], Layout]]
    attentions: Mapping[type[nn.Module], Callable[[Any], Attention | list[Attention]]] = field(
        default_factory=dict
    )
    own: Mapping[type[nn.Module], Callable[[Any], Iterable[Own]]] = field(default_factory=dict)
    deaf: Callable[[Any], str] = lambda block: ""
    tells: Callable[[Any], Iterable[nn.Module]] = lambda model: ()
    swaps: Mapping[type[nn.Module], type[Equipped]] = field(default_factory=dict)
    size: Callable[[Any], tuple[int, int]] | None = None
    behaviour: type[Equipped] | None = None

    def __call__(self, model: nn.Module) -> Host:
        blocks: dict[nn.Module, Layout] = {}
        attentions: dict[nn.Module, list[Attention]] = {}
        for module in model.modules():
            if type(module) in self.blocks:
                found = [a for m in module.modules() if type(m) in self.attentions
                         for a in _several(self.attentions[type(m)](m))]  # fmt: skip
                if found or self.deaf(module):
                    layout = self.blocks[type(module)]
                    blocks[module] = layout if isinstance(layout, Layout) else layout(module)
                    attentions[module] = found
        if any(attentions.values()):
            blocks = {module: layout for module, layout in blocks.items() if attentions[module]}
        heard = [attention for found in attentions.values() for attention in found]
        tells = list(self.tells(model))
        seen = look(model, blocks, heard, tells, (self.size or home_size)(model))
        stages: list[Stage] = []
        for module in (m for m in seen if m in blocks):
            grid, dim = seen[module]
            found = [replace(a, home=seen[a.module].grid) if a.module in seen else a for a in attentions[module]]
            block = Block(module, found, deaf=self.deaf(module))
            last = stages[-1] if stages else None
            if last is not None and (last.grid, last.dim, last.layout) == (grid, dim, blocks[module]):
                stages[-1] = replace(last, blocks=[*last.blocks, block])
            else:
                heads = next((a.heads for a in found if a.heads and dim % a.heads == 0), 1)
                stages.append(Stage(dim, heads, grid, [block], blocks[module]))
        return Host(
            stages,
            own=[own for m in model.modules() for own in self.own.get(type(m), _none)(m)],
            switches=[
                Own(a.module, "fused_attn", True) for a in heard if getattr(a.module, "fused_attn", True) is False
            ],
            swaps=[
                *((m, Tells) for m in tells),
                *((m, self.swaps[type(m)]) for m in model.modules() if type(m) in self.swaps),
            ],
            behaviour=self.behaviour,
        )


class Seen(NamedTuple):
    """What a module was called with.

    Args:
        grid: where its tokens are.
        dim: features of each.
    """

    grid: Grid
    dim: int


@torch.no_grad()
def look(
    model: nn.Module,
    blocks: Mapping[nn.Module, Layout],
    attentions: Iterable[Attention],
    tells: Iterable[nn.Module],
    size: tuple[int, int],
) -> dict[nn.Module, Seen]:
    """What blocks, and attentions on maps of their own, are called with at a size of images, in order."""
    place, seen = Place(Grid(1, 1)), dict[nn.Module, Seen]()
    layouts = dict(blocks)
    layouts |= {
        a.module: a.behaviour.layout for a in attentions if a.behaviour and issubclass(a.behaviour, EquippedOnMap)
    }

    def see(layout: Layout, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, *rest = inputs
        seen.setdefault(module, Seen(layout.grid(place, x, *rest, **named), layout.tokens(x).shape[-1]))

    def tell(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        place.grid = Grid(*out.shape[2:])

    hooks = [
        module.register_forward_pre_hook(partial(see, layout), with_kwargs=True)
        for module, layout in layouts.items()
    ]
    hooks += [module.register_forward_hook(tell) for module in tells]
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    like = next(p for p in model.parameters() if p.is_floating_point())
    images = torch.empty(2, getattr(model, "in_chans", 3), *size, device="meta", dtype=like.dtype)
    try:
        functional_call(model, state, images)
    except (RuntimeError, AssertionError) as error:
        name = type(model).__name__
        raise InputError(f"equip: {name} does not take images of {size[0]} x {size[1]}, its home size") from error
    finally:
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            getattr(
                module, "attention_bias_cache", {}
            ).clear()  # timm keeps what it computed, and no copy can be made
    return seen


def reduced(grid: Iterable[int], model: Any, stage: int = 0) -> tuple[int, int]:
    """The size in pixels of images whose map is such a grid in a stage."""
    height, width = (n * model.feature_info[stage]["reduction"] for n in grid)
    return height, width


def home_size(model: Any) -> tuple[int, int]:
    """The height and width in pixels that a timm model was built for."""
    for holder in (getattr(model, "patch_embed", None), model):
        size = getattr(holder, "img_size", None)
        if size is not None:
            return (size, size) if isinstance(size, int) else tuple(size)
    _, height, width = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
    return height, width


def _several(found: Attention | list[Attention]) -> list[Attention]:
    return found if isinstance(found, list) else [found]


def _none(module: nn.Module) -> Iterator[Own]:
    return iter(())
