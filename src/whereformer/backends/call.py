"""One call of attention, as far as a backend has to know it to say whether it can serve."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad

from whereformer.forms import Forms
from whereformer.kept import watched
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


def unwatched() -> bool:
    """Whether nobody looks at what torch is asked for: no graph, mode or transform, no tracer, no profiler."""
    return not (watched() or _get_tracing_state() or _profiler_enabled())
