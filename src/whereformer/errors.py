import math
from collections.abc import Sequence


class InputError(ValueError):
    """What was asked cannot be: the message names the argument, its value and what is accepted."""


def check_positive(what: str, value: object) -> None:
    """Raise unless `value`, called `what`, is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{what}={value!r}, expected a positive number")


def check_count(what: str, value: object) -> None:
    """Raise unless `value`, called `what`, is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what}={value!r}, expected a positive integer")


def check_one_of(what: str, value: object, accepted: Sequence[object]) -> None:
    """Raise unless `value`, called `what`, is one of those."""
    if value not in accepted:
        raise InputError(f"{what}={value!r}, expected one of {list(accepted)}")
