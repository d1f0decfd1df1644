"""Models of transformers that are saved with their encodings, and loaded so."""

import functools
import json
import os
import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from whereformer.adapters.behaviours import EquippedModel, aliases
from whereformer.adapters.equip import equip
from whereformer.adapters.find import host_of
from whereformer.adapters.seats import read
from whereformer.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "whereformer"
"""The entry of config.json that says with what a model is equipped."""

LOAD_WITH = "whereformer.adapters.from_pretrained"
"""The name of an empty tensor in the file, which transformers reports as unexpected where it loads by itself."""


class EquippedPreTrained(EquippedModel, *((PreTrainedModel,) if TYPE_CHECKING else ())):
    """Writes with what it is equipped into its config.json."""

    @staticmethod
    def named(original: type[nn.Module]) -> str:
        """Its own name: transformers goes by it in config.json, and when it collects attentions."""
        return original.__name__

    def save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        weights = self.state_dict() if state_dict is None else state_dict
        weights = {name: value for name, value in weights.items() if name not in aliases(self)}
        weights[LOAD_WITH] = torch.zeros(0)
        setattr(self.config, KEY, self.recipe)  # for the time being: other models may share the config
        try:
            super().save_pretrained(save_directory, *args, state_dict=weights, **kwargs)
        finally:
            delattr(self.config, KEY)


def from_pretrained(kind: Any, source: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Load what an equipped model's `save_pretrained` wrote, equipped.

    Args:
        kind: a class of transformers, such as ViTForImageClassification or AutoModel.
        source: a folder, or a name on the hub.
        args, kwargs: for the class's own `from_pretrained`: dtype, device_map, ...

    Returns:
        what that returns.

    Raises:
        InputError: the model was not equipped when it was saved; weights of its encodings are missing, or
            offloaded.
    """
    kind = _of_config(kind, source, kwargs)
    wants_info = kwargs.pop("output_loading_info", False)
    loading: Any = _equipping(kind).from_pretrained
    model, info = loading(source, *args, output_loading_info=True, **kwargs)
    own = {id(module) for module, _, _ in model.before}
    names = [name for name, module in model.named_modules() if id(module) in own]
    changed = [entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]]
    others = aliases(model)
    lost = [
        key
        for key in (*info["missing_keys"], *changed)
        if key not in others and (".encodings." in f".{key}" or key.rpartition(".")[0] in names)
    ]
    if lost:
        raise InputError(f"{source} does not hold what its config says: {', '.join(sorted(lost))}")
    if away := [name for name, p in model.named_parameters() if p.is_meta and ".encodings." in f".{name}"]:
        raise InputError(
            f"device_map: {away[0]} is offloaded, but encodings are read without being called, so that nothing"
            " would bring it back: expected devices for all blocks"
        )
    return (model, info) if wants_info else model


def _of_config(kind: Any, source: str | os.PathLike[str], options: dict[str, Any]) -> "type[PreTrainedModel]":
    """The class itself; of an Auto class, the one that it would choose; of an equipped one, what it was before."""
    if issubclass(kind, EquippedPreTrained):
        return cast("type[PreTrainedModel]", kind.__bases__[1])
    if not hasattr(kind, "_model_mapping"):
        return kind
    from transformers import AutoConfig

    about_files = ("revision", "token", "subfolder", "cache_dir", "local_files_only", "force_download")
    config = options.get("config") or AutoConfig.from_pretrained(
        source, **{name: options[name] for name in about_files if name in options}
    )
    try:
        found = kind._model_mapping[type(config)]
    except KeyError:
        raise InputError(f"{kind.__name__} has no class for {type(config).__name__}, as {source} has") from None
    if not isinstance(found, tuple):
        return found
    named = {cls.__name__: cls for cls in found}
    return named.get((config.architectures or [""])[0], found[0])


@functools.cache
def _equipping(kind: "type[PreTrainedModel]") -> "type[PreTrainedModel]":
    """Its instances become equipped ones of `kind` as soon as they are built, before weights come."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        self.__class__ = kind
        recipe = config.__dict__.pop(KEY, None)
        if not isinstance(recipe, dict):
            raise InputError(
                f"{config.name_or_path or 'config'}: no entry {KEY!r} in its config.json, as an equipped model's"
                f" save_pretrained writes it; use {kind.__name__}.from_pretrained, then whereformer.equip"
            )
        try:
            asked = {"encoding": read(recipe["encoding"]), **{k: recipe[k] for k in ("keep_own", "share")}}
            options = dict(recipe.get("host", {}))
        except (KeyError, TypeError, ValueError):
            raise InputError(f"config.json: {KEY}={json.dumps(recipe)[:200]}, which cannot be read") from None
        equip(self, host=host_of(self, **options), **asked)
        for module, _, _ in self.before:  # transformers would fill again what is gone
            module._is_hf_initialized = True
        self.all_tied_weights_keys.update(aliases(self))
        self._keys_to_ignore_on_load_unexpected.add(re.escape(LOAD_WITH))

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})
