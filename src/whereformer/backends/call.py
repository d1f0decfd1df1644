"""One call of attention, as far as a backend has to know it to say whether it can serve."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from whereformer.forms import Forms
from whereformer.mask import Mask

Attend = Callable[[Tensor, Tensor, Tensor, Forms, Mask | None, float], Tensor]
"""Attention, as `whereformer.attention.reference` defines it."""


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


def forward_mode() -> bool:
    """Whether derivatives may be carried along, which no fused kernel does; autograd would drop them unseen."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._are_functorch_transforms_active,
    torch._C._get_tracing_state,
    torch.autograd._profiler_enabled,  # pyright: ignore[reportPrivateImportUsage]
)
"""Modes, transforms, the tracer and the profiler: each says whether it is on."""


def unwatched() -> bool:
    """Whether nobody looks at what torch is asked for, and no graph is made of it."""
    if torch.compiler.is_compiling():
        return False
    for watches in WATCHERS:  # noqa: SIM110  # a generator would be one more call
        if watches():
            return False
    return True
