"""Load weights into an equipped model: our own files and the released iRPE DeiT ones."""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from whereformer.adapters.describe import describe, equipped
from whereformer.encodings import IRPE, Learned
from whereformer.errors import InputError

ENCODING_KEY = "whereformer.encoding"
"""The metadata of our safetensors files that says which encoding the weights are for."""


def load_checkpoint(model: nn.Module, source: str | os.PathLike[str] | Mapping[str, object]) -> nn.Module:
    """Load weights into an equipped model: all of them, or none and an error.

    Reads our own layout and the released iRPE DeiT layout (`blocks.N.attn.rpe_k.lookup_table_weight`,
    `lookup_table_bias`, `rp_rows` and `rp_cols`, `pos_embed`), bare or inside {"model": ...} or
    {"state_dict": ...}.

    Args:
        model: what `whereformer.equip` gave, with the encoding that the weights were trained with.
        source: a .safetensors file, a torch file (read with weights_only: nothing in it is run), or its content.

    Returns:
        the same model.

    Raises:
        InputError: keys are missing, unexpected or of another shape (all are named), or the file was written for
            another encoding.
    """
    equipped(model, "load_checkpoint")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("load_checkpoint: the model is on the meta device; give it memory first: model.to_empty")
    given, written_for = _read(source)
    weights = _translate(_tensors(given), model)
    problems = list(_problems(weights, model.state_dict()))
    has = metadata(model)[ENCODING_KEY]
    if written_for not in (None, has):
        problems.insert(0, f"written for {written_for}, but the model has {has}")
    if problems:
        name = source if isinstance(source, str | os.PathLike) else "state dict"
        raise InputError(f"{name} does not fit the model, nothing was loaded:\n  " + "\n  ".join(problems))
    model.load_state_dict(weights)
    return model


def metadata(model: nn.Module) -> dict[str, str]:
    """What a safetensors file of an equipped model says about itself, so that `load_checkpoint` can compare."""
    seats = describe(model).seats
    return {ENCODING_KEY: " + ".join(dict.fromkeys(seat.encoding for seat in seats)) or "nothing"}


def _read(source: str | os.PathLike[str] | Mapping[str, object]) -> tuple[Mapping[str, object], str | None]:
    """The content of a file, and the encoding its metadata names."""
    if isinstance(source, Mapping):
        return source, None
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"source={source!r}, expected a path or a state dict")
    path = Path(source)
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file

        try:
            with safe_open(path, "pt") as file:
                written_for = (file.metadata() or {}).get(ENCODING_KEY)
            return load_file(path), written_for
        except SafetensorError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from None
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the released files keep their arguments
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged or hostile file can fail anywhere in torch.load
        raise InputError(f"{path} is not a file of weights that can be read safely: {error}") from None
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds a {type(content).__name__}, expected a state dict")
    return content, None


def _tensors(given: Mapping[str, object]) -> dict[str, Tensor]:
    for wrapper in ("model", "state_dict"):
        inner = given.get(wrapper)
        if isinstance(inner, Mapping):
            given = inner
    wrong = [key for key, value in given.items() if not isinstance(value, Tensor)]
    if wrong:
        raise InputError(f"{wrong[0]!r} is a {type(given[wrong[0]]).__name__}, expected a state dict of tensors")
    weights = {str(key): value for key, value in given.items() if isinstance(value, Tensor)}
    if weights and all(key.startswith("module.") for key in weights):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    return weights


def _translate(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Released names and shapes to ours."""
    ours = dict(_released_names(model))
    translated = {}
    for key, value in weights.items():
        name = ours.get(key, key)
        translated[name] = value[0] if key == "pos_embed" and name != key and value.ndim == 3 else value
    return translated


def _released_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(released, ours) for each table of the model that the released code has under a name of its own."""
    for where, module in model.named_modules():
        if isinstance(module, IRPE):
            kind = "bias" if module.mode == "bias" else "weight"
            parts = {"": "", "_rows": "rp_rows.", "_columns": "rp_cols."}
            for side in module.on:
                for part in module.mappings:
                    released = f"rpe_{side}.{parts[part]}lookup_table_{kind}"
                    yield f"{where.rpartition('encodings')[0]}{released}", f"{where}.tables.{side}{part}"
        elif isinstance(module, Learned) and getattr(model, "pos_embed", None) is None:
            yield "pos_embed", f"{where}.table"


def _problems(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    if missing := sorted(expected.keys() - weights.keys()):
        yield f"missing: {', '.join(missing)}"
    if unexpected := sorted(weights.keys() - expected.keys()):
        yield f"unexpected: {', '.join(unexpected)}"
    for key in sorted(expected.keys() & weights.keys()):
        if weights[key].shape != expected[key].shape:
            yield f"{key}: {tuple(weights[key].shape)}, but the model has {tuple(expected[key].shape)}"
