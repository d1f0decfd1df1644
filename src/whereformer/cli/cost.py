"""whereformer cost: parameters and multiply-adds."""

import argparse
import json
from dataclasses import asdict

from whereformer.cli.arguments import count, specs
from whereformer.cli.show import needs_lab, print_table
from whereformer.errors import InputError

EXAMPLES = """\
examples:
  whereformer cost
  whereformer cost --model vit_base_patch16_224 --encodings "learned; irpe(on='qkv')" --image-size 384
"""


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", help="a timm vision transformer (without: DeiT-Ti, S and B beside the paper's)"
    )
    command.add_argument("--encodings", action="append", metavar="SPECS", help="separated by ;  (may be repeated)")
    command.add_argument("--image-size", type=count, metavar="PIXELS", help="the model's own if not given")


def cost(options: argparse.Namespace) -> None:
    """count parameters and multiply-adds: the iRPE paper's models, or any of timm's"""
    needs_lab()
    from whereformer.lab.cost import costs, paper_costs

    if options.model is None and (options.encodings or options.image_size):
        raise InputError("model=None, expected a timm model to go with --encodings and --image-size")
    if options.model is None:
        rows = list(paper_costs())
    else:
        rows = list(costs(options.model, specs(options.encodings or ["none; learned; irpe"]), options.image_size))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    header = ["model", "encoding", "params, M", "MACs, M"]
    lines = [[row.model, row.encoding, f"{row.parameters / 1e6:.2f}", f"{row.macs / 1e6:.0f}"] for row in rows]
    if options.model is None:
        header += ["paper:\nparams, M", "paper:\nMACs, M"]
        lines = [
            [*line, f"{row.paper_parameters:.2f}", f"{row.paper_macs:.0f}"]
            for line, row in zip(lines, rows, strict=True)
        ]
    print_table(header, lines, text=2)
    if options.model is None:
        print(
            "For values the paper counts a product per pair of tokens, O(n² d); ours, sums per bucket, O(n k d)."
        )
