"""What timm reads of other repositories' files where no layout of ours knows them: CLIP, RADIO, Hiera ..."""

import sys
from collections.abc import Mapping

from torch import Tensor, nn

from whereformer.adapters.files import Entries, Entry
from whereformer.adapters.tables import tables_of
from whereformer.errors import InputError


def filtered(entries: Entries, model: nn.Module) -> dict[str, Entry] | None:
    """What timm makes of a checkpoint for such a model; None: nothing, or it does not know how.

    timm also resizes on the way, by a recipe of its own and without a word: that is refused.

    Raises:
        InputError: it resized something.
    """
    read = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    if read is None or not type(model).__module__.startswith("timm."):
        return None
    given = {name: entry.read() for name, entry in entries.items()}
    try:
        found = read(dict(given), model)
    except Exception:  # it is not made for every file, and fails in many ways
        return None
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        return None
    sizes = {value.numel() for value in given.values()}
    resized = [table.name for table in tables_of(found) if found[table.name].numel() not in sizes]
    if resized:
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in resized}
        if any(name in found and found[name].shape != shape for name, shape in shapes.items()):
            return None  # of another architecture: what does not fit is named by who asked
        raise InputError(
            f"{', '.join(resized)}: the checkpoint is for another size; build the model for that,"
            " and give it to whereformer.resize afterwards"
        )
    return {str(name): Entry.of(value) for name, value in found.items()}
