"""A checkpoint in the names of a model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from whereformer.adapters.files import Entries, Entry
from whereformer.adapters.layouts import recognise
from whereformer.adapters.layouts.layout import Layout
from whereformer.adapters.layouts.names import derived, synonyms
from whereformer.adapters.layouts.ours import encoding_rules
from whereformer.adapters.layouts.rules import Rule, Shape, Step, translate
from whereformer.adapters.tables import tables_of


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """What a model's state dict holds, on the meta device too."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def in_timms_names(
    entries: Entries, layout: Layout | None, shapes: Mapping[str, Shape] | None = None
) -> tuple[dict[str, Entry], list[Step]]:
    """A checkpoint of some layout under timm's names (transformers' for DETR), without derived buffers."""
    rules = (*derived(entries, shapes or {}), *(layout.rules if layout else ()))
    return translate(entries, rules, shapes=shapes)


def fitted(entries: Entries, model: nn.Module) -> tuple[dict[str, Entry], list[Step]]:
    """A checkpoint of any known layout under the names of a model, equipped or not, and every change.

    What the model has no place for stays under the name it came to; but biases that are zero and that it lacks go.
    """
    return fitted_to(entries, shapes_of(model), list(encoding_rules(model)))


def fitted_to(
    entries: Entries, wanted: Mapping[str, Shape], encodings: Sequence[Rule] = ()
) -> tuple[dict[str, Entry], list[Step]]:
    """As `fitted`, to the names and shapes of a model, and the rules for its encodings."""
    if {name: entry.shape for name, entry in entries.items()} == wanted:
        return dict(entries), []
    found, steps = in_timms_names(entries, recognise(entries), wanted)
    for rules in (list(synonyms(found, wanted)), encodings):
        found, more = translate(found, rules, shapes=wanted, wanted=wanted)
        steps += more
    silent = [name for name in found if name not in wanted and _adds_nothing(name, found[name])]
    steps += [Step(((name, found.pop(name).shape),), (), "a bias of zeros") for name in silent]
    return found, steps


def _adds_nothing(name: str, entry: Entry) -> bool:
    """The distilled DINOv3 keep biases of zeros, which timm's models lack."""
    return name.endswith((".q_bias", ".v_bias")) and not entry.read().any()


def problems(entries: Entries, wanted: Mapping[str, Shape]) -> Iterator[str]:
    """What does not fit, in lines."""
    if missing := sorted(wanted.keys() - entries.keys()):
        yield f"missing: {', '.join(missing)}"
    if unexpected := sorted(entries.keys() - wanted.keys()):
        yield f"unexpected: {', '.join(unexpected)}"
    apart = [name for name in sorted(wanted.keys() & entries.keys()) if entries[name].shape != wanted[name]]
    places, asked = (_places(shapes) for shapes in ({n: e.shape for n, e in entries.items()}, wanted))
    for name in apart:
        here, there = (f" ({found[name]})" if name in found else "" for found in (places, asked))
        yield f"{name}: {entries[name].shape}{here}, but the model has {wanted[name]}{there}"


@dataclass(frozen=True)
class _Shaped:
    shape: Shape


def _places(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """For each table over places, its grid and how many rows it has without one, in words."""
    tables = tables_of({name: _Shaped(shape) for name, shape in shapes.items()})
    return {
        table.name: f"{' x '.join(map(str, table.grid))} and {table.prefix} without a place"
        for table in tables
        if table.grid and table.kind != "kernel"
    }
