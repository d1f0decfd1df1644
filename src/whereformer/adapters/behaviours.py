"""What the parts of an equipped model do beside what they did before."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from whereformer.adapters.host import Channels, Grids, Image, Layout, Place
from whereformer.adapters.swap import Equipped
from whereformer.attention import attention, encode
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid

Module = nn.Module if TYPE_CHECKING else object


class EquippedModel(Equipped, Module):
    """Knows its encodings, so that others can ask."""

    place: Place
    encoding: str
    """The text of what it was equipped with."""
    own: tuple[str, ...]
    """The names of what the model itself had to say where tokens are, kept or not."""
    recipe: dict[str, Any]
    """What `equip` was asked for, as JSON: encoding, keep_own, share; and host, if that has options."""
    before: list[tuple[nn.Module, str, Any]]
    """What `unequip` puts back: module, name, value."""

    @property
    def home_grid(self) -> Grid:
        """Where tokens are at the size the model was built for; in a pyramid, those of the first stage."""
        return self.place.home

    def set_grid(self, grid: Grid) -> None:
        """Where the tokens of this thread's next forwards are, for a model that cannot see it itself."""
        if not isinstance(grid, Grid):
            raise InputError(f"set_grid: grid={grid!r}, expected a whereformer.Grid")
        self.place.grid = grid

    def no_weight_decay(self) -> set[str]:
        own = getattr(super(), "no_weight_decay", set)
        return set(own()) | names_of_parameters(self)


class EquippedEntry(Equipped, Module):
    """Tells where the tokens are that it makes."""

    place: Place
    grid_of: Callable[[Tensor, Tensor], Grid]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward(x, *args, **kwargs)
        self.place.grid = self.grid_of(x, out)
        return out


class EquippedBlock(Equipped, Module):
    """Encodings of tokens before a block; the grid it was computed on, when it is computed again."""

    encodings: nn.ModuleList
    place: Place
    layout: Layout
    grad_checkpointing: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        compute = partial(self._compute, self.layout.grid(self.place, x, *args, **kwargs))
        if self.grad_checkpointing:
            return checkpoint(compute, x, *args, use_reentrant=False, **kwargs)
        return compute(x, *args, **kwargs)

    def _compute(self, grid: Grid, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.place.grid is not grid:  # computed again, the place is a later forward's, or another thread's
            self.place.grid = grid
        if len(self.encodings):
            x = self.layout.back(encode(self.layout.tokens(x), grid, self.before()), x)
        return super().forward(x, *args, **kwargs)

    def before(self) -> Iterable[PositionEncoding]:
        """The encodings of tokens before the block."""
        return held(self)


class EquippedAttention(Equipped, Module):
    """Its own projections around our attention."""

    encodings: nn.ModuleList
    place: Place
    grids: Grids
    home: Grid
    """From which grid `grids` starts at home."""
    heads_axis: ClassVar[int] = -3
    """Which axis of queries holds the heads, if there are more than four."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        calls: list[str] = []
        with _Ours(self, calls):
            out = super().forward(*args, **kwargs)
        if not calls:
            raise InputError(
                f"{type(self).__name__}: its forward did not call torch's scaled_dot_product_attention, so"
                " its encodings did not speak"
            )
        return out

    def inside(self) -> Iterable[PositionEncoding]:
        """The encodings in the attention."""
        return held(self)


class EquippedOnMap(EquippedAttention):
    """An attention that gets a map [batch, dim, height, width], all of it or a window, and is on that grid."""

    layout: ClassVar[Layout] = Channels()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.place.grid = self.layout.grid(self.place, x)
        return super().forward(x, *args, **kwargs)


class EquippedOnImage(EquippedOnMap):
    """The same for [batch, height, width, dim]."""

    layout = Image()


class EquippedBlockThatAttends(EquippedBlock, EquippedAttention):
    """A block that is its own attention: what it holds speaks to tokens before it, or in it."""

    def before(self) -> Iterable[PositionEncoding]:
        return [encoding for encoding in held(self) if "tokens" in encoding.moments()]

    def inside(self) -> Iterable[PositionEncoding]:
        return [encoding for encoding in held(self) if encoding.moments() != ("tokens",)]


class _Ours(TorchFunctionMode):
    """Inside, scaled_dot_product_attention is attention with the encodings of a module."""

    def __init__(self, module: EquippedAttention, calls: list[str]) -> None:
        super().__init__()
        self.module = module
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls.append(func.__name__)
            return attend(self.module, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend(
    module: EquippedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's scaled_dot_product_attention, with the encodings of a module.

    Axes other than heads, tokens and features are all batch, or batch and heads are one axis; one head of keys and
    values is that of all queries. Values may have several times as many features as keys: encodings then speak of
    them in parts.
    """
    if query.ndim > 4:  # no host has a mask here
        q, k, v = (x.movedim(module.heads_axis, -3) for x in (query, key, value))
        batch = q.shape[:-3]
        q, k, v = (x.flatten(0, -4) for x in (q, k, v))
        out = attend(module, q, k, v, attn_mask, dropout_p, is_causal, scale)
        return out.unflatten(0, batch).movedim(-3, module.heads_axis)
    if query.ndim == 3:
        heads = next(iter(module.inside())).num_heads
        query, key, value = (x.unflatten(0, (-1, heads)) for x in (query, key, value))
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.expand(query.shape[0] * heads, -1, -1).unflatten(0, (-1, heads))
        return attend(module, query, key, value, attn_mask, dropout_p, is_causal, scale).flatten(0, 1)
    if key.shape[1] == 1 != query.shape[1]:
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if scale is not None and scale != query.shape[-1] ** -0.5:
        query = query * (scale * query.shape[-1] ** 0.5)
    if not query.dtype == key.dtype == value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    queries, keys = module.grids(module, module.place.grid)
    inside, features = tuple(module.inside()), query.shape[-1]

    def attended(value: Tensor) -> Tensor:
        return attention(query, key, value, queries, inside, keys=keys, mask=attn_mask, dropout=dropout_p)

    if value.shape[-1] != features and any("values" in encoding.moments() for encoding in inside):
        return torch.cat([attended(part) for part in value.split(features, -1)], -1)
    return attended(value)


def held(module: nn.Module) -> Iterable[PositionEncoding]:
    """The encodings that a module holds."""
    return cast("Iterable[PositionEncoding]", module.encodings)


def names_of_parameters(model: nn.Module) -> set[str]:
    """The names of all that the encodings of a model learn."""
    return {
        f"{where}.{name}"
        for where, module in model.named_modules()
        if isinstance(module, PositionEncoding)
        for name, _ in module.named_parameters()
    }


def aliases(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that several blocks share, and their first names."""
    first: dict[int, str] = {}
    named = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if ".encodings." in f".{n}"]
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}
