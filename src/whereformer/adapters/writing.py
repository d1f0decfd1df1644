"""Weights into files: tensor by tensor, and whole or not at all."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from whereformer.adapters.files import DTYPES, Entries, Entry
from whereformer.errors import InputError

SHARD = 5_000_000_000
"""The largest file, in bytes, unless asked otherwise: what the hub advises."""

Progress = Callable[[int], object]
"""Told the bytes of each tensor that is written."""


def quiet(count: int) -> None:
    """No progress is shown."""


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` at once when all is written, and never if not.

    Whoever reads `path`, even after a power cut, finds the old content or the new.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_weights(
    path: Path,
    entries: Entries,
    metadata: Mapping[str, str],
    *,
    shard: int = SHARD,
    done: Progress = quiet,
) -> list[Path]:
    """Write safetensors: one file, or several and an index (`path`.index.json) if it would be larger than `shard`.

    Tensors are read and written one by one, so that no file need fit into memory; the library's own writer wants
    them all at once. Files take their places when all are written, the index last.

    Args:
        path: ends in .safetensors.
        entries: what to write, in this order.
        metadata: what the file says about itself.
        shard: the largest file in bytes; a tensor is never divided.
        done: told the bytes of each tensor that is written.

    Returns:
        the files that were written.
    """
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise InputError(f"{name} is of dtype {entry.dtype}, expected one of {list(DTYPES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {**metadata, "format": "pt"}
    index = path.with_name(f"{path.name}.index.json")
    parts = list(_parts(entries, shard))
    if len(parts) == 1:
        with replaced(path) as file:
            _write(file, parts[0], about, done)
        with suppress(FileNotFoundError):
            index.unlink()
        return [path]
    names = [f"{path.stem}-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    drafts = [path.with_name(f".{name}.draft") for name in names]
    try:
        for draft, part in zip(drafts, parts, strict=True):
            with replaced(draft) as file:
                _write(file, part, about, done)
        for gone in (index, path):  # from here on there is no checkpoint until there is the new one
            gone.unlink(missing_ok=True)
        for draft, name in zip(drafts, names, strict=True):
            os.replace(draft, path.with_name(name))
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    shards = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    total = {"total_size": sum(entry.bytes for entry in entries.values())}
    with replaced(index) as file:
        file.write(json.dumps({"metadata": total, "weight_map": shards}, indent=2).encode() + b"\n")
    return [*(path.with_name(name) for name in names), index]


def _parts(entries: Entries, shard: int) -> Iterator[dict[str, Entry]]:
    part: dict[str, Entry] = {}
    for name, entry in entries.items():
        if part and sum(kept.bytes for kept in part.values()) + entry.bytes > shard:
            yield part
            part = {}
        part[name] = entry
    yield part


def _write(file: IO[bytes], entries: Entries, metadata: Mapping[str, str], done: Progress) -> None:
    """The format: the length of the header in 8 bytes, the header as JSON, then the tensors' bytes in a row.

    Tensors of wider dtypes come first, so that each begins at a multiple of its own width.
    """
    ordered = sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in ordered:
        start, end = end, end + entry.bytes
        header[name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, entry in ordered:
        file.write(_bytes(name, entry))
        done(entry.bytes)


def _bytes(name: str, entry: Entry) -> bytes | memoryview:
    tensor: Tensor = entry.read()
    if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
        raise InputError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, but its file promised {entry}")
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
