"""Which queries may attend to which keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from whereformer.errors import InputError


class Mask(NamedTuple):
    """What a user's mask says, both parts broadcastable to [batch, heads, queries, keys].

    Args:
        allowed: boolean, True where a query may attend to a key.
        added: added to the logits where allowed, at least float32, at most 0; or None.
    """

    allowed: Tensor
    added: Tensor | None

    @classmethod
    def read(cls, mask: Tensor, logits_shape: tuple[int, ...]) -> "Mask":
        """A boolean mask, or a floating one that forbids with −inf or the lowest number of its dtype."""
        if not isinstance(mask, Tensor):
            raise InputError(f"mask={mask!r}, expected a tensor")
        try:
            fits = torch.broadcast_shapes(mask.shape, logits_shape) == torch.Size(logits_shape)
        except RuntimeError:
            fits = False
        if not fits:
            raise InputError(
                f"mask {tuple(mask.shape)}, expected a shape that broadcasts to {tuple(logits_shape)},"
                " [batch, heads, queries, keys]"
            )
        if mask.dtype == torch.bool:
            return cls(mask, None)
        if not mask.dtype.is_floating_point:
            raise InputError(f"mask is {mask.dtype}, expected torch.bool (True = may attend) or a floating dtype")
        added = mask.to(torch.promote_types(mask.dtype, torch.float32))
        # Softmax does not see what a whole row shares; a row of -1e9 would drown the logits, or overflow in half.
        added = added - added.detach().amax(-1, keepdim=True)
        return cls(mask > torch.finfo(mask.dtype).min, added)

    @property
    def idle(self) -> Tensor:
        """Queries with nothing to attend to: [..., queries, 1]."""
        return ~self.allowed.any(-1, keepdim=True)

    def softmax(self, logits: Tensor) -> Tensor:
        """Over the allowed keys; idle queries get zeros, and finite gradients. Half precision: in float32."""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.added is not None:
            exact = exact + self.added
        exact = exact.masked_fill(~self.allowed, -torch.inf).masked_fill(self.idle, 0)
        return exact.softmax(-1).masked_fill(~self.allowed, 0).to(logits.dtype)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The mask as one additive bias whose idle queries, having nothing to lose, may attend to all keys."""
        bias = torch.zeros_like(self.allowed, dtype=dtype) if self.added is None else self.added.to(dtype)
        return bias.masked_fill(~self.allowed, -torch.inf).masked_fill(self.idle, 0)
