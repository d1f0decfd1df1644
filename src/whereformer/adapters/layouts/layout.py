"""A layout: how the weights of one repository are recognised, and what timm calls them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whereformer.adapters.files import Entries
from whereformer.adapters.layouts.rules import Drop, Rule, matching


@dataclass(frozen=True)
class Layout:
    """The names and shapes in which one repository releases its weights.

    Args:
        name: what `whereformer convert --to` calls it.
        source: whose it is.
        marks: names of which each is there; of a tuple, one of them.
        without: names of which none is there.
        when: what else must hold.
        rules: from these names to timm's (see `Rule`), or to transformers'.
        modules: timm's modules in which the model of this kind is looked for, the likeliest first.
        encoding: the text for `equip` of what the weights were trained with, from entries in timm's names.
        hosts: timm's modules in which the model to `equip` with that is looked for; None: the same.
        resize: how the authors interpolate its tables: a name of `whereformer resize`.
        note: what the names cannot tell.
    """

    name: str
    source: str
    marks: tuple[str | tuple[str, ...], ...]
    rules: tuple[Rule | Drop, ...] = ()
    without: tuple[str, ...] = ()
    when: Callable[[Entries], bool] = lambda entries: True
    modules: tuple[str, ...] = ()
    encoding: Callable[[Entries], str] = lambda entries: "none"
    hosts: tuple[str, ...] | None = None
    resize: str = "timm"
    note: str = ""

    def fits(self, entries: Entries) -> bool:
        marks = ((mark,) if isinstance(mark, str) else mark for mark in self.marks)
        return (
            all(has(entries, *alternatives) for alternatives in marks)
            and not has(entries, *self.without)
            and self.when(entries)
        )


def has(entries: Entries, *templates: str) -> bool:
    """Whether one of these names is there."""
    return any(any(True for _ in matching(template, entries)) for template in templates)


def prefix_tokens(entries: Entries) -> int:
    """How many class, distillation and register tokens there are, from entries in timm's names."""
    return sum(entries[name].shape[-2] for name in ("cls_token", "dist_token", "reg_token") if name in entries)


def said(*terms: str | None) -> str:
    """Encodings in one text for `parse`, "none" if there is none."""
    return " + ".join(term for term in terms if term) or "none"


def learned(entries: Entries, options: Sequence[str] = ()) -> str | None:
    """The text of a `pos_embed`, if there is one, from entries in timm's names."""
    if "pos_embed" not in entries:
        return None
    rows = entries["pos_embed"].shape[-2]
    bare = prefix_tokens(entries) and round(rows**0.5) ** 2 == rows
    inside = ", ".join([*["prefix_rows=False"] * bool(bare), *options])
    return f"learned({inside})" if inside else "learned"
