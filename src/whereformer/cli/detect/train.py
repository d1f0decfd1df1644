"""whereformer detect train: train and compare detectors."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from whereformer.cli.arguments import count, specs
from whereformer.cli.detect.common import whole
from whereformer.cli.show import needs_detect
from whereformer.cli.studies import given, show
from whereformer.errors import InputError

EXAMPLES = """\
examples:
  whereformer detect train
      small detectors on shapes that are drawn first, without positions, as DETR has them, and with iRPE
  whereformer detect train --encodings "detr_sine; detr_sine + irpe(ratio=2); detr_learned" --seeds 3
  whereformer detect train --data path/to/coco --enc_rpe2d rpe-2.0-product-ctx-1-k
      the iRPE paper's recipe: DETR-R50, 150 epochs; annotations and images in zip files or not
  whereformer detect train --data path/to/voc --recipe small --size 256
  whereformer detect train --experiment my_experiment.py --out runs/mine
  whereformer detect train --resume runs/mine
  torchrun --nproc-per-node 8 -m whereformer.cli detect train --data path/to/coco

The same command again goes on where it stopped; runs that are finished are not repeated.
"""


def arguments(command: argparse.ArgumentParser) -> None:
    what = command.add_argument_group("what to train")
    what.add_argument("--encodings", action="append", metavar="SPECS", help="separated by ;  (may be repeated)")
    what.add_argument(
        "--enc_rpe2d",
        action="append",
        metavar="SPEC",
        help='the official option: "detr_sine + SPEC" (may be repeated)',
    )
    what.add_argument(
        "--baseline", metavar="SPEC", help="what the others are compared with (detr_sine, or the first)"
    )
    what.add_argument("--seeds", type=count, metavar="N", help="runs of each encoding, with seeds 0 to N - 1")
    on = command.add_argument_group("on which images")
    on.add_argument(
        "--data", metavar="DIR", help="a folder or a zip file of annotated images (shapes, drawn first)"
    )
    on.add_argument("--broken", choices=("skip", "refuse"), help="what becomes of data with mistakes (skip)")
    on.add_argument("--size", type=count, metavar="PIXELS", help="of images, as DETR's 800 (small: 64)")
    how = command.add_argument_group("with which model and recipe")
    how.add_argument(
        "--recipe", choices=("small", "paper"), help="what is not said (paper with --data, else small)"
    )
    how.add_argument("--model", help="detr or conditional_detr")
    how.add_argument("--backbone", help="small, or any timm model")
    how.add_argument("--backbone-weights", metavar="FILE", help="pretrained, none, or a file")
    how.add_argument("--weights", metavar="FILE", help="of a whole detector, to start from")
    how.add_argument("--epochs", type=count, metavar="N", help="the learning rates drop in proportion")
    how.add_argument("--batch-size", type=count, metavar="N", help="over all processes together")
    how.add_argument("--lr", type=float, metavar="RATE", help="that of the backbone goes with it, in proportion")
    how.add_argument("--ema", type=float, metavar="DECAY", help="test and keep a moving average of the weights")
    how.add_argument("--precision", choices=("no", "bf16", "fp16"), help="mixed precision")
    where = command.add_argument_group("where")
    where.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results (runs/ and a name of its own)"
    )
    source = where.add_mutually_exclusive_group()
    source.add_argument("--resume", type=Path, metavar="DIR", help="go on in a folder, with the experiment in it")
    source.add_argument(
        "--experiment", type=Path, metavar="FILE", help="Python that says experiment = DetectionExperiment(...)"
    )
    where.add_argument("--workers", type=count, metavar="N", help="processes that train, on a CPU (one per core)")
    where.add_argument(
        "--loader-workers", type=whole, metavar="N", help="processes that read images, of each of these"
    )


def train(options: argparse.Namespace) -> None:
    """train detectors with each of several encodings, test them, and compare them"""
    needs_detect()
    from rich.console import Console

    from whereformer.lab.detect.compare import compare

    experiment, out = _asked(options)
    options.interrupted = f"interrupted; to go on: whereformer detect train --resume {shlex.quote(str(out))}"
    console = Console(stderr=True, highlight=False)
    comparison = compare(experiment, out, workers=options.workers, console=console)
    if comparison is not None:  # else this is not the main process of a distributed launch
        show(options, comparison, [comparison.table(), comparison.by_category()])


def _asked(options: argparse.Namespace) -> tuple[Any, Path]:
    """The experiment that the options describe, and its folder."""
    from whereformer.lab.detect.experiment import DetectionExperiment

    base = given(options, DetectionExperiment) or _recipe(options)
    experiment = replace(base, **_changes(options, base))
    name = f"detect-{Path(experiment.data).stem}-{experiment.digest()}"
    return experiment, options.resume or options.out or Path("runs") / name


def _recipe(options: argparse.Namespace) -> Any:
    from whereformer.lab.detect.experiment import DetectionExperiment, paper

    if (options.recipe or ("paper" if options.data else "small")) == "small":
        return DetectionExperiment()
    if not options.data:
        raise InputError("recipe='paper', expected --data too: it is no recipe for the shapes")
    return paper(options.data)


def _changes(options: argparse.Namespace, base: Any) -> dict[str, Any]:
    """The fields that options say otherwise than the experiment that they begin with."""
    fields = (
        *("data", "broken", "model", "backbone", "backbone_weights", "weights", "batch_size", "ema", "precision"),
        *("baseline", "loader_workers"),
    )
    changes = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
    for name in ("data", "weights", "backbone_weights"):  # the folder may be resumed from elsewhere
        if Path(changes.get(name, "")).is_absolute() or not Path(changes.get(name) or " ").exists():
            continue
        changes[name] = str(Path(changes[name]).resolve())
    if options.backbone_weights == "none":
        changes["backbone_weights"] = None
    if options.data and base.data == "shapes":
        changes["data_args"] = {}
    if options.size is not None:
        others = {name: value for name, value in base.augmentation.items() if name not in ("shorter", "longest")}
        changes["augmentation"] = {**others, "scaled": options.size}
    if options.backbone and options.backbone != base.backbone:
        changes["backbone_args"] = {}
    if options.epochs is not None:
        changes["epochs"] = options.epochs
        drop = None if base.drop is None else round(base.drop * options.epochs / base.epochs)
        changes["drop"] = drop if drop and drop < options.epochs else None
    if options.lr is not None:
        changes["learning_rate"] = options.lr
        changes["backbone_learning_rate"] = options.lr * base.backbone_learning_rate / base.learning_rate
    if options.seeds is not None:
        changes["seeds"] = tuple(range(options.seeds))
    asked = (*specs(options.encodings or ()), *(f"detr_sine + {spec}" for spec in options.enc_rpe2d or ()))
    if options.encodings or options.enc_rpe2d:
        changes["encodings"] = asked
        if options.baseline is None and base.baseline not in asked and asked:
            changes["baseline"] = asked[0]
    return changes
