"""Checkpoints from one layout to another."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whereformer.adapters.architectures import Match, nearest
from whereformer.adapters.checkpoint import ENCODING_KEY, metadata
from whereformer.adapters.files import Checkpoint, Entries, Entry, Source, open_checkpoint
from whereformer.adapters.fit import fitted, in_timms_names
from whereformer.adapters.layouts import LAYOUTS, layout_of, recognise
from whereformer.adapters.layouts.layout import Layout, prefix_tokens
from whereformer.adapters.layouts.ours import encoding_rules
from whereformer.adapters.layouts.rules import Drop, Step, backwards, matching, translate
from whereformer.adapters.tables import tables_of
from whereformer.adapters.writing import SHARD, Progress, quiet, write_weights
from whereformer.errors import InputError, check_count, check_one_of

RECIPE_KEY = "whereformer.recipe"
"""The metadata of our safetensors files that says, as JSON, what the weights are and how tables are resized."""

TARGETS = ("timm", "ours", *(layout.name for layout in LAYOUTS))


@dataclass(frozen=True)
class Conversion:
    """What a checkpoint becomes.

    Args:
        source: where it is.
        layout: the layout it was found in; None: timm's names, or unknown ones.
        to: the layout it goes to.
        models: those of timm's models that it fits, or comes nearest to, the best first.
        entries: the new names, and what will be read for them.
        steps: every name or tensor that changes, and what is dropped.
        recipe: what the new file will say about itself.
        metadata: of the new file, the recipe among it.
    """

    source: str
    layout: Layout | None
    to: str
    models: tuple[Match, ...]
    entries: Entries
    steps: tuple[Step, ...]
    recipe: Mapping[str, Any]
    metadata: Mapping[str, str]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    def lines(self) -> Iterator[str]:
        """Every change; those of names that differ in numbers alone, in one line."""
        for step, count in _grouped(self.steps):
            yield f"{step}" + (f"   (and {count - 1} like it)" if count > 1 else "")

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every change by itself."""
        return {
            "layout": self.layout and self.layout.name,
            "to": self.to,
            "tensors": len(self.entries),
            "bytes": self.bytes,
            "recipe": dict(self.recipe),
            "models": [asdict(match) for match in self.models],
            "changes": [
                {"before": dict(step.before), "after": dict(step.after), "why": step.why} for step in self.steps
            ],
        }

    def write(
        self,
        out: str | os.PathLike[str],
        *,
        shard: int = SHARD,
        done: Progress = quiet,
    ) -> list[Path]:
        """Write it, tensor by tensor; see `convert`."""
        path = Path(out)
        if path.suffix != ".safetensors":
            raise InputError(f"out={str(out)!r}, expected a file that ends in .safetensors")
        if path.exists() and Path(self.source).exists() and path.samefile(self.source):
            raise InputError(f"out={str(out)!r} is the checkpoint itself, expected another file")
        check_count("shard", shard)
        return write_weights(path, self.entries, self.metadata, shard=shard, done=done)


def convert(
    source: Source,
    out: str | os.PathLike[str],
    *,
    to: str = "timm",
    part: str | None = None,
    shard: int = SHARD,
    done: Progress = quiet,
) -> Conversion:
    """Write a checkpoint of any known layout as safetensors in another: whole, or not at all.

    Values that are only renamed stay to the bit. Derived buffers are left out. Memory for one tensor is enough,
    beside what the operating system maps of the one file that is open.

    Args:
        source: a file, a folder, an id of the Hugging Face hub, or a state dict.
        out: the new file; if it would be larger than `shard`, several files and an index beside it.
        to: "timm" (for DETR: transformers), "ours": that model with what `equip` gave it, or a name of `LAYOUTS`.
        part: which state dict, if a file holds several.
        shard: the largest file in bytes.
        done: told the bytes of each tensor that is written.

    Returns:
        what changed, and into what.

    Raises:
        InputError: it cannot be read, or there is no way to that layout.
    """
    conversion = plan(source, to=to, part=part)
    conversion.write(out, shard=shard, done=done)
    return conversion


def plan(source: Source, *, to: str = "timm", part: str | None = None) -> Conversion:
    """What `convert` would do. Nothing is read but names and shapes."""
    check_one_of("to", to, TARGETS)
    checkpoint = open_checkpoint(source, part)
    known = recipe_in(checkpoint)
    layout = recognise(checkpoint.entries)
    named, steps = _without_encodings(checkpoint, known)
    named, more = in_timms_names(named, layout)
    steps += more
    encoding = known.get("encoding") or (layout.encoding(named) if layout else "none")
    about: dict[str, str] = {key: said for key, said in checkpoint.metadata.items() if key != ENCODING_KEY}
    entries, models = named, []
    if to == "ours":
        models = [_host(checkpoint, layout, named, encoding, known)]
        equipped = models[0].build()
        entries, steps = fitted(checkpoint.entries, equipped)
        about |= metadata(equipped) if encoding != "none" else {}
    elif layout is None or layout.modules:
        models = nearest(named, layout.modules if layout else (), named=_named(checkpoint, known))
        if to == "timm" and models and models[0].fits:
            entries, more = fitted(named, models[0].build())
            steps += more
        if encoding != "none" and not any(match.fits for match in models):
            models = [*_equipped(layout, named, encoding, known), *models]
    if to not in ("timm", "ours"):
        entries, more = _there(layout_of(to), named)
        steps += more
    model = models[0] if models and models[0].fits else None
    recipe = {
        "layout": layout.name if layout else known.get("layout", "timm"),
        "to": to,
        "architecture": model.name if model else None,
        "arguments": dict(model.arguments) if model else {},
        "encoding": encoding,
        **_grid(named, known),
        "resize": layout.resize if layout else known.get("resize", "timm"),
        "part": checkpoint.part or known.get("part", ""),
    }
    about[RECIPE_KEY] = json.dumps(recipe)
    return Conversion(checkpoint.name, layout, to, tuple(models), entries, tuple(steps), recipe, about)


def recipe_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a file that we wrote says about itself."""
    try:
        said = json.loads(checkpoint.metadata.get(RECIPE_KEY, "{}"))
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise InputError(f"{checkpoint.name}: its metadata {RECIPE_KEY} is not JSON of an object")
    return said


def _without_encodings(checkpoint: Checkpoint, known: Mapping[str, Any]) -> tuple[dict[str, Entry], list[Step]]:
    """The parameters of our encodings under the names that models of their kind have for them."""
    if not is_equipped(checkpoint.entries):
        return dict(checkpoint.entries), []
    if not known.get("architecture"):
        raise InputError(
            f"{checkpoint.name} is of an equipped model, and does not say of which: load it with load_checkpoint"
        )
    model = Match(known["architecture"], known.get("arguments", {}), known.get("encoding")).build()
    return translate(checkpoint.entries, backwards(list(encoding_rules(model))))


def is_equipped(entries: Entries) -> bool:
    """Whether these are of a model that `equip` changed."""
    return any("encodings." in name for name in entries)


def _named(checkpoint: Checkpoint, known: Mapping[str, Any]) -> object:
    return known.get("architecture") or checkpoint.configuration.get("architecture")


def _host(
    checkpoint: Checkpoint,
    layout: Layout | None,
    named: Entries,
    encoding: str,
    known: Mapping[str, Any],
) -> Match:
    """The model to equip, with what it was trained with; everything must fit."""
    if layout is not None and not layout.modules:
        raise InputError(
            f"{checkpoint.name} is of a model that timm does not have ({layout.name}): convert it without"
            " to='ours', or give it to load_checkpoint with the equipped model"
        )
    found = nearest(named, _hosts(layout), encoding=encoding, named=known.get("architecture"), most=1)
    if not found or not found[0].fits:
        lines = "\n  ".join(found[0].problems) if found else "no model of timm is of that size"
        raise InputError(
            f"{checkpoint.name} fits no timm model with {encoding!r}"
            + (f"; nearest is {found[0].name}:" if found else ":")
            + f"\n  {lines}"
        )
    return found[0]


def _hosts(layout: Layout | None) -> Sequence[str]:
    """timm's modules with the model to equip."""
    return () if layout is None else layout.modules if layout.hosts is None else layout.hosts


def _equipped(layout: Layout | None, named: Entries, encoding: str, known: Mapping[str, Any]) -> list[Match]:
    """The models that fit once they are equipped."""
    try:
        found = nearest(named, _hosts(layout), encoding=encoding, named=known.get("architecture"))
    except InputError:  # none of them can be given that
        return []
    return [match for match in found if match.fits]


def _there(layout: Layout, named: Entries) -> tuple[dict[str, Entry], list[Step]]:
    """From timm's names to an official layout, if that is what it is."""
    entries, steps = translate(named, backwards(layout.rules))
    again, _ = in_timms_names(entries, layout)
    lost = sorted(name for name, entry in named.items() if name not in again or again[name].shape != entry.shape)
    if lost:
        raise InputError(f"to={layout.name!r}: that layout has no place for {', '.join(lost)}")
    kept = [mark for mark in layout.marks if not _dropped(mark, layout)]
    if not replace(layout, marks=tuple(kept)).fits(entries):
        raise InputError(f"to={layout.name!r}: the checkpoint is of a model of another kind")
    return entries, steps


def _dropped(mark: str | tuple[str, ...], layout: Layout) -> bool:
    """Whether a layout is known by what timm's model has not."""
    names = (mark,) if isinstance(mark, str) else mark
    drops = [rule.theirs for rule in layout.rules if isinstance(rule, Drop)]
    return any(any(True for _ in matching(drop, names)) for drop in drops)


def _grid(named: Entries, known: Mapping[str, Any]) -> dict[str, Any]:
    prefix = prefix_tokens(named)
    grid = known.get("grid")
    table = next((t for t in tables_of(named, grid=tuple(grid) if grid else None) if t.kind == "absolute"), None)
    if table is None:
        return {"grid": grid, "prefix": prefix, "prefix_rows": 0}
    return {"grid": list(table.grid) if table.grid else grid, "prefix": prefix, "prefix_rows": table.prefix}


def _grouped(steps: Sequence[Step]) -> Iterator[tuple[Step, int]]:
    """One of the steps that differ in numbers alone, and how many of its kind there are."""
    kinds: dict[str, list[Step]] = {}
    for step in steps:
        kind = re.sub(r"\d+", "N", " ".join(name for name, _ in (*step.before, *step.after)) + step.why)
        kinds.setdefault(kind, []).append(step)
    yield from ((alike[0], len(alike)) for alike in kinds.values())
