"""What a checkpoint holds, without reading its numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from whereformer.adapters.architectures import Match
from whereformer.adapters.convert import is_equipped, plan, recipe_in
from whereformer.adapters.files import Source, open_checkpoint
from whereformer.adapters.layouts.layout import Layout, prefix_tokens
from whereformer.adapters.layouts.rules import Step
from whereformer.adapters.tables import Table, tables_of


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    Args:
        source: where it is.
        part: under which name the file keeps it, "" for none.
        others: the other state dicts in the file.
        prefix: what all names began with.
        layout: whose names these are; None: timm's, or unknown ones.
        equipped: whether it is of a model that `equip` changed.
        models: those of timm's models that it fits, or comes nearest to, the best first.
        encoding: what the weights were trained with, as a text for `equip`.
        grid: (height, width) in patches, if a table or the file tells.
        prefix_tokens: class, distillation and register tokens.
        prefix_rows: how many of them have rows in the position table.
        resize: how the tables are resized: a name of `whereformer.resample.RECIPES`.
        tables: every learned table over places.
        encodings: what encodings learn, of a model that `equip` changed: name -> shape.
        parameters: how many numbers, without derived buffers.
        bytes: how long they are.
        dtypes: how many tensors of each dtype.
        steps: what `convert` would change.
        metadata: what a safetensors file says about itself.
    """

    source: str
    part: str
    others: tuple[str, ...]
    prefix: str
    layout: Layout | None
    equipped: bool
    models: tuple[Match, ...]
    encoding: str
    grid: tuple[int, int] | None
    prefix_tokens: int
    prefix_rows: int
    resize: str
    tables: tuple[Table, ...]
    encodings: Mapping[str, tuple[int, ...]]
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    steps: tuple[Step, ...]
    metadata: Mapping[str, str]

    @property
    def dropped(self) -> list[str]:
        """Names that `convert` leaves out."""
        return [name for step in self.steps if not step.after for name, _ in step.before]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        layout = self.layout
        said = asdict(replace(self, layout=None, steps=(), models=()))
        said |= {
            "layout": layout and {"name": layout.name, "source": layout.source, "note": layout.note},
            "models": [asdict(match) for match in self.models],
            "steps": [str(step) for step in self.steps],
            "dropped": self.dropped,
        }
        return said


def inspect(source: Source, *, part: str | None = None) -> Inspection:
    """See which layout, model and encodings a checkpoint holds. No numbers are read.

    Args:
        source: a file, a folder, an id of the Hugging Face hub, or a state dict.
        part: which state dict, if a file holds several.

    Raises:
        InputError: it cannot be read.
    """
    checkpoint = open_checkpoint(source, part)
    known = recipe_in(checkpoint)
    equipped = is_equipped(checkpoint.entries)
    lost = equipped and not known.get("architecture")
    conversion = None if lost else plan(source, part=part)
    entries = conversion.entries if conversion else checkpoint.entries
    recipe: Mapping[str, Any] = conversion.recipe if conversion else {}
    grid = recipe.get("grid")
    return Inspection(
        source=checkpoint.name,
        part=checkpoint.part,
        others=checkpoint.others,
        prefix=checkpoint.prefix,
        layout=conversion.layout if conversion else None,
        equipped=equipped,
        models=conversion.models if conversion else (),
        encoding=recipe.get("encoding", "unknown"),
        grid=tuple(grid) if grid else None,
        prefix_tokens=recipe.get("prefix", prefix_tokens(entries)),
        prefix_rows=recipe.get("prefix_rows", 0),
        resize=recipe.get("resize", "timm"),
        tables=tables_of(entries, grid=tuple(grid) if grid else None),
        encodings={name: entry.shape for name, entry in entries.items() if ".encodings." in f".{name}"},
        parameters=sum(entry.numbers for entry in entries.values()),
        bytes=sum(entry.bytes for entry in entries.values()),
        dtypes=dict(Counter(str(entry.dtype).removeprefix("torch.") for entry in checkpoint.entries.values())),
        steps=conversion.steps if conversion else (),
        metadata=checkpoint.metadata,
    )
