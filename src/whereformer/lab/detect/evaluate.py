"""COCO's average precision and recall of predicted boxes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whereformer.errors import InputError, check_one_of
from whereformer.lab.detect.boxes import Annotations

MOST = 100  # predictions that count of each category in an image, the surest first
COCO_IMAGE = 640 * 480  # pixels of an image of the size that COCO's bounds of small and large were made for
AREAS = ("pixels", "share")
ROW = ("AP", "AP50", "AP75", "APS", "APM", "APL")

Array = NDArray[Any]
Prediction = Mapping[str, Any]  # {"image_id", "category_id", "bbox": [left, top, width, height], "score"}


@dataclass(frozen=True)
class Scores:
    """Parts of 1, or None where there is nothing to find.

    Args:
        AP: average precision, mean over categories and overlaps (IoU) of 0.50, 0.55, ... 0.95.
        AP50, AP75: at these overlaps.
        APS, APM, APL: of small, medium and large objects: below 32², to 96², above.
        AR1, AR10, AR100: average recall of as many predictions for each image and category.
        ARS, ARM, ARL: with 100 of them, of small, medium and large objects.
    """

    AP: float | None
    AP50: float | None
    AP75: float | None
    APS: float | None
    APM: float | None
    APL: float | None
    AR1: float | None
    AR10: float | None
    AR100: float | None
    ARS: float | None
    ARM: float | None
    ARL: float | None


@dataclass(frozen=True)
class Metrics:
    """How good predictions are.

    Args:
        overall: mean over the categories.
        per_category: each by its name.
        boxes: how many there are to find of each category; crowds do not count.
        images, predictions: how many there were.
    """

    overall: Scores
    per_category: Mapping[str, Scores]
    boxes: Mapping[str, int]
    images: int
    predictions: int

    def row(self) -> list[str]:
        """A line of the iRPE paper's Table 6, in %: AP, AP50, AP75, APS, APM, APL."""
        return percent(self.overall)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and lines, in %: all categories, then each."""
        lines = [["all", str(sum(self.boxes.values())), *percent(self.overall)]]
        lines += [[name, str(self.boxes[name]), *percent(scores)] for name, scores in self.per_category.items()]
        return ["category", "boxes", *ROW], lines

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self.overall),
            "images": self.images,
            "predictions": self.predictions,
            "per_category": {
                name: {"boxes": self.boxes[name], **asdict(scores)} for name, scores in self.per_category.items()
            },
        }


def percent(scores: Scores) -> list[str]:
    values = (getattr(scores, name) for name in ROW)
    return ["–" if value is None else f"{100 * value:.1f}" for value in values]


def evaluate(
    truth: Annotations, predictions: Sequence[Prediction], areas: Literal["pixels", "share"] = "pixels"
) -> Metrics:
    """What pycocotools gives, to the last digit, computed by faster-coco-eval.

    Predictions that meet a crowd count neither for nor against; of an image and a category the 100 surest count.

    Args:
        truth: the images that were looked at.
        predictions: each {"image_id", "category_id", "bbox": [left, top, width, height], "score"}, in pixels.
        areas: by what an object is small or large. "pixels": COCO's bounds; "share": these bounds as parts of an
            image of 640 x 480, for images of other sizes.

    Raises:
        InputError: a prediction is of an unknown image or category, or has other numbers than finite ones.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    check_one_of("areas", areas, AREAS)
    coco = truth.to_coco()
    for number, one in enumerate(coco["annotations"], 1):
        one["id"] = number  # 0 would say "not matched"
    rows = _checked(truth, predictions)
    known = COCO(coco)
    guessed = known.loadRes(rows)
    if areas == "share":
        scale = {one.id: COCO_IMAGE / (one.width * one.height) for one in truth.pictures}
        for one in (*known.dataset["annotations"], *guessed.dataset["annotations"]):
            one["area"] *= scale[one["image_id"]]
    found = COCOeval_faster(known, guessed, "bbox")
    counts = _counts(known.dataset, found.params.areaRng)
    precision, recall = _exactly(found, counts)
    return Metrics(
        overall=_scores(precision, recall),
        per_category={name: _scores(precision[:, :, [k]], recall[:, [k]]) for k, name in enumerate(truth.names)},
        boxes=dict(zip(truth.names, counts[:, 0].tolist(), strict=True)),
        images=len(truth),
        predictions=len(rows),
    )


def predicted(
    truth: Annotations, image_id: int, xyxy: Tensor, labels: Tensor, scores: Tensor
) -> Iterator[dict[str, Any]]:
    """The predictions for one image, as `evaluate` takes them.

    Args:
        truth: it says which numbers the categories have.
        xyxy: left, top, right, bottom in pixels of the image as it is stored: [predictions, 4].
        labels: counted from 0: [predictions].
        scores: the higher the surer: [predictions].
    """
    for (left, top, right, bottom), label, score in zip(
        xyxy.double().tolist(), labels.tolist(), scores.double().tolist(), strict=True
    ):
        yield {
            "image_id": image_id,
            "category_id": truth.categories[label].id,
            "bbox": [left, top, right - left, bottom - top],
            "score": score,
        }


def _checked(truth: Annotations, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    images = {picture.id for picture in truth.pictures}
    categories = {category.id for category in truth.categories}
    rows = []
    for place, one in enumerate(predictions):
        try:
            image, category, box, score = (one[key] for key in ("image_id", "category_id", "bbox", "score"))
            numbers = [float(number) for number in (*box, score)]
            known = image in images, category in categories
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"predictions[{place}]={one!r}, expected image_id, category_id, bbox and score"
            ) from None
        if not known[0]:
            raise InputError(f"predictions[{place}]: image_id={image!r} is none of the {len(images)} images")
        if not known[1]:
            raise InputError(
                f"predictions[{place}]: category_id={category!r}, expected one of {sorted(categories)}"
            )
        if len(numbers) != 5 or not all(map(math.isfinite, numbers)):
            raise InputError(f"predictions[{place}]: {one!r}, expected four finite numbers and a score")
        rows.append({"image_id": image, "category_id": category, "bbox": numbers[:4], "score": numbers[4]})
    return rows


def _counts(coco: dict[str, Any], bounds: Sequence[Sequence[float]]) -> Array:
    """How many objects there are to find of each category and within each of the `bounds` of area."""
    rows = {one["id"]: row for row, one in enumerate(coco["categories"])}
    counts = np.zeros((len(rows), len(bounds)), dtype=int)
    for one in coco["annotations"]:
        within = [low <= one["area"] <= high for low, high in bounds]
        counts[rows[one["category_id"]]] += np.array(within) & (not one["iscrowd"])
    return counts


def _exactly(found: Any, counts: Array) -> tuple[Array, Array]:
    """Precision [overlaps, recalls, categories, sizes, most] and recall, without recalls; −1 where nothing is.

    pycocotools divides by how many were predicted plus the spacing of floating numbers at 1, which differs from a
    plain quotient for one prediction alone: if the surest is right and the next is not, precision is that much
    less than 1. What precision is when a second object is found tells that, so it is asked for too.
    """
    asked, second = found.params.recThrs, 1.5 / np.maximum(counts, 1)
    found.params.recThrs = np.unique([*asked, *second.flat])
    found.params.maxDets = [1, 10, MOST]
    found.evaluate()
    found.accumulate()
    precision, recall = found.eval["precision"], found.eval["recall"]
    categories, sizes = np.indices(counts.shape)
    then = precision[:, np.searchsorted(found.params.recThrs, second), categories, sizes]
    precision = precision[:, np.searchsorted(found.params.recThrs, asked)]
    once = (precision == 1) & (then < 1)[:, None]
    return np.where(once, 1 / (1 + np.spacing(1)), precision), recall


def _scores(precision: Array, recall: Array) -> Scores:
    all_sizes, most = 0, 2

    def mean(values: Any) -> float | None:
        values = values[values > -1]
        return float(values.mean()) if values.size else None

    return Scores(
        AP=mean(precision[..., all_sizes, most]),
        AP50=mean(precision[[0], ..., all_sizes, most]),
        AP75=mean(precision[[5], ..., all_sizes, most]),
        **{f"AP{size}": mean(precision[..., area, most]) for area, size in enumerate("SML", 1)},
        **{f"AR{count}": mean(recall[..., all_sizes, i]) for i, count in enumerate((1, 10, 100))},
        **{f"AR{size}": mean(recall[..., area, most]) for area, size in enumerate("SML", 1)},
    )
