"""whereformer detect: train detectors, test them, and let them look at images."""

import argparse

from whereformer.cli.detect import evaluate, predict, train

EXAMPLES = """\
examples:
  whereformer detect train
  whereformer detect eval rpe-2.0-product-ctx-1-k.pth --data path/to/coco
  whereformer detect predict rpe-2.0-product-ctx-1-k.pth photos --out found

Each has its own help: whereformer detect eval --help
"""

ACTIONS = {
    "train": (train, train.train),
    "eval": (evaluate, evaluate.evaluate),
    "predict": (predict, predict.predict),
}
"""Name -> the file with its arguments and examples, and what it does."""


def arguments(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(required=True, metavar="action", dest="action")
    for name, (file, function) in ACTIONS.items():
        text = function.__doc__
        action = actions.add_parser(
            name,
            help=text,
            description=text,
            epilog=file.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.set_defaults(act=function)
        action.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="write JSON, and nothing else, to stdout",
        )
        file.arguments(action)


def detect(options: argparse.Namespace) -> None:
    """DETR with position encodings: train it, test it, let it look at images"""
    options.act(options)
