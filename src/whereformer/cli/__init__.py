"""The command `whereformer`: one file per command."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from whereformer import __version__
from whereformer.cli import compare, convert, cost, detect, doctor, encodings, inspect, models, resize
from whereformer.errors import InputError

USER_MISTAKE, INTERRUPTED = 2, 130

COMMANDS = {
    "compare": (compare, compare.compare),
    "detect": (detect, detect.detect),
    "list": (encodings, encodings.list_encodings),
    "models": (models, models.models),
    "inspect": (inspect, inspect.inspect),
    "convert": (convert, convert.convert),
    "resize": (resize, resize.resize),
    "cost": (cost, cost.cost),
    "doctor": (doctor, doctor.doctor),
}
"""Name -> the file with its arguments and examples, and what it does."""


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = _Parser(prog="whereformer", description="Position encodings for vision transformers.")
    top.add_argument("--version", action="version", version=f"whereformer {__version__}")
    commands = top.add_subparsers(required=True, metavar="command", dest="command")
    for name, (file, function) in COMMANDS.items():
        text = function.__doc__
        command = commands.add_parser(name, help=text, description=text, epilog=file.EXAMPLES, formatter_class=raw)
        command.set_defaults(function=function)
        command.add_argument("--json", action="store_true", help="write JSON, and nothing else, to stdout")
        file.arguments(command)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show ω still shows the rest
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = parser().parse_args(arguments)
    options.interrupted = "interrupted"
    try:
        options.function(options)
    except InputError as error:
        fail(error)
    except BrokenPipeError:  # whoever read stdout has left; nothing may be written to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        fail(": ".join(str(part) for part in (error.strerror or error, error.filename) if part))
    except KeyboardInterrupt:
        print(f"\nwhereformer: {options.interrupted}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def fail(message: object) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":  # one line, not one per process
        print(f"whereformer: error: {message}", file=sys.stderr)
    raise SystemExit(USER_MISTAKE)
