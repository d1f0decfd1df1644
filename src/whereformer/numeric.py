"""Arithmetic that keeps the precision it is given."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def exact(like: Tensor) -> AbstractContextManager[object]:
    """No autocast where `like` lives: matrix products keep the dtype of what they multiply."""
    device = like.device.type
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else nullcontext()


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 if `dtype` is: in what positions are computed."""
    return torch.promote_types(dtype, torch.float32)
