"""whereformer detect eval: a detector's average precision."""

import argparse
import json
from pathlib import Path
from typing import Any

from whereformer.cli.arguments import count
from whereformer.cli.detect.common import counted, data_of, detector_arguments, detector_of, fresh
from whereformer.cli.show import needs_detect, print_facts, print_table

EXAMPLES = """\
examples:
  whereformer detect eval runs/detect/runs/detr_sine/seed-0
      a run of whereformer detect train, on its own data
  whereformer detect eval rpe-2.0-product-ctx-1-k.pth --data path/to/coco
      the released weights on annotations/instances_val2017.json and val2017.zip: a row of the paper's Table 6
  whereformer detect eval rpe-20-cross-ctx-1-k.pth --enc_rpe2d rpe-20-cross-ctx-1-k --data path/to/coco
  whereformer detect eval facebook/detr-resnet-50 --data path/to/voc --out found --json

The data is a folder or a zip file in COCO's, Pascal VOC's or YOLO's format. What an official file does not say,
such as the ratio of its buckets, is assumed as it was released, and the command says so.
"""

SHOWN = 16


def arguments(command: argparse.ArgumentParser) -> None:
    detector_arguments(command)
    on = command.add_argument_group("on which images")
    on.add_argument(
        "--data", type=Path, metavar="DIR", help="a folder or a zip file of annotated images (those of the run)"
    )
    on.add_argument(
        "--set",
        choices=("validation", "train"),
        default="validation",
        help="(validation; or all, where the data is one set alone)",
    )
    on.add_argument("--broken", choices=("skip", "refuse"), default="skip", help="what is wrong with them (skip)")
    on.add_argument(
        "--areas",
        choices=("pixels", "share"),
        help="by what objects are small and large (as in the run; else pixels)",
    )
    out = command.add_argument_group("what is written")
    out.add_argument("--out", type=Path, metavar="DIR", help="for metrics.json, predictions.json and sheet.png")
    out.add_argument("--shown", type=count, metavar="N", default=SHOWN, help=f"images on the sheet ({SHOWN})")


def evaluate(options: argparse.Namespace) -> None:
    """how well a detector finds what is annotated: COCO's average precision, over all and for each category"""
    needs_detect()
    from whereformer.lab.detect import results
    from whereformer.lab.detect.evaluate import evaluate as scored

    if options.out:
        fresh(options.out, "metrics.json")
    detector = detector_of(options)
    source = options.data or data_of(options.detector, detector)
    areas = options.areas or (detector.experiment.areas if detector.experiment else "pixels")
    with counted("images checked") as step:
        which, truth, checked = _set(source, options, detector.experiment, step)
    known = detector.known(truth.categories).values()
    unknown = [category.name for category in truth.categories if category not in known]
    if not options.json:
        print_facts(str(options.detector), dict(detector.facts))
        print(f"\n{checked}")
    with counted("images looked at") as step:
        rows = detector.predict(
            truth, batch_size=options.batch_size, loader_workers=options.loader_workers, on_batch=step
        )
    metrics = scored(truth, rows, areas)
    found = {
        "detector": {"source": str(options.detector), **detector.facts},
        "data": {"source": str(source), "set": which, "unknown": unknown, **checked.to_dict()},
        "areas": areas,
        "metrics": metrics.to_dict(),
    }
    if options.out:
        results.write_evaluation(options.out, found, truth, rows, options.shown)
        found["out"] = str(options.out)
    if options.json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        _say(metrics, areas, unknown)
        if options.out:
            print(f"Written: {options.out / 'metrics.json'}, predictions.json, sheet.png")


def _set(source: Path, options: argparse.Namespace, experiment: Any, step: Any) -> tuple[str, Any, Any]:
    """The name of a set, its images, and what was found in it; of the images that a detector was trained on, those
    that were held out then."""
    from whereformer.lab.detect.load import load, load_set

    if experiment is None or experiment.data not in (str(source), str(source.resolve())):
        return load_set(source, options.set, broken=options.broken, on_image=step)
    data = load(source, broken=options.broken, on_image=step)
    if options.set == "train":
        return "train", data.train, data.reports[0]
    return "validation", data.validation, data.reports[-1]


def _say(metrics: Any, areas: str, unknown: list[str]) -> None:
    from whereformer.lab.detect import results

    header, line = results.row(metrics.overall)
    print_table(["", *header], [[f"{metrics.images:,} images", *line]])
    print_table(*metrics.table())
    print(f"All in %. {results.SIZES[areas]}")
    if unknown:
        listed = ", ".join(unknown[:8]) + (" ..." if len(unknown) > 8 else "")
        print(f"Of {len(unknown)} categories the detector knows nothing, and finds none: {listed}.")
