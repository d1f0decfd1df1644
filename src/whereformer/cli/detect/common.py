"""What the actions of `whereformer detect` share."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whereformer.cli.arguments import count
from whereformer.errors import InputError

DETECTORS = (
    "a run of detect train, an official file of DETR or iRPE's DETR, a folder of transformers, a name on the hub"
)


def detector_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("detector", metavar="DETECTOR", help=DETECTORS)
    what = command.add_argument_group("what an official file does not say")
    positions = what.add_mutually_exclusive_group()
    positions.add_argument(
        "--encoding",
        metavar="SPEC",
        help='all of its positions, "detr_sine + irpe(ratio=2)" (as the file says, or else as released)',
    )
    positions.add_argument(
        "--enc_rpe2d", metavar="SPEC", help="the official option, rpe-2.0-product-ctx-1-k, beside DETR's own sines"
    )
    what.add_argument("--part", metavar="NAME", help="which state dict, if the file holds several")
    what.add_argument("--dilation", action="store_true", default=None, help="a DC5 model, of stride 16")
    run = command.add_argument_group("of a run")
    run.add_argument("--weights", choices=("last", "best"), default="last", help="after which epoch (last)")
    how = command.add_argument_group("how it looks at images")
    how.add_argument("--size", type=count, metavar="PIXELS", help="of their shorter side (as the detector says)")
    how.add_argument("--batch-size", type=count, metavar="N", default=4, help="images at once (4)")
    how.add_argument("--loader-workers", type=whole, metavar="N", default=0, help="processes that read images (0)")


def detector_of(options: argparse.Namespace) -> Any:
    """The detector that was asked for, on the accelerator if there is one."""
    import torch

    from whereformer.lab.detect.detector import Detector

    encoding = options.encoding
    if options.enc_rpe2d is not None:
        encoding = f"detr_sine + {options.enc_rpe2d}"
    detector = Detector.load(
        options.detector,
        encoding=encoding,
        part=options.part,
        dilation=options.dilation,
        which=options.weights,
    )
    if options.size is not None:
        detector = detector.looking_at(options.size)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return detector.to(device or "cpu")


def data_of(source: str, detector: Any) -> Path:
    """The data that a run was trained on.

    Raises:
        InputError: it is no run, or its data is no longer there.
    """
    if detector.experiment is None:
        raise InputError(f"data: {source!r} does not say on which images it is to be tested, expected --data")
    data = detector.experiment.data
    folder = Path(source).absolute()
    if data == "shapes":  # OUT/shapes, of OUT/runs/<encoding>/seed-<n>
        data = (folder if folder.is_dir() else folder.parent).parents[2] / "shapes"
    if not Path(data).exists():
        raise InputError(f"data={str(data)!r}, on which {source!r} was trained, is not there, expected --data")
    return Path(data)


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for what hears how many of how many are done."""
    from rich.console import Console

    from whereformer.lab.runs import Counter

    with Counter(Console(stderr=True)) as counter:
        yield counter.of(what)


def fresh(out: Path, name: str) -> Path:
    """A folder for results, which holds none yet or those of such a command.

    Raises:
        InputError: it holds something else.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"out={str(out)!r} is a file, expected a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / name).exists():
        raise InputError(f"out={str(out)!r} holds something else: give another folder")
    return out


def whole(text: str) -> int:
    return 0 if text == "0" else count(text)
