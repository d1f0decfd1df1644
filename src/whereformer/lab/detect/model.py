"""A detector: transformers' DETR or Conditional DETR, with a backbone of our choice and another encoding."""

import math
from dataclasses import fields, replace
from typing import Any

from torch import nn

from whereformer.adapters import equip_detr
from whereformer.errors import InputError
from whereformer.lab.detect.backbone import backbone
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.start import start_from
from whereformer.lab.train import seed_all

PRIOR = 0.01  # of a class, in Conditional DETR's focal loss


def build(
    experiment: DetectionExperiment, encoding: str, seed: int, categories: int, *, filled: bool = True
) -> Any:
    """The detector; the weights that all encodings share are equal for equal seeds.

    Its own sines are removed, and `encoding` stands in their place. All starts as in DETR's own code: matrices of
    the transformer from Xavier's distribution, object queries from a standard normal one. That code draws iRPE's
    tables so too, as the official iRPE does; ours start at zero, as the paper says.

    Args:
        categories: how many there are.
        filled: whether the weights are read that the experiment starts from; without, if others come anyway.

    Raises:
        InputError: something of it cannot be built.
    """
    if not filled:
        experiment = replace(experiment, backbone_weights=None, weights=None)
    seed_all(seed)
    model = equipped(experiment, bare(experiment, categories), encoding)
    if experiment.weights:
        start_from(model, experiment.weights)
    return model


def bare(experiment: DetectionExperiment, categories: int) -> Any:
    """The detector of transformers as it is without us: with its own sines."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import (
        ConditionalDetrConfig,
        ConditionalDetrForObjectDetection,
        DetrConfig,
        DetrForObjectDetection,
    )

    features = backbone(experiment)
    kinds: Any = {
        "detr": (DetrConfig, DetrForObjectDetection),
        "conditional_detr": (ConditionalDetrConfig, ConditionalDetrForObjectDetection),
    }
    make_config, make = kinds[experiment.model]
    args = {"num_labels": categories, **experiment.model_args}
    if unknown := sorted(args.keys() - {field.name for field in fields(make_config)} - {"num_labels"}):
        raise InputError(f"model_args: {', '.join(unknown)} unknown to a {make_config.__name__}")
    if experiment.queries is not None:
        args["num_queries"] = math.prod(experiment.queries)
    try:
        if args.get("num_queries", 1) < 1:
            raise ValueError(f"num_queries={args['num_queries']}, expected a positive number")
        model = make(make_config(backbone_config=_stand_in(features.feature_info.channels()[-1]), **args))
    except (StrictDataclassError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"model_args={dict(experiment.model_args)!r} cannot be built: {reason}") from error
    model.model.backbone.model = features
    _start(model)
    return model


def equipped(experiment: DetectionExperiment, model: Any, encoding: str) -> Any:
    """The detector with an encoding in the place of its own sines."""
    home = experiment.home(model.model.backbone.model.feature_info.reduction()[-1])
    decoder = experiment.decoder_encoding
    if decoder is None:
        return equip_detr(model, encoding, home=home)
    on: Any = experiment.decoder_on
    return equip_detr(model, encoding, decoder, queries=experiment.queries, on=on, home=home)


def _stand_in(channels: int) -> Any:
    """The config of a backbone of so many channels, for transformers to build a model around."""
    from transformers import ResNetConfig

    args: dict[str, Any] = {"layer_type": "basic", "out_features": ["stage1"]}
    return ResNetConfig(embedding_size=1, hidden_sizes=[channels], depths=[1], **args)


def _start(model: Any) -> None:
    """The weights that DETR's own code starts from, which transformers draws otherwise."""
    for part in (model.model.encoder, model.model.decoder):
        for parameter in part.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    heads = (model.class_labels_classifier, model.bbox_predictor)
    for module in (model.model.query_position_embeddings, model.model.input_projection, *heads):
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.Embedding):
                layer.reset_parameters()
    if hasattr(model.model.decoder, "ref_point_head"):  # Conditional DETR
        nn.init.constant_(model.class_labels_classifier.bias, math.log(PRIOR / (1 - PRIOR)))
        nn.init.zeros_(model.bbox_predictor.layers[-1].weight)
        nn.init.zeros_(model.bbox_predictor.layers[-1].bias)
