"""Faster ways to compute what `whereformer.attention.reference` defines. They know forms, not encodings."""

from collections.abc import Mapping
from typing import NamedTuple

from whereformer.backends import cpu, sdpa
from whereformer.backends.call import Attend, Call
from whereformer.errors import InputError
from whereformer.forms import Forms

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
    return _chosen(name, forms, call)[0]


def choose(name: str, forms: Forms, call: Call) -> Attend | None:
    """As `choice`, but what serves these forms and this call; None stands for the reference."""
    return _chosen(name, forms, call)[1]


def _chosen(name: str, forms: Forms, call: Call) -> tuple[Choice, Attend | None]:
    if name == "auto":
        refused = {}
        for faster, backend in FASTEST_FIRST.items():
            ready = backend.ready(forms, call)
            why = ready if isinstance(ready, str) else backend.outrun(forms, call)
            if not why and not isinstance(ready, str):
                return Choice(faster, refused), ready
            refused[faster] = why
        return Choice("reference", refused), None
    if name == "reference":
        return Choice(name, {}), None
    if not isinstance(name, str) or name not in FASTEST_FIRST:
        raise InputError(f"backend={name!r}, expected one of {['auto', 'reference', *FASTEST_FIRST]}")
    ready = FASTEST_FIRST[name].ready(forms, call)
    if isinstance(ready, str):
        raise InputError(f"backend={name!r} cannot serve: {ready}. Use 'auto' or 'reference'")
    return Choice(name, {}), ready
