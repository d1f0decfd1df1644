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


def check_at_least(what: str, value: object, least: float) -> None:
    """Raise unless `value`, called `what`, is a finite number not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise InputError(f"{what}={value!r}, expected a number of at least {least:g}")


def check_bool(what: str, value: object) -> None:
    """Raise unless `value`, called `what`, is True or False: an empty text is neither."""
    if not isinstance(value, bool):
        raise InputError(f"{what}={value!r}, expected True or False")


def check_numbers(what: str, value: object, count: int) -> None:
    """Raise unless `value`, called `what`, is so many finite numbers in a row."""
    found = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    plain = (isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in found)
    if len(found) != count or not all(plain):
        shown, wanted = (value, f"{count} numbers") if count > 1 or not found else (found[0], "a number")
        raise InputError(f"{what}={shown!r}, expected {wanted}")


def check_size(what: str, value: object, axes: int = 2) -> None:
    """Raise unless `value`, called `what`, is the size of a grid of so many axes."""
    check_numbers(what, value, axes)
    assert isinstance(value, Sequence)
    if not all(isinstance(n, int) and n > 0 for n in value):
        raise InputError(f"{what}={value!r}, expected {axes} positive integers, such as {(7,) * axes}")
