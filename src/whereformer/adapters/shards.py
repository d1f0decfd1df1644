"""The index of weights that lie in several files."""

import json
from pathlib import Path

from whereformer.errors import InputError


def shards_in(index: Path) -> dict[str, str]:
    """Which file, beside the index, holds which tensor."""
    try:
        shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = list(dict.fromkeys(shards.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is not an index of weights: {error!r}") from None
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"{index} names {name!r}, expected a file beside it")
    return shards
