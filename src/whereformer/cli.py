"""The command `whereformer`: one function per command."""

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from whereformer import __version__
from whereformer.errors import InputError

BROKEN, USER_MISTAKE, INTERRUPTED = 1, 2, 130

COMPARE_EXAMPLES = """\
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

LIST_EXAMPLES = """\
examples:
  whereformer list
      every encoding in a few words
  whereformer list irpe
      one encoding in full: its equations, its options, what it costs, what it does to a grid
  whereformer list "irpe(method='cross', on='qkv')"
  whereformer list --json
"""

COST_EXAMPLES = """\
examples:
  whereformer cost
  whereformer cost --model vit_base_patch16_224 --encodings "learned; irpe(on='qkv')" --image-size 384
"""

MODELS_EXAMPLES = """\
examples:
  whereformer models dinov3
      what can be attached to each of timm's architectures with this in its name
  whereformer models "swinv2_*_256"
  whereformer models
      all of them: more than a thousand are built, without memory for their weights, which takes minutes
  whereformer models vit_ --json
"""

DOCTOR_EXAMPLES = """\
examples:
  whereformer doctor
  whereformer doctor --json > doctor.json
      for a bug report

Exit code 1: something that is installed does not work.
"""


def compare(options: argparse.Namespace) -> None:
    """train a vision transformer with each of several encodings, and compare them"""
    _needs_lab()
    from rich.console import Console

    from whereformer.lab.compare import compare as run

    experiment, out = _asked(options)
    stderr = Console(stderr=True, highlight=False)
    options.interrupted = f"interrupted; to go on: whereformer compare --resume {shlex.quote(str(out))}"
    comparison = run(experiment, out, workers=options.workers, console=stderr)
    if comparison is None:  # not the main process of a distributed launch
        return
    if options.json:
        print(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
    else:
        header, *lines = comparison.table()
        _print_table(header, lines)
        for sentence in comparison.sentences:
            print(sentence)
        print(f"\nReport: {comparison.out / 'report.html'}")


def list_encodings(options: argparse.Namespace) -> None:
    """list the encodings: what they say, what they cost, where they work; or show one in full"""
    from whereformer.facts import entries, entry

    if options.encoding is None:
        found = entries()
        if options.json:
            print(json.dumps([one.to_dict() for one in found], indent=2))
        else:
            _print_entries(found)
    elif options.json:
        print(json.dumps(entry(options.encoding).to_dict(), indent=2))
    else:
        _print_entry(options.encoding)


def _print_entries(found: Sequence[Any]) -> None:
    """A table for each family."""
    _needs("rich")
    from rich.table import Table
    from rich.text import Text

    from whereformer.catalog import MODULES
    from whereformer.facts import EVERYWHERE, FAMILY, MODEL, SIZES

    console = _console()
    numbers = {"params": 6, "MACs": 5}
    widths = numbers | {"other\ngrids": 9, "two\ngrids": 5, "video": 5}
    name = max(len(one.name) for one in found)
    left = console.width - sum(widths.values()) - 2 * len(widths)
    narrow = left < name + 2 + 30  # then the name stands above what is said, not beside it
    says = max(30, left if narrow else left - name - 2)

    def table(*, header: bool = False) -> Table:
        made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=header)
        if not narrow:
            made.add_column("\nname", width=name)
        made.add_column("\nsays", width=says)
        for title, width in widths.items():
            justify = "right" if title in numbers else "left"
            made.add_column(title if "\n" in title else f"\n{title}", width=width, justify=justify)
        return made

    console.print(table(header=True))
    for family, members in groupby(found, key=lambda one: one.family):
        console.print(
            Text(f"\n{family.upper()}", style="bold").append(f"  {FAMILY[family]}", style="not bold italic")
        )
        rows = table()
        for one in members:
            title = Text(one.name, style="bold")
            said = Text(one.formula).append(f"\n{one.source} · {' + '.join(one.said) or 'nothing'}", style="dim")
            counts = (_short(one.parameters), _short(one.macs))
            ticks = ("yes" if yes else "–" for yes in (one.crosses, one.video))
            first = [title.append("\n").append_text(said)] if narrow else [title, said]
            rows.add_row(*first, *counts, one.sizes, *ticks)
        console.print(rows)
    console.print(f"\nparams, MACs: all that a {MODEL} at 224 pixels gets; MACs per image.\nother grids:")
    for sizes in SIZES:
        if any(one.sizes == sizes for one in found):
            console.print(f"  {sizes:10} {SIZES[sizes]}")
    console.print(f"{EVERYWHERE}\nAttention modules with positions of their own: {', '.join(MODULES.values())}.")
    console.print("One in full: whereformer list NAME")


def _print_entry(text: str) -> None:
    _needs("rich")
    from rich.table import Table
    from rich.text import Text

    from whereformer.catalog import parse
    from whereformer.facts import docstring, entry, in_words, paragraphs
    from whereformer.lab.pictures import picture, shown

    one, (factory,) = entry(text), parse(text)
    words = docstring(factory.func)  # pyright: ignore[reportArgumentType]
    console = _console()
    console.print(Text(one.name, style="bold").append(f"   {one.family}", style="not bold dim"))
    console.print(Text(f"\n{one.formula}", style="bold"))
    for kept, paragraph in paragraphs(words.body):
        console.print()
        console.print(paragraph, soft_wrap=kept)
    for title, rows in (
        ("options", {_options(names, one.options): said for names, said in words.options.items()}),
        ("facts", {title.lower(): said for title, said in words.sections.items()} | in_words(one)),
        ("source", {"": one.paper}),
    ):
        if not rows:
            continue
        console.print(Text(f"\n{title}", style="bold"))
        table = Table.grid(padding=(0, 2))
        for name, said in rows.items():
            table.add_row(
                *[f"  {name}".replace("\n", "\n  ")] * bool(name), "\n".join(t for _, t in paragraphs(said))
            )
        console.print(table)
    if console.is_terminal and console.color_system is not None:
        console.print()
        console.print(shown(picture(factory), console.width))


def _options(names: str, options: dict[str, object]) -> str:
    return "\n".join(f"{name}={options[name]!r}" if name in options else name for name in names.split(", "))


def _short(count: int) -> str:
    """
    >>> [_short(count) for count in (0, 384, 75_648, 45_388_800)]
    ['–', '384', '76 k', '45 M']
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.{1 if count < 9.95 * size else 0}f} {unit}"
    return str(count) if count else "–"


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 100)


def cost(options: argparse.Namespace) -> None:
    """count parameters and multiply-adds: the iRPE paper's models, or any of timm's"""
    _needs_lab()
    from whereformer.lab.cost import costs, paper_costs

    if options.model is None and (options.encodings or options.image_size):
        raise InputError("model=None, expected a timm model to go with --encodings and --image-size")
    if options.model is None:
        rows = list(paper_costs())
    else:
        rows = list(costs(options.model, _specs(options.encodings or ["none; learned; irpe"]), options.image_size))
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
    _print_table(header, lines, text=2)
    if options.model is None:
        print(
            "For values the paper counts a product per pair of tokens, O(n² d); ours, sums per bucket, O(n k d)."
        )


def models(options: argparse.Namespace) -> None:
    """list timm's architectures: what can be attached to each, what it says itself, on which grid"""
    _needs("rich", "timm")
    from rich.console import Console
    from rich.progress import track

    from whereformer.adapters.models import Share, look, names

    stderr = Console(stderr=True, highlight=False)
    asked = names(options.pattern)
    found = [
        look(name)
        for name in track(
            asked, "looking at architectures", console=stderr, transient=True, disable=len(asked) < 2
        )
    ]
    if options.json:
        share = Share.of(found)
        said = {**asdict(share), "percent": round(share.percent, 2)}
        print(json.dumps({**said, "models": [one.to_dict() for one in found]}, indent=2, ensure_ascii=False))
    else:
        _print_architectures(found)


def _print_architectures(found: Sequence[Any]) -> None:
    """A table for each family; those without attention over a grid are counted, or named if they are few."""
    from rich.table import Table
    from rich.text import Text

    from whereformer.adapters.models import Share

    console = _console()
    families: dict[str, list[Any]] = {}
    for one in found:
        families.setdefault(one.family, []).append(one)
    for family, members in families.items():
        known = [one for one in members if one.equips]
        widest = max((len(one.name) for one in known), default=0)
        if known:
            console.print(Text(f"\n{family}", style="bold underline"))
        for (own, why), group in groupby(known, key=lambda one: (one.own, one.why)):
            console.print(Text(f"says itself: {own or 'nothing'}" + f"; {why}" * bool(why), style="dim"))
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
            table.add_column("", width=widest, no_wrap=True)
            for title in ("tokens", "q, k", "logits", "values"):
                table.add_column(title)
            table.add_column("grid", justify="right", no_wrap=True, min_width=11)
            table.add_column("heads", justify="right", no_wrap=True, min_width=8)
            for one in group:
                takes = ({"all": "yes"}.get(taken, taken) or "–" for taken in one.takes.values())
                grid = f"{one.prefix} + " * bool(one.prefix) + "{} x {}".format(*one.grid)
                table.add_row(Text(one.name, style="bold"), *takes, grid, f"{one.heads} x {one.head_dim}")
            console.print(table)
    left = [one for one in found if not one.equips]
    if left:
        console.print(Text("\nnothing can be attached to", style="bold underline"))
        reasons: dict[tuple[str, str], list[str]] = {}
        for one in left:
            reasons.setdefault((one.why, one.family), []).append(one.name)
        for (why, family), members in sorted(reasons.items()):
            several = f"{len(members)} of {family}" if len(members) > 3 else ", ".join(members)
            console.print(f"  {several}: {why}")
    console.print(f"\n{Share.of(found)}")


def doctor(options: argparse.Namespace) -> None:
    """say what is installed, what works and what is missing: versions, the CPU kernel, backends, libraries"""
    from whereformer.doctor import examine

    findings = list(examine())
    topics = {topic: list(group) for topic, group in groupby(findings, key=lambda one: one.topic)}
    broken = [f"{one.topic}: {one.name}" for one in findings if one.broken]
    if options.json:
        said = {topic: {one.name: one.says for one in group} for topic, group in topics.items()}
        print(json.dumps({"broken": broken, **said}, indent=2))
    else:
        for topic, group in topics.items():
            _print_facts(topic, {one.name: "BROKEN: " * one.broken + one.says for one in group})
        print(f"\nBroken: {'; '.join(broken)}" if broken else "\nAll that is installed works.")
    if broken:
        raise SystemExit(BROKEN)


def _print_facts(title: str, facts: dict[str, str]) -> None:
    """With rich if it is there, and without."""
    if find_spec("rich") is None:
        print(f"\n{title}")
        for name, said in facts.items():
            print(f"  {name:{max(16, *map(len, facts))}}  {said}")
        return
    from rich.table import Table
    from rich.text import Text

    console = _console()
    console.print(Text(f"\n{title}", style="bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=18)
    table.add_column(overflow="fold")
    for name, said in facts.items():
        table.add_row(f"  {name}", said)
    console.print(table)


def _asked(options: argparse.Namespace) -> tuple[Any, Path]:
    """The experiment that the options describe, and its folder."""
    from whereformer.lab.experiment import Experiment, images

    if options.resume:
        path = options.resume / "experiment.json"
        if not path.is_file():
            raise InputError(
                f"resume={str(options.resume)!r}, expected a folder of a comparison: no {str(path)!r}"
            )
        if options.out and options.out != options.resume:
            raise InputError("out: --resume goes on in its own folder; leave --out away")
        base = Experiment.from_file(path)
    elif options.experiment:
        base = Experiment.from_python(options.experiment)
    elif options.data in (None, "digits"):
        base = Experiment()
    else:
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
        changes["encodings"] = _specs(options.encodings)
        if options.baseline is None and base.baseline not in changes["encodings"] and changes["encodings"]:
            changes["baseline"] = changes["encodings"][0]
    if "model" in changes and changes["model"] != base.model:
        changes["model_args"] = {}
    experiment = replace(base, **changes)
    name = Path(experiment.data).name
    return experiment, options.resume or options.out or Path("runs") / f"{name}-{experiment.digest()}"


def _specs(texts: Sequence[str]) -> tuple[str, ...]:
    """The encodings of all texts, each of which may hold several, separated by semicolons."""
    specs = (spec.strip() for text in texts for spec in text.split(";"))
    return tuple(spec for spec in specs if spec)


def _print_table(header: Sequence[str], lines: Sequence[Sequence[str]], *, text: int = 1) -> None:
    """To stdout; the first columns hold `text`, which may be folded, the others numbers."""
    _needs("rich")
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_lines=text == len(header)
    )
    for i, title in enumerate(header):
        if i < text:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120).print(table)


def _needs_lab() -> None:
    _needs("accelerate", "matplotlib", "rich", "safetensors", "scipy", "sklearn", "timm", "torchvision")


def _needs(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InputError(f'{", ".join(missing)} missing: pip install "whereformer[lab]"')


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = _Parser(prog="whereformer", description="Position encodings for vision transformers.")
    top.add_argument("--version", action="version", version=f"whereformer {__version__}")
    commands = top.add_subparsers(required=True, metavar="command", dest="command")

    def add(name: str, function: Any, epilog: str | None = None) -> argparse.ArgumentParser:
        text = function.__doc__
        command = commands.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=raw)
        command.set_defaults(function=function)
        command.add_argument("--json", action="store_true", help="write JSON, and nothing else, to stdout")
        return command

    command = add("compare", compare, COMPARE_EXAMPLES)
    what = command.add_argument_group("what to compare")
    what.add_argument("--encodings", action="append", metavar="SPECS", help="separated by ;  (may be repeated)")
    what.add_argument("--baseline", metavar="SPEC", help="what the others are compared with (none, or the first)")
    what.add_argument("--seeds", type=_count, metavar="N", help="runs of each encoding, with seeds 0 to N - 1")
    on = command.add_argument_group("on which images")
    on.add_argument("--data", help="digits (the default), an image folder, torch/..., hfds/..., wds/...: see timm")
    on.add_argument("--data-root", metavar="DIR", help="where torch/..., hfds/... and wds/... keep their files")
    on.add_argument("--download", action="store_true", help="let torch/... download its files")
    on.add_argument("--classes", type=_count, metavar="N", help="number of classes, if the data does not say it")
    on.add_argument("--image-size", type=_count, metavar="PIXELS")
    how = command.add_argument_group("with which model and recipe")
    how.add_argument("--model", help="any vision transformer of timm")
    how.add_argument("--patch-size", type=_count, metavar="PIXELS")
    how.add_argument("--epochs", type=_count, metavar="N")
    how.add_argument("--batch-size", type=_count, metavar="N", help="over all processes together")
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
    where.add_argument("--workers", type=_count, metavar="N", help="processes on a CPU (one per core)")

    command = add("list", list_encodings, LIST_EXAMPLES)
    command.add_argument("encoding", nargs="?", metavar="NAME", help="show one in full, options and all")
    command = add("cost", cost, COST_EXAMPLES)
    command.add_argument(
        "--model", help="a timm vision transformer (without: DeiT-Ti, S and B beside the paper's)"
    )
    command.add_argument("--encodings", action="append", metavar="SPECS", help="separated by ;  (may be repeated)")
    command.add_argument("--image-size", type=_count, metavar="PIXELS", help="the model's own if not given")
    command = add("models", models, MODELS_EXAMPLES)
    command.add_argument(
        "pattern", nargs="?", default="", metavar="PATTERN", help="in their names; * and ? are wild"
    )
    add("doctor", doctor, DOCTOR_EXAMPLES)
    return top


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from 1 on")
    return value


def _fail(message: object) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":  # one line, not one per process
        print(f"whereformer: error: {message}", file=sys.stderr)
    raise SystemExit(USER_MISTAKE)


def main(arguments: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show ω still shows the rest
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = parser().parse_args(arguments)
    options.interrupted = "interrupted"
    try:
        options.function(options)
    except InputError as error:
        _fail(error)
    except BrokenPipeError:  # whoever read stdout has left; nothing may be written to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        _fail(": ".join(str(part) for part in (error.strerror or error, error.filename) if part))
    except KeyboardInterrupt:
        print(f"\nwhereformer: {options.interrupted}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
