"""A detector: transformers' DETR or Conditional DETR, with a backbone of our choice and another encoding."""

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from whereformer.adapters import equip_detr
from whereformer.errors import InputError
from whereformer.lab.data import seed_all
from whereformer.lab.detect.backbone import backbone
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.start import start_from

SHARPNESS = 5.4  # with which sines are compared at the start: some patches are seen, not one and not all
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
    if experiment.queries is not None and experiment.model == "conditional_detr":
        on_lattice(model, experiment.queries)
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


@torch.no_grad()
def on_lattice(model: Any, queries: tuple[int, int]) -> None:
    """Lets each object query of Conditional DETR begin by looking at its own cell of a lattice over the image.

    From random weights it has to be learned first that the sines of a query's reference point and those of the
    patches are to be compared. Here it is so from the start: reference points are the middles of the cells,
    row by row (as nearly as may be, if there are more of them than features); of their sines and of the patches'
    each head compares the same frequencies of both axes; and nothing else is said to it. All of it is learned on.
    Without sines on the patches nothing is there to compare.
    """
    decoder = model.model.decoder
    rows, columns = ((torch.arange(side) + 0.5) / side for side in queries)
    middles = torch.cartesian_prod(rows, columns).flip(1)  # x, y
    first, last = decoder.ref_point_head.layers
    hidden = first(model.model.query_position_embeddings.weight).relu()
    last.weight.copy_(torch.linalg.lstsq(hidden, middles.logit()).solution.T)
    last.bias.zero_()
    decoder.query_scale.layers[-1].weight.zero_()
    decoder.query_scale.layers[-1].bias.fill_(1)
    heads = model.config.decoder_attention_heads
    waves = torch.arange(model.config.d_model).view(2, -1, 2)  # axis, frequency, sine and cosine
    order = torch.cat([waves[:, head::heads].flatten() for head in range(heads)])
    same = torch.eye(model.config.d_model)[order] * SHARPNESS
    for layer in decoder.layers:
        attention = layer.encoder_attn
        attention.k_pos_proj.weight.copy_(same)
        attention.q_pos_sine_proj.weight.copy_(same)
        if attention.q_pos_proj is not None:
            attention.q_pos_proj.weight.zero_()
