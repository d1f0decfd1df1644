"""What each encoding is, found by asking one: the facts behind `whereformer list` and the documentation."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whereformer import backends
from whereformer.catalog import CATALOG, FAMILIES, Factory, options, parse, spell
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.forms import Bias, BucketValues, Forms
from whereformer.grid import Grid

MODEL, DIM, HEADS, DEPTH, GRID = "DeiT-S", 384, 6, 12, Grid(14, 14, prefix=1)
"""The model whose parameters and multiply-adds are counted: DeiT-S at 224 pixels."""

Sizes = Literal["exact", "by number", "stretched", "resampled", "limited", "home"]
SIZES: dict[Sizes, str] = {
    "exact": "any grid; a patch, or an offset, means the same on all",
    "by number": "any grid; places are numbers in row-by-row order, so that they change with the width",
    "stretched": "any grid; what was learned or computed for the whole image is stretched over it",
    "resampled": "any grid; the home grid's table is resampled as an image, exact at home",
    "limited": "grids up to a largest size",
    "home": "the home grid alone",
}
"""What becomes of an encoding on another grid."""

Mask = Literal["", "one", "per head", "per image", "per head and image"]
MASKS: dict[Mask, str] = {
    "": "none",
    "one": "one for all heads and images",
    "per head": "one per head, for all images",
    "per image": "one per image, for all heads",
    "per head and image": "one per head and image",
}
"""Which queries × keys tensors of logits a fused kernel must be given."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of an encoding in `MODEL`."""

    name: str
    shape: tuple[int, ...]
    learned: bool


@dataclass(frozen=True)
class Entry:
    """What there is to know of one encoding.

    Args:
        name: in the catalog, with the options that were asked for.
        family: one of `FAMILIES`; "" for a class that the catalog does not hold.
        formula, paper: as its class says.
        options: its own keyword arguments and their values.
        moments, forms: when it speaks, and what it says then.
        contextual: whether what it says depends on what the tokens hold, not only on where they are.
        parameters, macs: learned numbers, and multiply-adds per image, of all that `MODEL` holds.
        tensors: the parameters of one of them.
        copies: how many `MODEL` holds.
        mask: which queries × keys tensors a fused kernel must be given.
        backends: those that can serve it, beside the reference.
        sizes: what becomes of it on another grid.
        crosses: whether queries and keys may lie on two grids.
        keeps: whether patches may be left out.
        video: whether it is defined on videos.
    """

    name: str
    family: str
    formula: str
    paper: str
    options: dict[str, object]
    moments: tuple[str, ...]
    forms: tuple[str, ...]
    contextual: bool
    parameters: int
    macs: int
    tensors: tuple[Parameter, ...]
    copies: int
    mask: Mask
    backends: tuple[str, ...]
    sizes: Sizes
    crosses: bool
    keeps: bool
    video: bool

    @property
    def source(self) -> str:
        """Authors and year alone."""
        return authors(self.paper)

    @property
    def said(self) -> tuple[str, ...]:
        """What it says: "tokens", or names of forms."""
        return (*["tokens"] * ("tokens" in self.moments), *self.forms)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "source": self.source}


def entries() -> list[Entry]:
    """The facts of the whole catalog, with default options."""
    return [entry(name) for name in CATALOG]


def entry(encoding: str | Factory) -> Entry:
    """The facts of one encoding.

    Args:
        encoding: a text for `whereformer.parse` that names one, or a factory.
    """
    factory = encoding
    if isinstance(encoding, str):
        factory, *others = parse(encoding)
        if others:
            raise InputError(f"encoding {encoding!r} names {1 + len(others)}, expected one")
    assert not isinstance(factory, str)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _entry(factory)


def _entry(factory: Factory) -> Entry:
    with torch.device("meta"):
        whole = factory(DIM, HEADS, GRID)
    copies = len(whole.blocks(DEPTH))
    tensors = tuple(Parameter(n, tuple(p.shape), p.requires_grad) for n, p in whole.named_parameters())
    small = _loud(factory(24, 3, SMALL))
    small.at_block(0, DEPTH)
    forms = _forms(small, SMALL)
    said = [*forms.rotations, *forms.biases, *forms.values]
    return Entry(
        name=spell(factory),
        family=next((family for family, names in FAMILIES.items() if type(whole) in names.values()), ""),
        formula=whole.formula,
        paper=whole.paper,
        options=options(type(whole)) | getattr(factory, "keywords", {}),
        moments=whole.moments(),
        forms=tuple(dict.fromkeys(type(form).__name__ for form in said)),
        contextual=_contextual(small),
        parameters=copies * sum(math.prod(tensor.shape) for tensor in tensors if tensor.learned),
        macs=copies * whole.macs(GRID),
        tensors=tensors,
        copies=copies,
        mask=_mask(forms.biases),
        backends=tuple(name for name, backend in backends.FASTEST_FIRST.items() if not backend.cannot(forms)),
        sizes=_sizes(factory, small),
        crosses=whole.crosses,
        keeps=_serves(small, SMALL.keep(torch.tensor([[0, 5, 9, 30]]))),
        video=3 in whole.axes,
    )


# ---------------------------------------------------------------------------------------------------------------
# In words.

FAMILY: dict[str, str] = {
    "absolute": "add to the tokens what depends on where they are",
    "conditional": "add to the tokens, or to the values, what a convolution makes of them",
    "contextual": "add to the logits, and to the values, what queries and keys make of offsets",
    "biases": "add to the logits what depends on offsets alone",
    "rotary": "turn queries and keys by angles that depend on where they are",
}
"""What the encodings of each of `FAMILIES` do."""


def authors(paper: str) -> str:
    """Authors and year of the first paper that is named.

    >>> authors(CATALOG["irpe"].paper)
    'Wu et al. 2021'
    """
    found = re.match(r".*?\b\d{4}\b", paper)
    return found[0] if found else paper


WHEN = {
    "tokens": "before a block (tokens)",
    "rotations": "before the dot product (rotations)",
    "biases": "on the logits (biases)",
    "values": "after the softmax (values)",
}

EVERYWHERE = (
    "Every encoding takes grids that are not square, the prefix tokens it was built for, masks, several images"
    " packed into one sequence or padded into one batch, and, if it does not say otherwise, a part of the patches."
)
"""What need not be said of each."""


def in_words(entry: Entry) -> dict[str, str]:
    """What an entry says beside its formula, source and options."""
    said = {
        "speaks": "; ".join(WHEN[moment] for moment in entry.moments) or "never",
        "says": " and ".join(entry.said) or "nothing",
        "depends on": "places and what the tokens hold" if entry.contextual else "places alone",
        f"parameters, {MODEL}": _parameters(entry),
        f"multiply-adds, {MODEL}": f"{entry.macs:,} per image" if entry.macs else "none",
        "mask for a fused kernel": MASKS[entry.mask],
        "backends": ", ".join([*entry.backends, "reference"]),
        "another grid": f"{entry.sizes}: {SIZES[entry.sizes]}",
        "queries and keys on two grids": _crosses(entry),
        "videos": "yes" if entry.video else "no",
    }
    return said if entry.keeps else said | {"a part of the patches": "no"}


def _crosses(entry: Entry) -> str:
    if not entry.crosses:
        return "no"
    whole = entry.sizes == "stretched" and set(entry.moments) != {"tokens"}
    return "yes, each over the whole image" if whole else "yes"


def _parameters(entry: Entry) -> str:
    if not entry.tensors:
        return "none"
    tensors = ", ".join(
        f"{tensor.name} {' × '.join(map(str, tensor.shape)) or '1'}" + " (not learned)" * (not tensor.learned)
        for tensor in entry.tensors
    )
    where = "once" if entry.copies == 1 else f"in each of {entry.copies} blocks"
    count = f"{entry.parameters:,}" if entry.parameters else "none learned"
    return f"{count}: {tensors}, {where}"


@dataclass(frozen=True)
class Docstring:
    """An encoding's docstring, taken apart.

    Args:
        body: its equations and what explains them.
        options: name, or names joined by commas, to what is said of it, in lines.
        sections: "Shapes" and the like, to their text.
    """

    body: str
    options: dict[str, str]
    sections: dict[str, str]


def docstring(cls: type[PositionEncoding]) -> Docstring:
    """Without its doctests.

    >>> docstring(CATALOG["peg"]).options["kernel_size"]
    'k, odd.'
    """
    body: list[str] = []
    options: list[str] = []
    sections: dict[str, list[str]] = {}
    here = body
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if line.strip() == "Args:":
            here = options
        elif line.startswith(">>> "):
            here = []
        elif heading := re.match(r"(Shapes|Start|Order): ?(.*)", line):
            here = sections.setdefault(heading[1], [heading[2]])
        elif here is options and line and not line.startswith(" "):
            here = body
            body += ["", line]
        else:
            here.append(line)
    items = re.split(r"^    (?=[A-Za-z_][\w, ]*: )", "\n".join(options), flags=re.MULTILINE)
    pairs = (item.split(": ", 1) for item in items if ": " in item)
    return Docstring(
        "\n".join(body).strip(),
        {name: inspect.cleandoc(text) for name, text in pairs},
        {name: inspect.cleandoc("\n".join(lines)) for name, lines in sections.items()},
    )


def paragraphs(text: str) -> list[tuple[bool, str]]:
    """The paragraphs of a docstring, each on one line; True with those whose lines and columns must stay.

    >>> paragraphs("One,\\ntwo:\\n\\n    x = y\\n\\nThree:\\na    1\\nbc   2")
    [(False, 'One, two:'), (True, '    x = y'), (False, 'Three:'), (True, 'a    1\\nbc   2')]
    """
    found: list[tuple[bool, list[str]]] = []
    last = ""
    for line in text.splitlines():
        kept = line.startswith("    ") or bool(last and re.search(r"\S  +\S", line))
        if line.strip() and found and found[-1][0] == kept and (kept or last):
            found[-1][1].extend([""] * (not last) + [line])
        elif line.strip():
            found.append((kept, [line]))
        last = line.strip()
    return [(kept, "\n".join(lines) if kept else " ".join(lines)) for kept, lines in found]


# ---------------------------------------------------------------------------------------------------------------
# Asking. All tokens are alike, so that what differs between them comes from where they are.

SMALL, LARGER, LONG = Grid(8, 9), Grid(11, 13), (Grid(1, 500), Grid(500, 1))
BATCH = 2


def _loud(encoding: PositionEncoding) -> PositionEncoding:
    """With random parameters: tables that start at zero would say nothing."""
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.rand_like(parameter) * 2 - 1)
    return encoding.eval()


def _alike(shape: tuple[int, ...], tokens: int, seed: int) -> Tensor:
    """[batch, ..., tokens, features], the same for all tokens and images."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(*shape[:-1], 1, shape[-1], generator=generator)
    return one.expand(BATCH, *shape[:-1], tokens, shape[-1])


def _forms(encoding: PositionEncoding, grid: Grid, seed: int = 0) -> Forms:
    q, k, v = (_alike((encoding.num_heads, encoding.head_dim), grid.tokens, seed + i) for i in range(3))
    return Forms(
        tuple(encoding.rotations(grid)),
        tuple(encoding.biases(q, k, grid, grid)),
        tuple(encoding.values(v, grid, grid)),
    )


@torch.no_grad()
def _heard(
    encoding: PositionEncoding, grid: Grid, corner: Callable[[Grid], Tensor], seed: int = 0
) -> list[Tensor]:
    """All that an encoding says of some patches and pairs of them."""
    at = corner(grid)
    x = _alike((encoding.dim,), grid.tokens, seed)
    forms = _forms(encoding, grid, seed)
    q, k = (_alike((encoding.num_heads, encoding.head_dim), grid.tokens, 7) for _ in range(2))
    turned_q, turned_k = forms.turn(q, k)
    logits = [turned_q @ turned_k.mT] if forms.rotations else []
    logits += [bias.dense().expand(BATCH, encoding.num_heads, grid.tokens, grid.tokens) for bias in forms.biases]
    weights = torch.zeros(BATCH, encoding.num_heads, grid.tokens, grid.tokens)
    weights[..., at[:, None], at] = torch.arange(1.0, len(at) ** 2 + 1).view(len(at), len(at)) / len(at) ** 2
    values = [term.dense(weights) for term in forms.values]
    heard = [encoding.tokens(x, grid) - x, *values]
    return [t[..., at, :] for t in heard] + [t[..., at[:, None], at] for t in logits]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(one, other, strict=True))


def _everything(grid: Grid) -> Tensor:
    return torch.arange(grid.tokens)


def _corner(grid: Grid) -> Tensor:
    return grid.raster().view(grid.size)[:2, :3].flatten()


def _top(grid: Grid) -> Tensor:
    return torch.arange(3)


def _contextual(encoding: PositionEncoding) -> bool:
    summed = any(isinstance(term, BucketValues) for term in _forms(encoding, SMALL).values)
    return summed or not _same(*(_heard(encoding, SMALL, _everything, seed) for seed in (0, 100)))


def _mask(biases: tuple[Bias, ...]) -> Mask:
    _, others = backends.sdpa.split(biases, room=DIM // HEADS)
    shapes = [bias.dense().shape for bias in others]
    if not shapes:
        return ""
    images, heads, _, _ = torch.broadcast_shapes((1, 1, 1, 1), *shapes)
    if images > 1:
        return "per head and image" if heads > 1 else "per image"
    return "per head" if heads > 1 else "one"


def _serves(encoding: PositionEncoding, grid: Grid) -> bool:
    try:
        _heard(encoding, grid, _top)
    except InputError:
        return False
    return True


def _sizes(factory: Factory, encoding: PositionEncoding) -> Sizes:
    if not _serves(encoding, LARGER):
        return "home"
    if not all(_serves(encoding, grid) for grid in LONG):
        return "limited"
    if _same(*(_heard(encoding, grid, _corner) for grid in (SMALL, LARGER))):
        return "exact"
    with torch.device("meta"):
        shapes = [[p.shape for p in factory(24, 3, grid).parameters()] for grid in (SMALL, LARGER)]
    if shapes[0] != shapes[1]:
        return "resampled"
    by_number = _same(*(_heard(encoding, grid, _top) for grid in (SMALL, LARGER)))
    return "by number" if by_number else "stretched"
