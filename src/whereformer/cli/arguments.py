"""What commands are given."""

import argparse
from collections.abc import Sequence


def count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from 1 on")
    return value


def specs(texts: Sequence[str]) -> tuple[str, ...]:
    """The encodings of all texts, each of which may hold several, separated by semicolons."""
    specs = (spec.strip() for text in texts for spec in text.split(";"))
    return tuple(spec for spec in specs if spec)
