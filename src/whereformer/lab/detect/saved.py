"""DETR from folders of transformers, and from the hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from whereformer.adapters.behaviours import EquippedModel
from whereformer.adapters.pretrained import KEY, from_pretrained
from whereformer.errors import InputError
from whereformer.lab.detect.augment import MEAN, SD, Augmentation
from whereformer.lab.detect.predict import processors


def saved(source: str | os.PathLike[str]) -> tuple[Any, Augmentation, dict[str, str]]:
    """The model that `save_pretrained` wrote, equipped if it was; to which size it wants images; and what it is.

    Args:
        source: a folder, or a name on the hub.

    Raises:
        InputError: it is no DETR or Conditional DETR that finds boxes; weights are missing; it wants images
            prepared otherwise than DETR does.
    """
    from transformers import AutoConfig

    kinds: dict[str, Any] = {kind.config_class.model_type: kind for kind in processors()}
    try:
        config: Any = AutoConfig.from_pretrained(source)
        if config.model_type not in kinds:
            raise InputError(f"detector={str(source)!r} is a {config.model_type!r}, expected one of {list(kinds)}")
        kind = kinds[config.model_type]
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # they are refused below
        with _quiet():
            if hasattr(config, KEY):
                model, info = from_pretrained(kind, source, **options)
            else:
                model, info = kind.from_pretrained(source, **options)
        augmentation = _augmentation(source, processors()[kind])
    except InputError:
        raise
    except Exception as error:  # of many kinds: damaged files, no network, no such name
        reason = " ".join(str(error).split())
        raise InputError(f"detector={str(source)!r} cannot be loaded: {reason[:300]}") from None
    lost = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
    if lost:
        raise InputError(
            f"detector={str(source)!r} does not fit its config.json: {lost[0]!r} and {len(lost) - 1} more"
        )
    facts = {"weights": f"{type(model).__name__} of transformers", "encoding": _encoding(model)}
    return model.eval(), augmentation, facts


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars and tables."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _encoding(model: Any) -> str:
    own = "detr_sine" if model.config.position_embedding_type == "sine" else "detr_learned"
    if not isinstance(model, EquippedModel):
        return own
    return f"{own} + {model.encoding}" if model.recipe["keep_own"] else model.encoding


def _augmentation(source: Any, kind: type[Any]) -> Augmentation:
    """As its image processor says; where there is none, as DETR's."""
    try:
        processor = kind.from_pretrained(source)
    except OSError:
        return Augmentation()
    size = {name: side for name, side in dict(processor.size).items() if side}
    asked = {"size": size, "mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}
    if size.keys() != {"shortest_edge", "longest_edge"} or (asked["mean"], asked["std"]) != (MEAN, SD):
        raise InputError(
            f"preprocessor_config.json of {str(source)!r} says {asked}, expected sizes of the shortest and the"
            f" longest edge, mean={MEAN} and std={SD}"
        )
    return Augmentation(shorter=(size["shortest_edge"],), longest=size["longest_edge"])
