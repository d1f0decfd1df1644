"""The four moments at which an encoding may speak to a transformer."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from whereformer.errors import InputError, check_heads, check_in_memory
from whereformer.forms import Bias, Turn, Values
from whereformer.grid import Grid
from whereformer.resample import without_autocast

MOMENTS = ("tokens", "rotations", "biases", "values")


class PositionEncoding(nn.Module):
    """Where tokens are, said at up to four moments; a moment that is not overridden is silent.

    A subclass is one encoding of one paper. It is built as `Encoding(dim, num_heads, grid, *, its_own=...)`,
    works on any grid afterwards, keeps nothing but its parameters, and is final.

    Args:
        dim: features of a token, all heads together.
        num_heads: attention heads; divides `dim`.
        grid: the home grid: what tables are made for.
    """

    formula: ClassVar[str] = ""
    """The encoding in one line."""
    paper: ClassVar[str] = ""
    """Where the encoding was published."""
    axes: ClassVar[tuple[int, ...]] = (2,)
    """On what it is defined: 2 for images, 3 for videos."""
    crosses: bool = True
    """Whether queries and keys may lie on two grids."""
    by_offset: bool = True
    """Whether what it says to attention depends on offsets alone: not on where a query and a key lie together."""
    by_size: bool = True
    """Whether what it says to attention may depend on the size of the grid: then padding changes it."""
    keeps_norms: bool = True
    """Whether its rotations keep the norm of queries and keys, but for a `Rotation.scale`."""

    steady: ClassVar[bool] = False
    """Whether what it says to attention is the same of all tokens of one layout on one grid until an attribute is
    set: made of q, k, v and its parameters as they are, whatever these hold. A class says it of itself alone."""

    __slots__ = ("said_before",)
    """Of `whereformer.again`: beside the attributes, and in no copy."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.steady = vars(cls).get("steady", set(overridden(cls)) <= {"tokens"})

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__()
        self._check_home(grid)
        check_heads(type(self).__name__, dim, num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid = grid

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        """Before a block: tokens [batch, tokens, dim] to tokens of the same shape and dtype."""
        return x

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterable[Turn]:
        """Before the dot product: turns of the queries, or of the keys, that lie on `grid`, on their device."""
        return ()

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterable[Bias]:
        """On the logits: biases. q and k, neither scaled nor turned: [batch, heads, tokens, head_dim].

        What is in the formula divided by √head_dim is divided here, best by the scale of `Scores`, or in a table.
        """
        return ()

    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterable[Values]:
        """After the softmax: terms of the output. v: [batch, heads, tokens, head_dim]."""
        return ()

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        """What those parameters that are shaped by the home grid read on another: their names, and new values."""
        return {}

    def resize(self, grid: Grid) -> Self:
        """Make another grid the home grid, in place: there it says from now on what it says there already.

        Tables that are made for the home grid are made for the new one, in float32, rounded once to their dtype;
        they are new parameters, unless the size stays. Rows of prefix tokens, windows, and whatever does not
        depend on the grid, stay to the bit. What is scaled from the grid of the training (rotations) still is.

        Args:
            grid: a whole grid, with as many prefix tokens as the home grid.

        Returns:
            the same encoding.

        Raises:
            InputError: it is defined on grids of another kind, or a table has no numbers here.
        """
        self._check_home(grid)
        if not grid.regular or grid.prefix != self.grid.prefix or grid.axes != self.grid.axes:
            raise InputError(
                f"{type(self).__name__}: resize to {grid}, expected a whole grid like its home {self.grid}:"
                f" prefix={self.grid.prefix}, {'frames' if self.grid.frames else 'no frames'}"
            )
        if grid.size != self.grid.size:
            for name, parameter in self.named_parameters():
                check_in_memory(f"{type(self).__name__}.{name}", parameter)
            like = next(self.parameters(), torch.empty(0))
            with torch.no_grad(), without_autocast(like.device):
                tables = self.tables_on(grid)
            for name, table in tables.items():
                replace_parameter(self, name, table)
        self.grid = grid
        return self

    def _check_home(self, grid: Grid) -> None:
        if not isinstance(grid, Grid):
            raise InputError(f"{type(self).__name__}: grid={grid!r}, expected a whereformer.Grid")
        if grid.axes not in self.axes:
            wanted = " or ".join({2: "images", 3: "videos"}[axes] for axes in self.axes)
            raise InputError(f"{type(self).__name__}: grid={grid}, but it is defined on {wanted}")

    def blocks(self, depth: int) -> Sequence[int]:
        """Which of `depth` blocks hold one of these each, counted from 0; its tokens come before the block."""
        attends = any(moment != "tokens" for moment in self.moments())
        return range(depth if attends else 1)

    def at_block(self, block: int, depth: int) -> None:
        """Told by `equip`, before use: this one stands in, or before, `block` of `depth`, counted from 0."""

    def macs(self, grid: Grid) -> int:
        """Multiply-adds that one of these costs, per image."""
        return 0

    def reset_parameters(self) -> None:
        """Fill the parameters as the paper does at the start of training."""

    def moments(self) -> tuple[str, ...]:
        """The moments at which this encoding speaks."""
        return overridden(type(self))


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter of a module another value, of another shape: a new one, unless it is the very same."""
    old = module.get_parameter(name)
    if value.shape == old.shape and value.data_ptr() == old.data_ptr():
        return
    owner, _, last = name.rpartition(".")
    new = nn.Parameter(value.detach().contiguous(), old.requires_grad)
    module.get_submodule(owner).register_parameter(last, new)


def overridden(cls: type[PositionEncoding]) -> tuple[str, ...]:
    """The moments at which encodings of a class can speak."""
    return tuple(m for m in MOMENTS if getattr(cls, m) is not getattr(PositionEncoding, m))
