"""What commands that run a study share: where it comes from, and how its comparison is shown."""

import argparse
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from whereformer.cli.show import print_table
from whereformer.errors import InputError

Kind = TypeVar("Kind")


def given(options: argparse.Namespace, kind: type[Kind]) -> Kind | None:
    """The study in the folder that is resumed, or in the file of Python; None if neither is asked for.

    Raises:
        InputError: it is not there, or of another kind; or another folder is named beside it.
    """
    study: Any = kind
    if options.resume:
        path = options.resume / "experiment.json"
        if not path.is_file():
            raise InputError(
                f"resume={str(options.resume)!r}, expected a folder of a comparison: no {str(path)!r}"
            )
        if options.out and options.out != options.resume:
            raise InputError("out: --resume goes on in its own folder; leave --out away")
        return study.from_file(path)
    return study.from_python(options.experiment) if options.experiment else None


def show(options: argparse.Namespace, comparison: Any, tables: Sequence[Sequence[Sequence[str]]]) -> None:
    """The comparison as JSON, or its tables, what they show, and where the report is."""
    if options.json:
        print(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
        return
    for header, *lines in tables:
        print_table(header, lines)
    for sentence in comparison.sentences:
        print(sentence)
    print(f"\nReport: {comparison.out / 'report.html'}")
