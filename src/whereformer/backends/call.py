"""One call of attention, as far as a backend has to know it to say whether it can serve."""

from typing import NamedTuple

from torch import Tensor

from whereformer.mask import Mask


class Call(NamedTuple):
    """What is given beside the forms.

    Args:
        q, k, v: [batch, heads, tokens, head_dim].
        mask: what the user's mask says.
        dropout: probability of dropping an attention weight.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None = None
    dropout: float = 0.0
