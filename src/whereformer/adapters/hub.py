"""Weights on the Hugging Face hub."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from whereformer.adapters.shards import shards_in
from whereformer.errors import InputError

ID = re.compile(r"(hf-hub:)?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".json")


def looks_like_an_id(source: str | os.PathLike[str]) -> bool:
    """
    >>> [looks_like_an_id(text) for text in ("timm/vit_base@main", "runs/last.pth", "/models/vit", "model")]
    [True, False, False, False]
    """
    return isinstance(source, str) and bool(ID.fullmatch(source)) and not source.endswith(SUFFIXES)


def from_hub(source: str, names: Sequence[str]) -> Path:
    """The first of these files that a repository has, from the local cache or the network.

    Args:
        source: `owner/name` or `owner/name@revision`; timm's prefix "hf-hub:" may stand before it.
        names: files of weights; of an index, the files it names are fetched too.

    Raises:
        InputError: there is no such repository or file, or no network, or huggingface_hub is missing.
    """
    repository, _, revision = source.removeprefix("hf-hub:").partition("@")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise InputError(
            f'{source!r} is no file, and the hub needs {error.name}: pip install "whereformer[lab]"'
        ) from None

    def fetched(name: str) -> Path:
        return Path(hf_hub_download(repository, name, revision=revision or None))

    reached = False
    try:
        for name in names:
            try:
                path = fetched(name)
            except LocalEntryNotFoundError:  # neither in the cache, nor can it be asked for
                continue
            except EntryNotFoundError:
                reached = True
                continue
            if name.endswith(".index.json"):
                for shard in dict.fromkeys(shards_in(path).values()):
                    fetched(shard)
            with suppress(EntryNotFoundError):  # which includes LocalEntryNotFoundError
                fetched("config.json")
            return path
    except InputError:
        raise
    except Exception as error:  # of many kinds: no such repository, no access, no network, a damaged cache
        said = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{source!r} is no file, and the hub has none of it: {type(error).__name__}: {said}"
        ) from None
    if reached:
        raise InputError(f"{source!r} on the hub holds none of {list(names)}")
    raise InputError(
        f"{source!r} is no file, and as an id of the hub it is not in the cache, nor is there a network"
    )
