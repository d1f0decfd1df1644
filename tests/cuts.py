"""A process that is killed between two changes of its files."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

CHANGES = ("fsync", "replace", "unlink")


class Killed(BaseException):
    pass


@contextmanager
def cut_before(number: int) -> Iterator[None]:
    """Within, the sync, rename or removal of that number, counted from 0, and all after it, end in `Killed`."""
    left = number

    def counted(change: Callable) -> Callable:
        def changed(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*arguments, **options)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield
