"""The command `whereformer`: one function per command."""

import argparse
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from whereformer import __version__
from whereformer.errors import InputError
from whereformer.resample import RECIPES

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

INSPECT_EXAMPLES = """\
examples:
  whereformer inspect deit_small_patch16_224_ctx_product_50_shared_k.pth
      whose names these are, which model they fit, which encodings it has; no weights are read
  whereformer inspect folder/of/a/model --json
  whereformer inspect owner/name@revision
      on the Hugging Face hub
  whereformer inspect last.pth --part model_ema
"""

CONVERT_EXAMPLES = """\
examples:
  whereformer convert dinov2_vitb14_reg4_pretrain.pth --out dinov2.safetensors
      timm's names; what is only renamed stays to the bit
  whereformer convert deit_tiny_patch16_224_ctx_product_50_shared_k.pth --out irpe.safetensors --to ours
      the names of a timm model after whereformer.equip
  whereformer convert dinov2.safetensors --out official.safetensors --to dinov2-reg
  whereformer convert sharded/model.safetensors.index.json --out one.safetensors --shard 5GB

The new file is whole or not there. docs/checkpoints.md lists the layouts.
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

RESIZE_EXAMPLES = """\
examples:
  whereformer resize vit_base_224.safetensors --to 384 --out vit_base_384.safetensors
  whereformer resize dinov2_vits14.pth --to 672x1022 --recipe dinov2 --out dinov2_672x1022.safetensors
      height x width
  whereformer resize swin_tiny_224.pth --from 224 --to 384 --window 12 --out swin_tiny_384.pth
  whereformer resize flexivit.safetensors --to 240 --new-patch 8 --out flexivit_8.safetensors

Everything that is no table of places or offsets stays to the bit. Load the result into a model that is built for
the new size; or resize the model, with whereformer.resize in Python.
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


def inspect(options: argparse.Namespace) -> None:
    """say what a checkpoint holds: layout, model, encodings, grid, what does not fit; no weights are read"""
    _needs("rich", "safetensors", "timm")
    from whereformer.adapters import inspect as look

    found = look(options.checkpoint, part=options.part)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    layout, best = found.layout, next(iter(found.models), None)
    own = "of an equipped model" if found.equipped else "timm's, or none of the known"
    facts = {
        "layout": f"{layout.name}: {layout.source}" if layout else own,
        "encoding": found.encoding,
        "grid": f"{found.grid[0]} x {found.grid[1]}" if found.grid else "not told by its tables",
        "prefix tokens": f"{found.prefix_tokens}, of which {found.prefix_rows} have rows in the position table",
        "resized as": found.resize,
        "parameters": f"{found.parameters:,}, {found.bytes / 1e6:,.1f} MB",
        "dtypes": ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items()),
    }
    if found.part:
        others = f" (also there: {', '.join(found.others)}; see --part)" if found.others else ""
        facts["part"] = found.part + others
    if layout and layout.note:
        facts["note"] = layout.note
    _print_facts(found.source, facts)
    exact = [str(match) for match in found.models if match.fits]
    if exact:
        _print_facts("timm model", {"fits": "\n".join(exact)})
    elif best:
        _print_facts("timm model", {"nearest": str(best), "does not fit": _shortened(best.problems)})
    elif layout:
        _print_facts("timm model", {"fits": "none: it is not of timm"})
    if found.tables:
        _print_facts("tables", dict(_tables(found.tables)))
    if found.dropped:
        _print_facts("left out by convert", {"": _shortened([", ".join(found.dropped)])})


def _shortened(lines: Sequence[str], most: int = 8, width: int = 300) -> str:
    cut = [line if len(line) <= width else f"{line[:width]} ..." for line in lines[:most]]
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([*cut, *more])


def _tables(tables: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """One line for all tables of a kind and size."""
    same: dict[tuple[Any, ...], list[Any]] = {}
    for table in tables:
        same.setdefault((table.kind, table.shape, table.grid), []).append(table)
    for (kind, shape, grid), alike in same.items():
        of = " x ".join(map(str, grid)) if grid else "a grid that is not told"
        more = f" ... {alike[-1].name} ({len(alike)})" if len(alike) > 1 else ""
        rows = f", {alike[0].prefix} rows of prefix tokens" if alike[0].prefix else ""
        yield alike[0].name + more, f"{kind}, {' x '.join(map(str, shape))}, of {of}{rows}"


def convert(options: argparse.Namespace) -> None:
    """write a checkpoint as safetensors, in timm's names or another layout's, whole or not at all"""
    _needs("rich", "safetensors", "timm")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from whereformer.adapters.convert import plan

    planned = plan(options.checkpoint, to=options.to, part=options.part)
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=planned.bytes)
        files = planned.write(options.out, shard=options.shard, done=lambda count: bar.advance(task, count))
    if options.json:
        print(json.dumps({**planned.to_dict(), "files": [str(file) for file in files]}, indent=2))
        return
    for line in planned.lines():
        print(line)
    model = planned.models[0] if planned.models else None
    print(
        f"\n{planned.layout.name if planned.layout else 'timm'} -> {planned.to}: {len(planned.entries)} tensors,"
        f" {planned.bytes / 1e6:,.1f} MB, {len(planned.steps)} changes; written: {', '.join(map(str, files))}"
    )
    if model and not model.fits:
        print(f"It fits no timm model as it is; nearest is {model}:\n{_shortened(model.problems)}")
    elif model:
        print(f"It fits {model}")


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


def resize(options: argparse.Namespace) -> None:
    """resize a checkpoint to images of another size: its tables of places and offsets, and patch kernels"""
    _needs("rich", "safetensors")
    from rich.console import Console
    from rich.progress import Progress

    from whereformer.adapters.resize_weights import Plan, plan, resize_file, spelled

    if options.patch is None and options.new_patch is not None:
        raise InputError(f"new_patch={options.new_patch}, expected --patch too: from which size")

    def planned(weights: Any) -> Plan:
        found = plan(
            weights,
            options.to,
            home_size=options.from_,
            patch_size=options.patch,
            new_patch_size=options.new_patch,
            window=options.window,
            recipe=options.recipe,
        )
        progress.update(task, total=(progress.tasks[0].total or 0) + len(weights))
        return found

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("resizing", total=None)
        done = resize_file(options.checkpoint, options.out, planned, lambda key: progress.advance(task))
    if options.json:
        print(json.dumps(done.to_dict() | {"out": str(options.out)}, indent=2))
        return
    lines = [
        [old.name, old.kind, _sizes(old.shape), _sizes(new.shape), spelled(old.recipe_for(done.recipe))]
        for old, new in done.moves
    ]
    _print_table(["table", "over", "was", "is", "recipe"], _together(lines), text=5)
    for key in done.dropped:
        print(f"dropped {key}: it follows from the size")
    print(f"{options.out}: for images of {_sizes(done.new.image)}, everything else as in {options.checkpoint}")


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _together(lines: Sequence[list[str]]) -> list[list[str]]:
    """Lines that differ in the numbers of blocks alone, as one."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name, *rest in lines:
        groups.setdefault((re.sub(r"\d+", "N", name), *rest), []).append([name, *rest])
    return [
        [members[0][0] + (f" ... {members[-1][0]} ({len(members)})" if len(members) > 1 else ""), *members[0][1:]]
        for members in groups.values()
    ]


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
    for name, function, examples in (
        ("inspect", inspect, INSPECT_EXAMPLES),
        ("convert", convert, CONVERT_EXAMPLES),
    ):
        command = add(name, function, examples)
        command.add_argument("checkpoint", metavar="CKPT", help="a file, a folder, or owner/name on the hub")
        command.add_argument("--part", metavar="NAME", help="which state dict, if the file holds several")
    command.add_argument("--out", type=Path, required=True, metavar="NEW.safetensors")
    command.add_argument(
        "--to",
        default="timm",
        metavar="LAYOUT",
        help="timm (the default), ours (after equip), or an official one",
    )
    command.add_argument("--shard", type=_bytes, default="5GB", metavar="SIZE", help="the largest file (5GB)")
    command = add("models", models, MODELS_EXAMPLES)
    command.add_argument(
        "pattern", nargs="?", default="", metavar="PATTERN", help="in their names; * and ? are wild"
    )
    command = add("resize", resize, RESIZE_EXAMPLES)
    command.add_argument("checkpoint", type=Path, metavar="CKPT", help="a .safetensors or a torch file")
    command.add_argument(
        "--to", type=_size, required=True, metavar="PIXELS", help="384, or 672x1022: height x width"
    )
    command.add_argument(
        "--out", type=Path, required=True, metavar="NEW", help="the file to write, of either kind"
    )
    command.add_argument(
        "--from", type=_size, metavar="PIXELS", dest="from_", help="what the weights are for, if they do not tell"
    )
    command.add_argument("--patch", type=_size, metavar="PIXELS", help="of the patch embedding (its stride)")
    command.add_argument("--new-patch", type=_size, metavar="PIXELS", help="if that is to change (FlexiViT)")
    command.add_argument(
        "--window", type=_size, metavar="PATCHES", help="new windows of a Swin; without, they stay"
    )
    command.add_argument("--recipe", choices=sorted(RECIPES), help="without: as the library of the weights does")
    add("doctor", doctor, DOCTOR_EXAMPLES)
    return top


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from 1 on")
    return value


def _bytes(text: str) -> int:
    """
    >>> _bytes("5GB"), _bytes("200 MB"), _bytes("1e3")
    (5000000000, 200000000, 1000)
    """
    found = re.fullmatch(r"([0-9.e+]+)\s*([GMK]?)B?", text.strip(), re.IGNORECASE)
    try:
        size = int(float(found[1]) * {"G": 10**9, "M": 10**6, "K": 10**3}.get(found[2].upper(), 1)) if found else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a size such as 5GB")
    return size


def _size(text: str) -> tuple[int, int]:
    numbers = text.split("x")
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number, or HEIGHTxWIDTH")
    height, width = _count(numbers[0]), _count(numbers[-1])
    return height, width


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
