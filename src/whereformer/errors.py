import math
from collections.abc import Sequence
from types import UnionType
from typing import Any


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


def check_heads(what: str, dim: object, num_heads: object, parts: int = 1) -> None:
    """Raise unless features, called `what: dim`, divide into heads of a multiple of `parts` features."""
    check_count(f"{what}: dim", dim)
    check_count(f"{what}: num_heads", num_heads)
    if dim % (parts * num_heads):  # pyright: ignore[reportOperatorIssue]
        heads = f"{parts} * num_heads" if parts > 1 else "num_heads"
        raise InputError(f"{what}: dim={dim} is not a multiple of {heads}={parts * num_heads}")  # pyright: ignore[reportOperatorIssue]


def check_one_of(what: str, value: object, accepted: Sequence[object]) -> None:
    """Raise unless `value`, called `what`, is one of those."""
    if value not in accepted:
        raise InputError(f"{what}={value!r}, expected one of {list(accepted)}")


def check_gathered(what: str, tensor: Any) -> None:
    """Raise if a tensor, called `what`, that is to be resized has no numbers in this process."""
    if not tensor.numel():
        raise InputError(
            f"{what} has shape {tuple(tensor.shape)}, without numbers: resize before weights are sharded (ZeRO-3),"
            " or inside deepspeed.zero.GatheredParameters"
        )


def check_in_memory(what: str, tensor: Any) -> None:
    """Raise if a tensor, called `what`, that is to be resized has no numbers at all, or none in this process."""
    if tensor.is_meta:
        raise InputError(f"{what} is on the meta device, without numbers: load the weights first, then resize")
    check_gathered(what, tensor)


def check_at_least(what: str, value: object, least: float) -> None:
    """Raise unless `value`, called `what`, is a finite number not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise InputError(f"{what}={value!r}, expected a number of at least {least:g}")


def check_bool(what: str, value: object) -> None:
    """Raise unless `value`, called `what`, is True or False: an empty text is neither."""
    if not isinstance(value, bool):
        raise InputError(f"{what}={value!r}, expected True or False")


def check_numbers(what: str, value: object, count: int) -> None:
    """Raise unless `value`, called `what`, is so many finite numbers in a row; for a count of 1, a number."""
    found = (value,) if count == 1 else value
    if not _numbers(found, count):
        wanted = {1: "a number", 2: "two numbers", 3: "three numbers"}
        raise InputError(f"{what}={value!r}, expected {wanted[count]}")


def check_size(what: str, value: object, axes: int = 2) -> None:
    """Raise unless `value`, called `what`, is the size of a grid of so many axes."""
    if not _numbers(value, axes, int) or any(n < 1 for n in value):  # pyright: ignore[reportGeneralTypeIssues]
        raise InputError(f"{what}={value!r}, expected {axes} positive integers, such as {(7,) * axes}")


def _numbers(found: object, count: int, kind: UnionType | type = int | float) -> bool:
    return (
        isinstance(found, Sequence)
        and len(found) == count
        and all(isinstance(n, kind) and not isinstance(n, bool) and math.isfinite(n) for n in found)
    )
