"""A trained DETR, wherever it is from, that is asked about images of any data set."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from whereformer.adapters.hub import looks_like_an_id
from whereformer.errors import InputError
from whereformer.lab.detect.augment import Augmentation
from whereformer.lab.detect.boxes import Annotations, Category
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.predict import predictions
from whereformer.lab.detect.released import released
from whereformer.lab.detect.saved import saved
from whereformer.lab.detect.trained import trained, weights_of_run
from whereformer.lab.detect.tree import Progress

LONGEST = 1333 / 800  # how much longer than the shorter side the longer one may be, in DETR's recipe
UNNAMED = "LABEL_"  # what transformers calls labels that nobody has named
VOID = "N/A"  # and those that mean nothing


@dataclass(frozen=True, eq=False)
class Detector:
    """A model with what its labels mean.

    Args:
        model: transformers' DETR or Conditional DETR, equipped or not.
        categories: what its labels mean, label 0 first; None for one that means nothing.
        augmentation: says to which size images are brought.
        by: which category of a data set a label means: the one with the same "name" or, where it has no names, the
            one whose "id" is the label.
        facts: what it is and what was assumed, in words.
        experiment: of the run that it is from.
    """

    model: nn.Module
    categories: Sequence[Category | None]
    augmentation: Augmentation = field(default_factory=Augmentation)
    by: Literal["name", "id"] = "name"
    facts: Mapping[str, str] = field(default_factory=dict)
    experiment: DetectionExperiment | None = None

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        *,
        encoding: str | None = None,
        part: str | None = None,
        dilation: bool | None = None,
        which: str = "last",
    ) -> "Detector":
        """From the folder of a run of `whereformer detect train`, or its weights; from a folder that transformers'
        `save_pretrained` wrote, equipped or not, or a name on the hub; or from an official file of DETR or of
        iRPE's DETR.

        Args:
            source: the folder, name or file.
            encoding: what the weights of an official file were trained with, such as "detr_sine + irpe(ratio=2)";
                None: as the file says it.
            part: which state dict of an official file, if it holds several.
            dilation: whether it is of a DC5 model; None: as the file says it, or else not.
            which: of a run, the weights after the "last" epoch or after the "best" on the images to test on.

        Raises:
            InputError: it is none of these, or what it holds does not fit.
        """
        path = Path(source)
        hosted = (path / "config.json").is_file() or (not path.exists() and looks_like_an_id(source))
        if not path.exists() and not hosted:
            raise InputError(f"detector={str(source)!r}, expected a file, a folder or a name on the hub")
        file = None if hosted else weights_of_run(path, which)
        if file is None and path.is_file():
            return cls._of_model(*released(path, encoding, part, dilation))
        if encoding or part or dilation is not None:
            given = f"encoding={encoding!r}, part={part!r}, dilation={dilation!r}"
            raise InputError(f"{given}: {str(source)!r} says itself what it holds")
        if file is not None:
            model, categories, experiment, facts = trained(file)
            return cls(model, categories, experiment.augmented, facts=facts, experiment=experiment)
        if not hosted:
            raise InputError(f"detector={str(source)!r}: neither the folder of a run, nor one of transformers")
        model, augmentation, facts = saved(source)
        return replace(cls._of_model(model, facts), augmentation=augmentation)

    @classmethod
    def _of_model(cls, model: Any, facts: Mapping[str, str]) -> "Detector":
        """What its labels mean as its config says; if that names none, COCO's categories if there are as many; or
        else their numbers."""
        named, count = model.config.id2label, model.config.num_labels
        if any(not name.startswith(UNNAMED) for name in named.values()):
            names = [None if (name := named.get(label, VOID)) == VOID else name for label in range(count)]
        elif count == len(coco_names()):
            names = coco_names()
        else:
            facts = {**facts, "labels": "without names: label n is taken for the category of number n"}
            return cls(model, [Category(label, str(label)) for label in range(count)], by="id", facts=facts)
        return cls(model, [Category(i, name) if name else None for i, name in enumerate(names)], facts=facts)

    def looking_at(self, size: int) -> "Detector":
        """The same for images whose shorter side is brought to `size` pixels, as DETR's is to 800."""
        return replace(
            self, augmentation=replace(self.augmentation, shorter=(size,), longest=round(size * LONGEST))
        )

    def known(self, categories: Sequence[Category]) -> dict[int, Category]:
        """Label -> the one of a data set's categories that it means, for those that there are.

        Raises:
            InputError: there are none.
        """
        there = {getattr(category, self.by): category for category in categories}
        keys = {label: getattr(own, self.by) for label, own in enumerate(self.categories) if own}
        found = {label: there[key] for label, key in keys.items() if key in there}
        if not found:
            own = [getattr(category, self.by) for category in self.categories if category]
            theirs = [getattr(category, self.by) for category in categories]
            raise InputError(
                f"the images' categories, {_short(theirs)}, are none of the {len(own)} that the detector knows,"
                f" {_short(own)}"
            )
        return found

    def predict(
        self,
        annotations: Annotations,
        *,
        batch_size: int = 8,
        loader_workers: int = 0,
        on_batch: Progress = lambda done, images: None,
    ) -> list[dict[str, Any]]:
        """What it finds of the images' categories, in their numbers, as `evaluate` takes it.

        It runs on the device that the model is on.

        Raises:
            InputError: it knows none of these categories.
        """
        known = self.known(annotations.categories)
        spare = 1 + max(category.id for category in annotations.categories)
        labels = range(len(self.categories))
        ordered = tuple(known.get(label) or Category(spare + label, f"label {label}") for label in labels)
        rows = predictions(
            self.model,
            replace(annotations, categories=ordered),
            self.augmentation,
            batch_size,
            next(self.model.parameters()).device,
            lambda done: on_batch(done, len(annotations)),
            workers=loader_workers,
        )
        return [row for row in rows if row["category_id"] < spare]

    def to(self, device: torch.device | str) -> "Detector":
        self.model.to(device)
        return self


def coco_names() -> list[str | None]:
    """The names of COCO's categories under their numbers, 0 to 90, of which 80 are used."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

    names = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    return [None if name in ("__background__", VOID) else name for name in names]


def _short(values: Sequence[object]) -> str:
    """
    >>> _short(["a", "b", "c", "d", "e", "f"])
    "'a', 'b', 'c', 'd', 'e' ..."
    """
    return ", ".join(map(repr, values[:5])) + (" ..." if len(values) > 5 else "")
