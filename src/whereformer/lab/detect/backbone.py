"""What makes the feature map of images that a detector attends to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from whereformer.adapters import load_checkpoint
from whereformer.errors import InputError
from whereformer.lab.detect.experiment import DetectionExperiment

GROUPS = 8
STILL = ("conv1", "bn1", "layer1")  # of a ResNet: what DETR leaves as it was trained on ImageNet


def backbone(experiment: DetectionExperiment) -> Any:
    """A module from images [batch, 3, height, width] to a list of one map; its `feature_info` says how many
    channels that has, and how many pixels wide a cell is.

    Norms over the images of a batch do not go with the few images of a detector's: they stay as the weights say
    (`frozen_norm`), or are norms over groups of channels.

    Raises:
        InputError: there is no such backbone, or it cannot have such weights.
    """
    module = _small(experiment) if experiment.backbone == "small" else _timms(experiment)
    if experiment.frozen_norm:
        module = _frozen(module)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(STILL))
    else:
        _with_groups(module)
    if not experiment.backbone_learning_rate:
        module.requires_grad_(False)
    return module


def _small(experiment: DetectionExperiment) -> Any:
    """Convolutions of 3 x 3, then stages of residual blocks, each of which halves the map."""
    from timm.models._features import FeatureListNet
    from timm.models.byobnet import ByobNet, ByoModelCfg

    if experiment.backbone_weights:
        raise InputError(f"backbone_weights={experiment.backbone_weights!r}, expected None: 'small' has none")
    try:
        blocks, stem = _blocks(**experiment.backbone_args)
        config = ByoModelCfg(blocks=blocks, stem_chs=stem, stem_type="3x3", stem_pool="")
        return FeatureListNet(ByobNet(config, num_classes=0), out_indices=(len(blocks),), flatten_sequential=True)
    except (TypeError, ValueError, KeyError, AssertionError, RuntimeError) as error:
        raise InputError(f"backbone_args={dict(experiment.backbone_args)!r} cannot be built: {error}") from error


def _blocks(*, stem: int, layers: Sequence[int], channels: Sequence[int]) -> tuple[Any, int]:
    """What a small backbone is: blocks and channels of each stage, and the channels before them."""
    from timm.models.byobnet import ByoBlockCfg

    sizes = zip(layers, channels, strict=True)
    return tuple(ByoBlockCfg(type="basic", d=depth, c=width, s=2, br=1.0) for depth, width in sizes), stem


def _timms(experiment: DetectionExperiment) -> Any:
    from timm import create_model

    name, weights = experiment.backbone, experiment.backbone_weights
    args: dict[str, Any] = {"features_only": True, "out_indices": (-1,), **experiment.backbone_args}
    if weights not in (None, "pretrained") and not Path(weights).is_file():
        raise InputError(f"backbone_weights={weights!r}, expected 'pretrained', a file or None: no such file")
    try:
        if weights not in (None, "pretrained"):  # of a whole model, of which the backbone is a part
            whole = load_checkpoint(create_model(name), weights)
            args["pretrained_cfg_overlay"] = {"state_dict": whole.state_dict()}
        return create_model(name, pretrained=weights is not None, **args)
    except InputError:
        raise
    except (RuntimeError, TypeError, AssertionError, ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())
        if weights == "pretrained":
            raise InputError(
                f"backbone={name!r} with backbone_weights='pretrained' cannot be had: {reason}. Without the"
                " Hugging Face hub, give a file of its weights, or None for random ones"
            ) from error
        raise InputError(f"backbone={name!r} cannot be built: {reason}") from error


def _frozen(module: Any) -> Any:
    from timm.layers.norm_act import freeze_batch_norm_2d

    return freeze_batch_norm_2d(module)


def _with_groups(module: nn.Module) -> None:
    """Exchanges norms over the batch for norms over groups of channels, which start anew."""
    from timm.layers.norm_act import BatchNormAct2d, GroupNormAct

    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            if child.num_features % GROUPS:
                raise InputError(
                    f"backbone: {name} has {child.num_features} channels, expected a multiple of {GROUPS}: norms"
                    " are over groups"
                )
            new: Any = GroupNormAct(child.num_features, GROUPS)
            new.drop, new.act = (
                (child.drop, child.act) if isinstance(child, BatchNormAct2d) else (nn.Identity(), nn.Identity())
            )
            setattr(module, name, new)
        else:
            _with_groups(child)
