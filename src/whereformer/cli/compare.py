"""whereformer compare: train and compare encodings."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from whereformer.cli.arguments import count, specs
from whereformer.cli.show import needs_lab
from whereformer.cli.studies import given, show

EXAMPLES = """\
examples:
  whereformer compare
      the embedded handwritten digits, a small vision transformer, eight encodings, in minutes on a CPU
  whereformer compare --encodings "none; learned; irpe(on='qkv')" --seeds 3
  whereformer compare --data path/to/images --model vit_small_patch16_224 --epochs 100
      an image folder: train/<class>/*.jpg and validation/<class>/*.jpg, or <class>/*.jpg alone
  whereformer compare --data torch/cifar10 --data-root data --download --image-size 32 --patch-size 4
  whereformer compare --experiment my_experiment.py --out runs/mine
  whereformer compare --resume runs/mine
  torchrun --nproc-per-node 4 -m whereformer.cli compare --data path/to/images

The same command again goes on where it stopped; runs that are finished are not repeated.
"""


def arguments(command: argparse.ArgumentParser) -> None:
    what = command.add_argument_group("what to compare")
    what.add_argument("--encodings", action="append", metavar="SPECS", help="separated by ;  (may be repeated)")
    what.add_argument("--baseline", metavar="SPEC", help="what the others are compared with (none, or the first)")
    what.add_argument("--seeds", type=count, metavar="N", help="runs of each encoding, with seeds 0 to N - 1")
    on = command.add_argument_group("on which images")
    on.add_argument("--data", help="digits (the default), an image folder, torch/..., hfds/..., wds/...: see timm")
    on.add_argument("--data-root", metavar="DIR", help="where torch/..., hfds/... and wds/... keep their files")
    on.add_argument("--download", action="store_true", help="let torch/... download its files")
    on.add_argument("--classes", type=count, metavar="N", help="number of classes, if the data does not say it")
    on.add_argument("--image-size", type=count, metavar="PIXELS")
    how = command.add_argument_group("with which model and recipe")
    how.add_argument("--model", help="any vision transformer of timm")
    how.add_argument("--patch-size", type=count, metavar="PIXELS")
    how.add_argument("--epochs", type=count, metavar="N")
    how.add_argument("--batch-size", type=count, metavar="N", help="over all processes together")
    how.add_argument("--lr", dest="learning_rate", type=float, metavar="RATE", help="peak learning rate")
    where = command.add_argument_group("where")
    where.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results (runs/ and a name of its own)"
    )
    source = where.add_mutually_exclusive_group()
    source.add_argument("--resume", type=Path, metavar="DIR", help="go on in a folder, with the experiment in it")
    source.add_argument(
        "--experiment", type=Path, metavar="FILE", help="Python that says experiment = Experiment(...)"
    )
    where.add_argument("--workers", type=count, metavar="N", help="processes on a CPU (one per core)")


def compare(options: argparse.Namespace) -> None:
    """train a vision transformer with each of several encodings, and compare them"""
    needs_lab()
    from rich.console import Console

    from whereformer.lab.compare import compare as run

    experiment, out = _asked(options)
    stderr = Console(stderr=True, highlight=False)
    options.interrupted = f"interrupted; to go on: whereformer compare --resume {shlex.quote(str(out))}"
    comparison = run(experiment, out, workers=options.workers, console=stderr)
    if comparison is not None:  # else this is not the main process of a distributed launch
        show(options, comparison, [comparison.table()])


def _asked(options: argparse.Namespace) -> tuple[Any, Path]:
    """The experiment that the options describe, and its folder."""
    from whereformer.lab.experiment import Experiment, images

    base = given(options, Experiment)
    if base is None and options.data in (None, "digits"):
        base = Experiment()
    elif base is None:
        base = images(options.data, options.model) if options.model else images(options.data)

    fields = (
        "data",
        "data_root",
        "classes",
        "model",
        "image_size",
        "patch_size",
        "epochs",
        "batch_size",
        "learning_rate",
        "baseline",
    )
    changes = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
    for name in ("data", "data_root"):  # the folder may be resumed from elsewhere
        if changes.get(name, "digits") != "digits" and Path(changes[name]).is_dir():
            changes[name] = str(Path(changes[name]).resolve())
    if options.download:
        changes["data_args"] = {**base.data_args, "download": True}
    if options.seeds is not None:
        changes["seeds"] = tuple(range(options.seeds))
    if options.encodings:
        changes["encodings"] = specs(options.encodings)
        if options.baseline is None and base.baseline not in changes["encodings"] and changes["encodings"]:
            changes["baseline"] = changes["encodings"][0]
    if "model" in changes and changes["model"] != base.model:
        changes["model_args"] = {}
    experiment = replace(base, **changes)
    name = Path(experiment.data).name
    return experiment, options.resume or options.out or Path("runs") / f"{name}-{experiment.digest()}"
