"""How names and tensors of one layout become those of another."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whereformer.adapters.files import Entries, Entry
from whereformer.errors import InputError

Shape = tuple[int, ...]
Change = Callable[[Sequence[Tensor], Sequence[Shape | None]], Sequence[Tensor]]
"""Old tensors, and the shapes that the new ones are to have where that is known, to the new ones."""

HOLE = re.compile(r"\{(\w+)([+-]\d+)?\}")


@dataclass(frozen=True)
class Rule:
    """Some names of an official layout, and timm's for the same.

    In a name {n}, {m} ... stand for numbers, {rest} for anything; {n+1} is one more than {n}. If there are several
    names, all of them have to be there.

    Args:
        theirs: the official names.
        timm: timm's.
        there: what becomes of the tensors on the way to timm; None: they stay, to the bit.
        back: what becomes of them on the way back; None with `there`: there is no way back.
        when: whether the rule holds for a checkpoint.
        back_when: whether it holds on the way back.
    """

    theirs: str | tuple[str, ...]
    timm: str | tuple[str, ...]
    there: Change | None = None
    back: Change | None = None
    when: Callable[[Entries], bool] = lambda entries: True
    back_when: Callable[[Entries], bool] = lambda entries: True

    def reversed(self) -> "Rule | None":
        known, asked = (
            {hole[1] for name in _several(side) for hole in HOLE.finditer(name)}
            for side in (self.timm, self.theirs)
        )
        if (self.there is not None and self.back is None) or not asked <= known:
            return None
        return Rule(self.timm, self.theirs, self.back, self.there, self.back_when, self.when)


@dataclass(frozen=True)
class Drop:
    """Names that go, and why: buffers that follow from the rest, or parts that timm's model does not have."""

    theirs: str
    why: str


@dataclass(frozen=True)
class Step:
    """One change: names and shapes before and after; what is dropped has none after, and a reason."""

    before: tuple[tuple[str, Shape], ...]
    after: tuple[tuple[str, Shape], ...]
    why: str = ""

    def __str__(self) -> str:
        old, new = (
            ", ".join(f"{name} {_shape(shape)}" for name, shape in side) for side in (self.before, self.after)
        )
        return f"{old} -> {new or 'dropped'}" + (f": {self.why}" if self.why else "")


def translate(
    entries: Entries,
    rules: Sequence[Rule | Drop],
    *,
    shapes: Mapping[str, Shape] | None = None,
    wanted: Mapping[str, Shape] | None = None,
) -> tuple[dict[str, Entry], list[Step]]:
    """Entries under their new names, in their old order, and every change. Nothing is read.

    The first rule that knows a name counts; names that none knows stay as they are.

    Args:
        entries: the old ones.
        rules: from the old names ("theirs") to the new ones ("timm").
        shapes: those of the new tensors, as far as they are known.
        wanted: if given, what the new names may be: a rule counts only where all of its are, and not there yet.
    """
    places = {name: place for place, name in enumerate(entries)}
    found: list[tuple[int, dict[str, Entry]]] = []
    steps: list[tuple[int, Step]] = []
    left = dict(entries)
    for rule in rules:
        if isinstance(rule, Rule) and not rule.when(entries):
            continue
        for old, new in list(_matches(rule, left)):
            if wanted is not None and (isinstance(rule, Drop) or not _serves(old, new, wanted, entries)):
                continue
            if not all(name in left for name in old):
                continue
            sources = [left.pop(name) for name in old]
            place = min(places[name] for name in old)
            if isinstance(rule, Drop):
                made, why = {}, rule.why
            else:
                made, why = _made(rule, old, sources, new, shapes or {}), ""
            found.append((place, made))
            before = tuple((name, entry.shape) for name, entry in zip(old, sources, strict=True))
            after = tuple((name, entry.shape) for name, entry in made.items())
            if before != after or (isinstance(rule, Rule) and rule.there):
                steps.append((place, Step(before, after, why)))
    found += [(places[name], {name: entry}) for name, entry in left.items()]
    result: dict[str, Entry] = {}
    for _, made in sorted(found, key=lambda item: item[0]):
        for name, entry in made.items():
            if name in result:
                raise InputError(f"two tensors of the checkpoint would be called {name}")
            result[name] = entry
    return result, [step for _, step in sorted(steps, key=lambda item: item[0])]


def _serves(old: Sequence[str], new: Sequence[str], wanted: Collection[str], entries: Entries) -> bool:
    return all(name in wanted and (name in old or name not in entries) for name in new)


def _made(
    rule: Rule, old: Sequence[str], sources: Sequence[Entry], new: Sequence[str], shapes: Mapping[str, Shape]
) -> dict[str, Entry]:
    there = rule.there
    if there is None:
        return dict(zip(new, sources, strict=True))
    wished = [shapes.get(name) for name in new]
    try:
        blank = [torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in sources]
        made = [tuple(t.shape) for t in there(blank, wished)]
        if len(made) != len(new):
            raise ValueError(f"{len(made)} tensors for {len(new)} names")
    except (RuntimeError, ValueError, IndexError) as error:
        said = ", ".join(f"{name} {_shape(entry.shape)}" for name, entry in zip(old, sources, strict=True))
        raise InputError(f"{said} cannot become {', '.join(new)}: {error}") from None

    def reader(place: int) -> Callable[[], Tensor]:
        return lambda: there([entry.read() for entry in sources], wished)[place]

    dtype = sources[0].dtype
    return {name: Entry(shape, dtype, reader(n)) for n, (name, shape) in enumerate(zip(new, made, strict=True))}


def _matches(rule: Rule | Drop, names: Collection[str]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Old names and new ones, for each way to fill the holes."""
    theirs = _several(rule.theirs)
    timm = () if isinstance(rule, Drop) else _several(rule.timm)
    for name, holes in matching(theirs[0], names):
        old = (name, *(fill(template, holes) for template in theirs[1:]))
        if all(one in names for one in old):
            yield old, tuple(fill(template, holes) for template in timm)


def matching(template: str, names: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The names that a template fits, and what fills its holes.

    >>> list(matching("layers.{n+1}.{rest}", ["layers.3.weight", "norm.weight"]))
    [('layers.3.weight', {'n': '2', 'rest': 'weight'})]
    """
    if not HOLE.search(template):
        if template in names:
            yield template, {}
        return
    pattern, shifts, end = "", {}, 0
    for hole in HOLE.finditer(template):
        name, shift = hole[1], hole[2]
        pattern += re.escape(template[end : hole.start()])
        pattern += (
            rf"(?P<{name}>{'.+' if name == 'rest' else '[0-9]+'})" if name not in shifts else rf"(?P={name})"
        )
        shifts[name] = int(shift or 0)
        end = hole.end()
    compiled = re.compile(pattern + re.escape(template[end:]))
    for name in names:
        if match := compiled.fullmatch(name):
            yield (
                name,
                {
                    key: value if key == "rest" else str(int(value) - shifts[key])
                    for key, value in match.groupdict().items()
                },
            )


def fill(template: str, holes: Mapping[str, str]) -> str:
    def filled(hole: re.Match[str]) -> str:
        value = holes[hole[1]]
        return value if hole[1] == "rest" else str(int(value) + int(hole[2] or 0))

    return HOLE.sub(filled, template)


def backwards(rules: Sequence[Rule | Drop]) -> list[Rule]:
    """The way back, as far as there is one; what was dropped stays away."""
    return [back for rule in rules if isinstance(rule, Rule) and (back := rule.reversed())]


def under(prefix: str, rules: Sequence[Rule | Drop]) -> list[Rule | Drop]:
    """The same rules for official names that begin with `prefix`."""
    found: list[Rule | Drop] = []
    for rule in rules:
        if isinstance(rule, Drop):
            found.append(replace(rule, theirs=prefix + rule.theirs))
        else:
            found.append(replace(rule, theirs=tuple(prefix + name for name in _several(rule.theirs))))
    return found


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _shape(shape: Shape) -> str:
    return "x".join(map(str, shape)) if shape else "()"


def each(change: Callable[[Tensor], Tensor]) -> Change:
    """A change of each tensor by itself."""
    return lambda tensors, shapes: [change(tensor) for tensor in tensors]


def joined(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """One below the other."""
    return [torch.cat(list(tensors))]


def split(count: int) -> Change:
    """Into equal parts, from the first axis."""

    def parts(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
        (tensor,) = tensors
        if tensor.shape[0] % count:
            raise ValueError(f"{tensor.shape[0]} rows do not divide into {count} parts")
        return list(tensor.chunk(count))

    return parts
