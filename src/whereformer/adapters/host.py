"""What `equip` has to know of a model, as data: where its blocks, attentions and tokens are."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from whereformer.adapters.swap import Equipped
from whereformer.encoding import PositionEncoding
from whereformer.grid import Grid


class Place(threading.local):
    """Where the tokens of this thread's forward are: filled before the first block, read by every layer."""

    def __init__(self, home: Grid) -> None:
        self.home = home
        self.grid = home

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (self.home,)


# ---------------------------------------------------------------------------------------------------------------
# How a block gets its tokens.


class Layout:
    """Tokens [batch, tokens, dim], on the grid that the place has."""

    def grid(self, place: Place, x: Tensor, *rest: Any, **named: Any) -> Grid:
        """Where they are, from what the block is called with."""
        return place.grid

    def tokens(self, x: Tensor) -> Tensor:
        """As [batch, tokens, dim]."""
        return x

    def back(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The reverse of `tokens`."""
        return tokens


class Counted(Layout):
    """Tokens [batch, tokens, dim], on the place's grid, behind as many prefix tokens as are left over."""

    def grid(self, place: Place, x: Tensor, *rest: Any, **named: Any) -> Grid:
        return replace(place.grid, prefix=x.shape[1] - place.grid.patches)


@dataclass(frozen=True)
class Fixed(Layout):
    """Tokens [batch, tokens, dim], always on this grid."""

    at: Grid

    def grid(self, place: Place, x: Tensor, *rest: Any, **named: Any) -> Grid:
        return self.at


@dataclass(frozen=True)
class Sized(Layout):
    """Tokens [batch, tokens, dim], and beside them (height, width), second or as `size`; `prefix` tokens first."""

    prefix: int = 0

    def grid(self, place: Place, x: Tensor, *rest: Any, **named: Any) -> Grid:
        height, width = rest[0] if rest else named["size"]
        return Grid(height, width, self.prefix)


class Image(Layout):
    """Patches [batch, height, width, dim]."""

    def grid(self, place: Place, x: Tensor, *rest: Any, **named: Any) -> Grid:
        return Grid(x.shape[1], x.shape[2])

    def tokens(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    def back(self, tokens: Tensor, like: Tensor) -> Tensor:
        return tokens.reshape(like.shape)


class Channels(Layout):
    """Patches [batch, dim, height, width]."""

    def grid(self, place: Place, x: Tensor, *rest: Any, **named: Any) -> Grid:
        return Grid(x.shape[2], x.shape[3])

    def tokens(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT

    def back(self, tokens: Tensor, like: Tensor) -> Tensor:
        return tokens.mT.reshape(like.shape)


class SequenceFirst(Layout):
    """Tokens [tokens, batch, dim], on the grid that the place has."""

    def tokens(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def back(self, tokens: Tensor, like: Tensor) -> Tensor:
        return tokens.transpose(0, 1)


TOKENS = Layout()


# ---------------------------------------------------------------------------------------------------------------
# The parts of a model.

Grids = Callable[[nn.Module, Grid], tuple[Grid, Grid]]
"""From an attention and the grid of its block to the grids of its queries and of its keys.

If one is coarser, its tokens are `Points` of the finer grid, as offsets between two grids count patches in one
unit. The finer grid is the home of encodings.
"""

Start = Callable[[PositionEncoding], bool]
"""Lets a new encoding go on from what the model has itself, if that is of its kind; whether it was."""


def on_the_whole(attention: nn.Module, grid: Grid) -> tuple[Grid, Grid]:
    """Every token attends to every token."""
    return grid, grid


@dataclass(frozen=True)
class Attention:
    """One attention.

    Args:
        module: its forward calls torch's scaled_dot_product_attention once, on [batch, heads, tokens, head_dim].
        dim: features of a query, all heads together; the stage's if None.
        heads: how many; the stage's if None.
        grids: where queries and keys are, if not where the block's tokens are: windows, pooled keys.
        home: from which grid `grids` starts at home, if not from the stage's: the block shrinks its map first.
        takes: which moments of attention an encoding may speak at.
        start: for encodings that go on from the attention's own.
        behaviour: how the module behaves with encodings; None: as the forward above says.
        switches: attributes that need to have other values where encodings speak.
    """

    module: nn.Module
    dim: int | None = None
    heads: int | None = None
    grids: Grids = on_the_whole
    home: Grid | None = None
    takes: tuple[str, ...] = ("rotations", "biases", "values")
    start: Start | None = None
    behaviour: type[Equipped] | None = None
    switches: "Sequence[Own]" = ()


@dataclass(frozen=True)
class Block:
    """One block: before it, encodings of tokens may stand.

    Args:
        module: called with the tokens first.
        attentions: those of its parts in which encodings may speak.
        start: for encodings that go on from what the model has before this block.
        behaviour: how the module behaves with encodings, if not as `EquippedBlock`.
        deaf: if it attends in a way that takes no encoding, why; the rest of a sentence, "its attention ...".
    """

    module: nn.Module
    attentions: Sequence[Attention | nn.Module] = ()
    start: Start | None = None
    behaviour: type[Equipped] | None = None
    deaf: str = ""


@dataclass(frozen=True)
class Stage:
    """Blocks in a row, of one width, on one grid: a transformer of its own.

    Args:
        dim: features of a token.
        heads: attention heads.
        grid: the home grid.
        blocks: in order.
        layout: how the blocks get their tokens.
    """

    dim: int
    heads: int
    grid: Grid
    blocks: Sequence[Block]
    layout: Layout = TOKENS


@dataclass(frozen=True)
class Own:
    """One thing by which a model itself says where tokens are.

    Args:
        module: whose it is.
        name: the attribute.
        silent: what stands there when it says nothing.
        counts: whether people would call it a position encoding, and not a switch or a helper of one.
    """

    module: nn.Module
    name: str
    silent: Any = None
    counts: bool = True


@dataclass(frozen=True)
class Host:
    """A model, as far as `equip` has to know it.

    Args:
        stages: one; in a pyramid several.
        own: what it says itself of where tokens are.
        entry: the module whose call tells the grid, and how: from what it was given and what it gave. Needed for
            blocks in the plain layout.
        switches: attributes that equipping needs to have other values, whatever becomes of `own`.
        swaps: other modules that must behave in another way; each gets the attribute `place`.
        behaviour: how the model itself behaves; None: `EquippedModel`.
        holds_first: whether the model, and not its first block, holds the encodings of tokens that come first.
        first: the module that holds them, if it is neither: called with the tokens first, as a block is.
        first_behaviour: how that module behaves; None: as a block does.
        check_first: raises if they cannot come first.
        equal: the encoding that says what the model says itself, and goes on from its weights; None: none does.
        options: what `host_of` was given beside the model, as JSON: kept with the model that is saved.
    """

    stages: Sequence[Stage]
    own: Sequence[Own] = ()
    entry: tuple[nn.Module, Callable[[Tensor, Tensor], Grid]] | None = None
    switches: Sequence[Own] = ()
    swaps: Sequence[tuple[nn.Module, type[Equipped]]] = ()
    behaviour: type[Equipped] | None = None
    holds_first: bool = False
    first: nn.Module | None = None
    first_behaviour: type[Equipped] | None = None
    check_first: Callable[[Sequence[PositionEncoding]], None] | None = None
    equal: str | Mapping[range, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
