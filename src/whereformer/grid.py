"""Where tokens are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from whereformer.errors import InputError


@dataclass(frozen=True)
class Grid:
    """Tokens in the order a vision transformer sees them: prefix tokens, then patches row by row.

    Args:
        height: rows of patches.
        width: columns of patches.
        prefix: tokens before the patches that have no place (class, distillation, registers).

    >>> grid = Grid(2, 3, prefix=1)
    >>> grid.tokens
    7
    >>> grid.coords().tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """

    height: int
    width: int
    prefix: int = 0

    def __post_init__(self) -> None:
        for name, least in (("height", 1), ("width", 1), ("prefix", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
                raise InputError(f"Grid: {name}={value!r}, expected an integer of at least {least}")

    @property
    def patches(self) -> int:
        return self.height * self.width

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    def coords(self, device: torch.device | None = None) -> Tensor:
        """(y, x) of each patch, in patches: [patches, 2], int64."""
        y = torch.arange(self.height, device=device)
        x = torch.arange(self.width, device=device)
        return torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).flatten(0, 1)

    def offsets(self, keys: "Grid", device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Query minus key along each axis, in patches, int64, this grid holding the queries.

        Returns dy [height, 1, keys.height, 1] and dx [1, width, 1, keys.width]: broadcast together, they are
        the offsets of all pairs of patches, and the last two and first two axes flatten to patches.
        """
        dy = torch.arange(self.height, device=device)[:, None] - torch.arange(keys.height, device=device)
        dx = torch.arange(self.width, device=device)[:, None] - torch.arange(keys.width, device=device)
        return dy[:, None, :, None], dx[None, :, None, :]

    def check(self, tokens: int, what: str) -> None:
        """Raise unless `tokens` tokens lie on this grid."""
        if tokens != self.tokens:
            raise InputError(
                f"{what} has {tokens} tokens, but {self} holds {self.prefix} + {self.height} * {self.width}"
                f" = {self.tokens}"
            )
