"""Faster ways to compute what `whereformer.attention.reference` defines. They know forms, not encodings."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from whereformer.backends import cpu, sdpa
from whereformer.backends.call import Call
from whereformer.errors import InputError
from whereformer.forms import Forms
from whereformer.mask import Mask

Backend = Callable[[Tensor, Tensor, Tensor, Forms, Mask | None, float], Tensor]

FASTEST_FIRST = {"cpu": cpu, "sdpa": sdpa}


class Choice(NamedTuple):
    """Which backend serves, and why no faster one; `print` it.

    Args:
        backend: its name.
        refused: why not, of each of the faster ones.

    >>> print(Choice("sdpa", {"cpu": "DenseBias names a number for each pair"}))
    sdpa (not cpu: DenseBias names a number for each pair)
    """

    backend: str
    refused: Mapping[str, str]

    def __str__(self) -> str:
        why = "; ".join(f"not {name}: {why}" for name, why in self.refused.items())
        return f"{self.backend} ({why})" if why else self.backend


def choice(name: str, forms: Forms, call: Call) -> Choice:
    """The backend of that name, or for "auto" the fastest that can serve.

    Raises:
        InputError: the name is unknown, or the named backend cannot serve.
    """
    if name == "auto":
        refused = {}
        for faster, backend in FASTEST_FIRST.items():
            why = backend.cannot(forms, call) or backend.outrun(forms, call)
            if not why:
                return Choice(faster, refused)
            refused[faster] = why
        return Choice("reference", refused)
    if name == "reference":
        return Choice(name, {})
    if name not in FASTEST_FIRST:
        raise InputError(f"backend={name!r}, expected one of {['auto', 'reference', *FASTEST_FIRST]}")
    if why := FASTEST_FIRST[name].cannot(forms, call):
        raise InputError(f"backend={name!r} cannot serve: {why}. Use 'auto' or 'reference'")
    return Choice(name, {})


def choose(name: str, forms: Forms, call: Call) -> Backend | None:
    """As `choice`, but the backend itself; None stands for the reference."""
    found = choice(name, forms, call).backend
    return FASTEST_FIRST[found].attend if found in FASTEST_FIRST else None
