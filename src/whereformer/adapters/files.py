"""Weights in files, seen before they are read."""

import argparse
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whereformer.adapters.hub import from_hub, looks_like_an_id
from whereformer.adapters.shards import shards_in
from whereformer.errors import InputError

PARTS = (
    *("model", "state_dict", "module", "teacher", "target_encoder", "encoder"),
    *("model_ema", "state_dict_ema", "student"),
)
"""Under which names files keep a state dict, in the order in which one is taken."""

PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")
"""What wrappers put before every name."""

FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""What a folder of weights holds, in the order in which one is taken."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What safetensors calls torch's dtypes."""

Source = str | os.PathLike[str] | Mapping[str, object]
"""A file, a folder, an id of the Hugging Face hub, or a state dict."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor] = field(repr=False, compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "Entry":
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * self.dtype.itemsize


Entries = Mapping[str, Entry]


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds.

    Args:
        name: what was asked for.
        entries: every tensor by its name, in the order of the files.
        metadata: what a safetensors file says about itself.
        part: under which name the file keeps these ("model", "teacher", "model_ema" ...), "" for none.
        others: the other state dicts in the file.
        prefix: what all names began with, taken off.
        configuration: the config.json beside it.
    """

    name: str
    entries: Entries
    metadata: Mapping[str, str] = field(default_factory=dict)
    part: str = ""
    others: tuple[str, ...] = ()
    prefix: str = ""
    configuration: Mapping[str, object] = field(default_factory=dict)


def open_checkpoint(source: Source, part: str | None = None) -> Checkpoint:
    """See what a checkpoint holds: names, shapes and dtypes; its numbers are read when they are asked for.

    Reads safetensors and torch files (nothing in them is run), sharded ones by their index (`*.index.json`),
    folders of them, as transformers' save_pretrained and timm's save_for_hf write, ids of the Hugging Face hub
    (`owner/name` or `owner/name@revision`), and state dicts. Of several files one at a time is open.

    Args:
        source: as above.
        part: which state dict, if a file holds several, such as "model_ema". By default the first of `PARTS`.

    Raises:
        InputError: it is no such file, or damaged, or what it holds is no state dict.
        FileNotFoundError: there is no such file.
    """
    if isinstance(source, Mapping):
        held = _unwrapped(source, part, "state dict")
        entries = {name: Entry.of(tensor) for name, tensor in held.tensors.items()}
        return _bare(Checkpoint("state dict", entries, part=held.part, others=held.others))
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"source={source!r}, expected a path or a state dict")
    path, shelf = _found(source), _Shelf(part)
    opened = shelf.sharded(path) if path.name.endswith(".index.json") else shelf.whole(path)
    return _bare(Checkpoint(str(source), configuration=_configuration(path.parent), **opened))


def _bare(checkpoint: Checkpoint) -> Checkpoint:
    """Without what all names begin with."""
    entries, prefix = checkpoint.entries, ""
    while entries and (common := [p for p in PREFIXES if all(name.startswith(p) for name in entries)]):
        entries = {name.removeprefix(common[0]): entry for name, entry in entries.items()}
        prefix += common[0]
    return Checkpoint(**{**vars(checkpoint), "entries": entries, "prefix": prefix})


@dataclass(frozen=True)
class _Held:
    tensors: dict[str, Tensor]
    part: str
    others: tuple[str, ...]


class _Shelf:
    """Files of weights, of which one at a time is open."""

    def __init__(self, part: str | None) -> None:
        self.part = part
        self.path: Path | None = None
        self.get: Callable[[str], Tensor] | None = None

    def whole(self, path: Path) -> dict[str, Any]:
        """What one file holds, as arguments of `Checkpoint`."""
        self.path = self.get = None
        if path.suffix == ".safetensors":
            file = _safetensors(path)
            found = {}
            for name in file.keys():  # noqa: SIM118
                header = file.get_slice(name)
                found[name] = (tuple(header.get_shape()), _dtype(path, name, header.get_dtype()))
            about = {"metadata": dict(file.metadata() or {})}
        else:
            held = _torch(path, self.part)
            self.path, self.get = path, held.tensors.__getitem__
            found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.tensors.items()}
            about = {"part": held.part, "others": held.others}
        entries = {
            name: Entry(shape, dtype, lambda name=name: self._read(path, name))
            for name, (shape, dtype) in found.items()
        }
        return {"entries": entries, **about}

    def sharded(self, index: Path) -> dict[str, Any]:
        """What the files that an index names hold."""
        shards = shards_in(index)
        entries: dict[str, Entry] = {}
        about: dict[str, Any] = {}
        for name in dict.fromkeys(shards.values()):
            opened = self.whole(index.parent / name)
            entries |= opened.pop("entries")
            about = {**opened, "metadata": {**about.get("metadata", {}), **opened.get("metadata", {})}}
        missing = sorted(shards.keys() - entries.keys())
        if missing:
            raise InputError(f"{index} promises {missing[0]!r}, but {shards[missing[0]]} does not hold it")
        return {"entries": {name: entry for name, entry in entries.items() if name in shards}, **about}

    def _read(self, path: Path, name: str) -> Tensor:
        if self.path != path or self.get is None:
            self.path = self.get = None  # the last file is let go before the next is opened
            file = path.suffix == ".safetensors"
            self.get = _safetensors(path).get_tensor if file else _torch(path, self.part).tensors.__getitem__
            self.path = path
        assert self.get is not None
        return self.get(name)


def _found(source: str | os.PathLike[str]) -> Path:
    """The file that is meant."""
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in FILES if (path / name).exists()]
        found = found or sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if not found or (found[0].name not in FILES and len(found) > 1):
            raise InputError(f"{path} holds {len(found)} files of weights, expected one of {list(FILES)}")
        return found[0]
    sharded = path.with_name(path.name + ".index.json")
    if not path.exists() and sharded.exists():
        return sharded
    if not path.exists() and looks_like_an_id(source):
        return from_hub(str(source), FILES)
    return path


def _configuration(folder: Path) -> dict[str, object]:
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from None


def _dtype(path: Path, name: str, code: str) -> torch.dtype:
    """What safetensors calls F32, BF16, I64 ..."""
    for dtype, known in DTYPES.items():
        if known == code:
            return dtype
    raise InputError(f"{path}: {name} is of dtype {code}, expected one of {sorted(DTYPES.values())}")


def _torch(path: Path, part: str | None) -> _Held:
    return _unwrapped(torch_content(path), part, str(path))


def torch_content(path: Path) -> Mapping[Any, object]:
    """All that a torch file holds. Nothing in it is run."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the released files keep their arguments
            mapped = zipfile.is_zipfile(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # a damaged or hostile file can fail anywhere in torch.load
        raise InputError(f"{path} is not a file of weights that can be read safely: {_why(error)}") from None
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds a {type(content).__name__}, expected a state dict")
    return content


def _why(error: Exception) -> str:
    """One line of what torch says in many."""
    asked = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if asked:
        return f"it wants to use {asked[1]}, which is not data"
    said = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return said.splitlines()[0].strip()[:200]


def _unwrapped(given: Mapping[Any, object], part: str | None, where: str) -> _Held:
    """The state dict in {"model": ...} and the like, which may stand in one another."""
    taken: list[str] = []
    others: tuple[str, ...] = ()
    while True:
        inner = {
            str(key): value
            for key, value in given.items()
            if isinstance(value, Mapping) and any(isinstance(v, Tensor | Mapping) for v in value.values())
        }
        bare = any(isinstance(value, Tensor) for value in given.values())
        if not inner and not bare:
            inner = {name: value for name in PARTS if isinstance(value := given.get(name), Mapping) and value}
        if part is not None and not taken and part not in inner:
            raise InputError(f"{where}: part={part!r}, expected one of {list(inner)}")
        known = [name for name in PARTS if name in inner]
        if part is not None and not taken:
            name = part
        elif known:
            name = known[0]
        elif len(inner) == 1 and not bare:
            (name,) = inner
        elif inner and not bare:
            raise InputError(f"{where} holds several state dicts, expected part= one of {list(inner)}")
        else:
            break
        others = others or tuple(other for other in inner if other != name)
        taken.append(name)
        given = inner[name]
    wrong = [key for key, value in given.items() if not isinstance(value, Tensor)]
    if wrong:
        kind = type(given[wrong[0]]).__name__
        raise InputError(f"{where}: {wrong[0]!r} is a {kind}, expected a state dict of tensors")
    tensors = {str(key): value.detach() for key, value in given.items() if isinstance(value, Tensor)}
    return _Held(tensors, ".".join(taken), others)
