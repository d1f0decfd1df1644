"""The weights that a detector starts from."""

import os
from typing import Any

from whereformer.adapters.files import open_checkpoint
from whereformer.adapters.fit import fitted, problems, shapes_of
from whereformer.errors import InputError

CLASSES = "class_labels_classifier."
ENCODINGS = ".encodings."


def start_from(model: Any, weights: str | os.PathLike[str]) -> list[str]:
    """Gives a detector the weights of another one: of a run, of transformers, or under the official names.

    Two things may be missing in the file, or be other ones, and then stay as they are: encodings, and the
    classifier, if it is one of other classes.

    Returns:
        the names of what stays as it is.

    Raises:
        InputError: something else does not fit, or the file holds encodings that the detector does not have.
    """
    try:
        entries, _ = fitted(open_checkpoint(weights).entries, model)
    except FileNotFoundError:
        raise InputError(f"weights={str(weights)!r}, expected a file, a folder or a name on the hub") from None
    own = model.state_dict()
    others = [
        name
        for name in own
        if name.startswith(CLASSES) and name in entries and entries[name].shape != own[name].shape
    ]
    found = {name: entry for name, entry in entries.items() if name not in others}
    stay = [name for name in own if name not in found and (name in others or ENCODINGS in name)]
    wanted = {name: shape for name, shape in shapes_of(model).items() if name not in stay}
    if wrong := list(problems(found, wanted)):
        raise InputError(f"weights={str(weights)!r} do not fit the detector:\n  " + "\n  ".join(wrong))
    model.load_state_dict({name: own[name] if name in stay else found[name].read() for name in own})
    return stay
