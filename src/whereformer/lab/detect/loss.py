"""DETR's loss, of every layer of the decoder, over the images of all processes."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor, nn

LOSSES = ("labels", "boxes")


class WithLoss(nn.Module):
    """A detector whose forward is the loss of a batch.

    The parts come from transformers, but what is made of them does not: with its `auxiliary_loss`, layers of the
    decoder go on from normalised outputs of the ones before, so that the model is another one than published; and
    with P processes its losses of boxes are P times too large. Here all is divided by what there is of it in all
    processes, of classes too: a step of several processes is one of a single process with the whole batch.

    Args:
        detector: of transformers, bare or equipped.
    """

    def __init__(self, detector: Any) -> None:
        super().__init__()
        config = detector.config
        self.detector = detector
        self.criterion = criterion_of(detector)
        self.weights = {
            "loss_ce": 1.0 if is_detr(detector) else config.cls_loss_coefficient,
            "loss_bbox": config.bbox_loss_coefficient,
            "loss_giou": config.giou_loss_coefficient,
        }

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Takes what `collate` makes; gives losses by name, each [], float32: "loss" is to be trained on, the
        others, weighted, are the parts of it that the last layer of the decoder has."""
        out = self.detector.model(batch["pixel_values"], batch["pixel_mask"], output_hidden_states=True)
        with torch.autocast(batch["pixel_values"].device.type, enabled=False):
            return self._losses(list(self._layers(out)), batch["labels"])

    def _layers(self, out: Any) -> Iterator[dict[str, Tensor]]:
        """Logits and boxes of each layer of the decoder."""
        model = self.detector
        *earlier, last = out.decoder_hidden_states[1:]  # the last one is normalised already
        for hidden in (*(model.model.decoder.layernorm(one) for one in earlier), last):
            hidden = hidden.float()
            places = model.bbox_predictor(hidden)
            if not is_detr(model):
                places = torch.cat(
                    [places[..., :2] + out.reference_points.transpose(0, 1).logit(1e-5), places[..., 2:]], -1
                )
            yield {"logits": model.class_labels_classifier(hidden), "pred_boxes": places.sigmoid()}

    def _losses(self, layers: list[dict[str, Tensor]], labels: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        like = layers[-1]["logits"]
        boxes = mean(like.new_tensor(float(sum(len(one["boxes"]) for one in labels)))).clamp(min=1).item()
        if not all(torch.isfinite(value).all() for layer in layers for value in layer.values()):
            return {"loss": like.sum() * float("nan")}  # the matcher would raise, in this process alone
        total, parts = like.new_zeros(()), {}
        for layer in layers:
            pairs = self.criterion.matcher(layer, labels)
            losses: dict[str, Tensor] = {}
            for name in LOSSES:
                losses |= self.criterion.get_loss(name, layer, labels, pairs, boxes)
            if is_detr(self.detector):  # a mean, weighted by what there is
                losses["loss_ce"] = losses["loss_ce"] * self._share(pairs, like)
            parts = {name: self.weights[name] * loss for name, loss in losses.items()}
            total = total + torch.stack(list(parts.values())).sum()
        return {"loss": total, **{name: part.detach() for name, part in parts.items()}}

    def _share(self, pairs: Any, logits: Tensor) -> Tensor:
        """How much of the classes' weight this process has, in relation to the mean over processes."""
        objects = sum(len(rows) for rows, _ in pairs)
        nothing = logits.shape[0] * logits.shape[1] - objects
        weight = logits.new_tensor(objects + self.detector.config.eos_coefficient * nothing)
        return weight / mean(weight)


def mean(value: Tensor) -> Tensor:
    """Over all processes."""
    return reduce(value, "mean")  # pyright: ignore[reportReturnType]


def is_detr(detector: Any) -> bool:
    """Whether it says "nothing" as a class of its own; else each class has a probability of its own."""
    return detector.config.model_type == "detr"


def criterion_of(detector: Any) -> Any:
    """transformers' losses, and how it pairs what is predicted with what is there."""
    from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss
    from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss

    config = detector.config
    costs = config.class_cost, config.bbox_cost, config.giou_cost
    if is_detr(detector):
        return ImageLoss(HungarianMatcher(*costs), config.num_labels, config.eos_coefficient, list(LOSSES))
    matcher = DeformableDetrHungarianMatcher(*costs)
    return DeformableDetrImageLoss(matcher, config.num_labels, config.focal_alpha, list(LOSSES))
