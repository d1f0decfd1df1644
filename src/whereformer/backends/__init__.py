"""Faster ways to compute what `whereformer.attention.reference` defines. They know forms, not encodings."""

from collections.abc import Callable

from torch import Tensor

from whereformer.backends import sdpa
from whereformer.errors import InputError
from whereformer.forms import Forms
from whereformer.mask import Mask

Backend = Callable[[Tensor, Tensor, Tensor, Forms, Mask | None, float], Tensor]

FASTEST_FIRST = {"sdpa": sdpa}


def choose(name: str, forms: Forms) -> Backend | None:
    """The backend of that name, or for "auto" the fastest that can serve; None stands for the reference.

    Raises:
        InputError: the name is unknown, or the named backend cannot serve.
    """
    if name == "reference":
        return None
    if name == "auto":
        return next((b.attend for b in FASTEST_FIRST.values() if not b.cannot(forms)), None)
    if name not in FASTEST_FIRST:
        raise InputError(f"backend={name!r}, expected one of {['auto', 'reference', *FASTEST_FIRST]}")
    if why := FASTEST_FIRST[name].cannot(forms):
        raise InputError(f"backend={name!r} cannot serve: {why}. Use 'auto' or 'reference'")
    return FASTEST_FIRST[name].attend
