"""Which of timm's models a checkpoint fits, by names and shapes."""

import functools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whereformer.adapters.equip import equip
from whereformer.adapters.files import Entries
from whereformer.adapters.fit import fitted_to, problems, shapes_of
from whereformer.adapters.layouts.names import synonyms
from whereformer.adapters.layouts.ours import encoding_rules
from whereformer.adapters.layouts.rules import Shape, translate
from whereformer.adapters.tables import tables_of
from whereformer.errors import InputError

OF_ONE_BLOCK = {"vision_transformer", "deit", "eva", "beit", "vision_transformer_sam"}
"""timm's modules whose models can be built with one block, which is enough to tell most of them apart."""

MODULES = {
    "patch_embeds.0.proj.weight": ("twins",),
    "layers.0.blocks.0.attn.cpb_mlp.0.weight": ("swin_transformer_v2",),
    "layers.0.blocks.0.norm1.weight": ("swin_transformer",),
    "blocks.0.attn.rel_pos_h": ("vision_transformer_sam",),
    "blocks.0.gamma_1": ("beit", "eva"),
    "blocks.0.attn.q_bias": ("eva", "beit"),
    "blocks.0.attn.q_proj.weight": ("eva",),
    "blocks.0.norm1.weight": ("vision_transformer", "deit", "eva"),
}
"""timm's modules in which a model with a certain name in it is looked for, if nothing says what kind it is of."""

LATER = re.compile(r".*blocks\.[1-9].*|.*(pos_embed|rel_pos|relative_position|rpe_|rope|pos_block|freqs).*")
"""Names that the first sieve does not look at: later blocks, and positions."""

FINALISTS = 6

UNBUILT = (TypeError, AssertionError, RuntimeError, ValueError)
"""What timm raises for arguments that a model does not take, such as another size; `InputError` is one of them."""


@dataclass(frozen=True)
class Match:
    """One of timm's models, and how far a checkpoint is from it.

    Args:
        name: for `timm.create_model`.
        arguments: what else to give it.
        encoding: what to equip it with, None for nothing.
        problems: what does not fit, in lines; none if all fits.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    encoding: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.problems

    def build(self) -> nn.Module:
        """The model on the meta device: names and shapes alone."""
        return _built(self.name, self.encoding, **self.arguments)

    def __str__(self) -> str:
        inside = "".join(f", {key}={value!r}" for key, value in self.arguments.items())
        made = f"timm.create_model({self.name!r}{inside})"
        return made if self.encoding is None else f"whereformer.equip({made}, {self.encoding!r})"


def nearest(
    entries: Entries,
    modules: Sequence[str] = (),
    *,
    encoding: str | None = None,
    named: object = None,
    most: int = 3,
) -> list[Match]:
    """The models that a checkpoint in timm's names fits, or comes nearest to, the best first.

    Args:
        entries: names and shapes.
        modules: timm's modules to look into, the likeliest first; as `MODULES` says if there is none.
        encoding: what `equip` gives the models, if anything.
        named: a model that the checkpoint itself names.
        most: how many at most.

    Raises:
        InputError: `equip` refuses all of them.
    """
    try:
        import timm
    except ModuleNotFoundError as error:
        raise InputError(f'finding the model needs {error.name}: pip install "whereformer[lab]"') from None
    sizes = dict(_sizes(entries))
    if isinstance(named, str) and timm.is_model(named):
        names = [named]
    else:
        likely = modules or next((found for name, found in MODULES.items() if name in entries), ())
        names = _sieved(entries, likely, sizes)
    found, refusals = [], []
    for name in names:
        home = _home(name)
        arguments = {key: value for key, value in sizes.items() if value != home[key]}
        match = Match(name, arguments, encoding)
        try:
            found.append(replace(match, problems=tuple(_apart(entries, match))))
        except InputError as error:
            refusals.append(error)
        except UNBUILT:
            continue
    if refusals and not found:
        raise refusals[0]
    found.sort(key=lambda match: (_names(match.problems), "img_size" in match.arguments))
    return found[:most]


def _apart(entries: Entries, match: Match) -> Iterator[str]:
    """What does not fit."""
    if match.encoding in (None, "none"):
        wanted, encodings = _shapes(match.name, *match.arguments.items()), []
    else:
        model = match.build()
        wanted, encodings = shapes_of(model), list(encoding_rules(model))
    weights, _ = fitted_to(entries, wanted, encodings)
    return problems(weights, wanted)


@functools.lru_cache(maxsize=512)
def _shapes(name: str, *arguments: tuple[str, Any]) -> dict[str, Shape]:
    """Names and shapes of a model as timm makes it."""
    return shapes_of(_built(name, None, **dict(arguments)))


def _names(problems: Sequence[str]) -> int:
    """How many names these lines are about."""
    return sum(len(line.split(", ")) for line in problems)


def _sizes(entries: Entries) -> Iterator[tuple[str, int]]:
    """The number of classes, and of pixels along a side if a table tells it."""
    head = next((entries[name] for name in ("head.weight", "head.fc.weight") if name in entries), None)
    yield "num_classes", head.shape[0] if head is not None else 0
    kernel = entries.get("patch_embed.proj.weight")
    table = next((t for t in tables_of(entries) if t.kind == "absolute" and t.grid), None)
    if kernel is not None and table is not None and table.grid and table.grid[0] == table.grid[-1]:
        yield "img_size", table.grid[0] * kernel.shape[-1]


def _sieved(entries: Entries, modules: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The names of the models that fit best in their first block and outside of the blocks."""
    import timm

    first = {name: entry for name, entry in entries.items() if not LATER.fullmatch(name)}
    found = []
    for place, module in enumerate(modules):
        thin = {"depth": 1} if module in OF_ONE_BLOCK else {}
        for name in timm.list_models(module=module):
            try:
                shapes = _shapes(name, ("num_classes", sizes["num_classes"]), *thin.items())
            except UNBUILT:
                continue
            wanted = {key: shape for key, shape in shapes.items() if not LATER.fullmatch(key)}
            try:
                named, _ = translate(first, list(synonyms(first, wanted)), shapes=wanted, wanted=wanted)
            except InputError:  # shapes that cannot become this model's
                continue
            apart = len(named.keys() ^ wanted.keys())
            apart += sum(named[key].shape != wanted[key] for key in named.keys() & wanted.keys())
            elsewhere = sizes.get("img_size") not in (None, _home(name)["img_size"])
            found.append((apart, elsewhere, place, name))
    return [name for *_, name in sorted(found)[:FINALISTS]]


def _home(name: str) -> dict[str, int | None]:
    """The size in pixels, and the number of classes, that a model is made for."""
    import timm

    known = timm.get_pretrained_cfg(name)
    size = known.input_size[-1] if known and known.input_size else None
    return {"img_size": size, "num_classes": known.num_classes if known else None}


class _NoNumbers(TorchFunctionMode):
    """Skips the start of parameters: on the meta device there are no numbers, but making none takes its time."""

    starts = frozenset(("uniform_", "normal_", "erfinv_", "clamp_", "mul_", "add_", "fill_", "zero_"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.starts:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _built(name: str, encoding: str | None, **arguments: Any) -> nn.Module:
    import timm

    with torch.device("meta"), _NoNumbers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = timm.create_model(name, **arguments)
        return model if encoding in (None, "none") else equip(model, encoding)
