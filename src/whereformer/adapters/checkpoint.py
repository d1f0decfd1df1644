"""Load weights into a model: our own files and every official layout."""

import torch
from torch import nn

from whereformer.adapters.behaviours import EquippedModel, aliases
from whereformer.adapters.describe import describe
from whereformer.adapters.files import Source, open_checkpoint
from whereformer.adapters.fit import fitted, problems, shapes_of
from whereformer.adapters.layouts import recognise
from whereformer.adapters.timms_own import filtered
from whereformer.errors import InputError

ENCODING_KEY = "whereformer.encoding"
"""The metadata of our safetensors files that says which encoding the weights are for."""


def load_checkpoint(model: nn.Module, source: Source, *, part: str | None = None) -> nn.Module:
    """Load weights into a model: all of them, or none and an error.

    Reads our own files, timm's, every layout of docs/checkpoints.md, and what timm itself reads for such a model,
    in safetensors and torch files, sharded ones, folders, and from the Hugging Face hub. Derived buffers are left
    out.

    Args:
        model: a timm model, or what `whereformer.equip` made of one, with the encoding that the weights were
            trained with.
        source: a file (nothing in it is run), a folder, an id of the hub (`owner/name`), or a state dict.
        part: which state dict, if a file holds several, such as "model_ema".

    Returns:
        the same model.

    Raises:
        InputError: keys are missing, unexpected or of another shape (all are named), or the file was written for
            another encoding.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"load_checkpoint: model is a {type(model).__name__}, expected a module, then its weights"
        )
    if isinstance(source, nn.Module):
        raise InputError("load_checkpoint: source is a module, expected its state_dict(), or a file")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("load_checkpoint: the model is on the meta device; give it memory first: model.to_empty")
    if hasattr(model, "_orig_mod") or isinstance(model, _WRAPPERS):
        raise InputError("load_checkpoint: give the model inside DDP or torch.compile: .module, ._orig_mod")
    checkpoint = open_checkpoint(source, part)
    weights, _ = fitted(checkpoint.entries, model)
    wanted = shapes_of(model)
    shared = aliases(model)
    for name, first in shared.items():  # some writers keep one name of what blocks share, whichever
        known = next((weights[n] for n in (name, first) if n in weights), None)
        if known is not None:
            weights = {first: known, name: known} | weights
    unknown = weights.keys() != wanted.keys() and recognise(checkpoint.entries) is None
    if unknown and (read := filtered(checkpoint.entries, model)):
        others, _ = fitted(read, model)
        weights = others if others.keys() == wanted.keys() else weights
    found = list(problems(weights, wanted))
    equipped = isinstance(model, EquippedModel)
    written_for = checkpoint.metadata.get(ENCODING_KEY)
    has = metadata(model)[ENCODING_KEY] if equipped else None
    if written_for is not None and written_for != has:
        found.insert(
            0, f"written for {written_for}, but the model has {has or 'its own alone: it is not equipped'}"
        )
    for name, first in shared.items():
        if not found and not torch.equal(weights[name].read(), weights[first].read()):
            found.append(f"{name} and {first} differ, but the model has one for both (share=True)")
    if found:
        name = f"{type(model).__name__}{'' if equipped else ', which is not equipped'}"
        raise InputError(
            f"{checkpoint.name} does not fit the model ({name}), nothing was loaded:\n  " + "\n  ".join(found)
        )
    model.load_state_dict({name: entry.read() for name, entry in weights.items()})
    return model


_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def metadata(model: nn.Module) -> dict[str, str]:
    """What a safetensors file of an equipped model says about itself, so that `load_checkpoint` can compare."""
    seats = describe(model).seats
    return {ENCODING_KEY: " + ".join(dict.fromkeys(seat.encoding for seat in seats)) or "nothing"}
