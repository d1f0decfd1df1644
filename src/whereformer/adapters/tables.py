"""The learned tables of models as they are: which there are, over what, how they are laid out, and read."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from whereformer.adapters.homes import followed
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError, check_gathered
from whereformer.resample import Recipe, exact, recipe_of, resample_kernel

Kind = Literal["absolute", "bias", "distance", "strip", "window", "kernel"]
"""What a table is over.

absolute: the patches of a grid. bias: offsets (dy, dx) within a grid or a window. distance: |dy|, |dx| (LeViT).
strip: offsets along one axis (SAM, MViTv2, ViTDet). window: the patches of a window that repeats over the grid
(Hiera). kernel: the pixels of a patch.
"""


class Shaped(Protocol):
    """A tensor, or whatever stands for one."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Table:
    """One learned table of a model or state dict.

    Args:
        name: its key.
        kind: what it is over.
        shape: as it is stored.
        grid: the (height, width) in patches that it was made for: of the model, of a stage, or of a window; of a
            kernel, in pixels; of a strip, one number. None: its shape does not tell, and nobody has.
        follows: whether it changes with the model's grid; the others belong to windows, or to patches.
        prefix: rows without a place, kept as they are: at the beginning, or of a bias at the end.
        axis: where its places are in the shape.
        flat: whether the places fill one axis, row by row, or two.
        recipe: how its library reads it at another size: a name in `whereformer.resample.RECIPES`.
        heads: of a bias, how many.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    grid: tuple[int, ...] | None
    follows: bool = True
    prefix: int = 0
    axis: int = 0
    flat: bool = True
    recipe: str = "timm"
    heads: int | None = None

    def on(self, grid: Sequence[int]) -> "Table":
        """The same table, made for another grid."""
        places = _places(self.kind, tuple(grid))
        sizes = (self.prefix + math.prod(places),) if self.flat else places
        shape = (*self.shape[: self.axis], *sizes, *self.shape[self.axis + len(sizes) :])
        return replace(self, shape=shape, grid=tuple(grid))

    def follow(self, home: Sequence[int], grid: Sequence[int]) -> "Table":
        """As it is when the model moves from one grid to another."""
        if not self.follows or self.kind == "kernel" or tuple(home) == tuple(grid):
            return self
        own = self._known_grid()
        axes = (0, 1) if self.kind != "strip" else (_strip_axis(self.name),)
        size = followed(own, [home[a] for a in axes], [grid[a] for a in axes])
        if size is None:
            raise InputError(
                f"{self.name}: made for {own} where the model has {tuple(home)}: no stage of it has so many."
                " Give the grid, or image size, that the weights are for"
            )
        return self.on(size)

    def read(self, tensor: Tensor, new: "Table", recipe: str | Recipe | None = None) -> Tensor:
        """Its numbers, as those of `new`: in float32, rounded once; the very same tensor if the grid stays."""
        own, grid = self._known_grid(), new._known_grid()
        if own == grid:
            return tensor
        places, rest = self._split(exact(tensor))
        size = cast("tuple[int, int]", _places(self.kind, grid))
        if self.kind == "kernel":
            places = resample_kernel(places, size)
        elif self.kind == "distance":
            places = _mirrored_read(places, size, self.recipe_for(recipe))
        else:
            places = self.recipe_for(recipe).read(places, size)
        return self._join(places, rest, new.shape).to(tensor.dtype)

    def recipe_for(self, asked: str | Recipe | None) -> Recipe:
        """What is asked for, where it makes sense: the geometric one for offsets, those of models for places."""
        own = recipe_of(self.recipe)
        asked = own if asked is None else recipe_of(asked)
        plain = asked == Recipe(asked.mode)
        fits = {"absolute": asked.mode != "geometric", "bias": plain, "distance": plain}
        return asked if fits.get(self.kind, False) else own

    def _known_grid(self) -> tuple[int, ...]:
        if self.grid is None:
            raise InputError(
                f"{self.name} {list(self.shape)}: its rows, less the prefix tokens', are no square, nor those"
                " of the grid that was given. Give the grid, or the image size, that the weights are for"
            )
        return self.grid

    def _split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Places as an image [height, width, channels], and the other rows [n, channels]."""
        axes = 1 if self.flat else 2
        rows = tensor.movedim(tuple(range(self.axis, self.axis + axes)), tuple(range(axes))).flatten(axes)
        size = _places(self.kind, self._known_grid())
        if not self.flat:
            return rows, rows.new_empty(0, rows.shape[-1])
        first = self.prefix if self.kind == "absolute" else 0
        count = math.prod(size)
        places, rest = rows[first : first + count], torch.cat([rows[:first], rows[first + count :]])
        return places.unflatten(0, size), rest

    def _join(self, places: Tensor, rest: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`_split` reversed, in a new shape."""
        rows = places
        if self.flat:
            rows = places.flatten(0, 1)
            rows = torch.cat([rest, rows] if self.kind == "absolute" else [rows, rest])
        axes = 1 if self.flat else 2
        others = (*shape[: self.axis], *shape[self.axis + axes :])
        rows = rows.unflatten(-1, others) if others else rows[..., 0]
        return rows.movedim(tuple(range(axes)), tuple(range(self.axis, self.axis + axes))).contiguous()


def _places(kind: Kind, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The size of the image that a table for a grid is."""
    if kind == "bias":
        return tuple(2 * n - 1 for n in grid)
    return (1, 2 * grid[0] - 1) if kind == "strip" else grid


def _mirrored_read(places: Tensor, size: tuple[int, int], recipe: Recipe) -> Tensor:
    """A table of distances [height, width, channels], read as one of offsets of both signs."""
    for axis in (0, 1):
        places = torch.cat([places.narrow(axis, 1, places.shape[axis] - 1).flip(axis), places], axis)
    height, width = size
    return recipe.read(places, (2 * height - 1, 2 * width - 1))[height - 1 :, width - 1 :]


@dataclass(frozen=True)
class Pattern:
    """How tables of one kind are named and laid out.

    Args:
        key: what the name ends with.
        axis: where the places are.
        follows: see `Table`; None: if it has rows for prefix tokens (BEiT), which a window has not (Swin).
    """

    key: str
    kind: Kind
    axis: int
    follows: bool | None = True
    recipe: str = "timm"
    flat: bool = True


PATTERNS = (
    Pattern(r"pos_embed_win(dow)?", "window", 2, follows=False, flat=False),  # Hiera; SAM 2
    Pattern(r"encoder\.pos_embedding", "absolute", 1, recipe="torchvision"),
    Pattern(r"(decoder_)?pos_embed\d?|pos_embed_\d|patch_pos", "absolute", 1),
    Pattern(r"position_embeddings?", "absolute", 1, recipe="bicubic"),  # transformers
    Pattern(r"visual\.positional_embedding|position_embedding\.weight", "absolute", 0, recipe="bicubic"),  # CLIP
    Pattern(r"rel_pos\.relative_position_bias_table", "bias", 0, recipe="geometric"),  # timm's own
    Pattern(r"(encoder|layer)\..*_bias\.relative_position_bias_table", "bias", 0, None, "bilinear"),
    Pattern(r"(self|features\.\d.*)\.relative_position_bias_table", "bias", 0, None, "bicubic"),
    Pattern(r"relative_position_bias_table", "bias", 0, None, "geometric"),  # Swin's, BEiT's, and timm's
    Pattern(r"attention_biases", "distance", 1),  # LeViT
    Pattern(r"rel_pos_[hw]", "strip", 0, recipe="bilinear"),  # SAM, MViTv2, ViTDet
    Pattern(r"pos_embed\.(height|width)_rel", "strip", 0, recipe="bilinear"),  # BoTNet
    Pattern(
        r"(patch_embed\.proj|patch_embeddings?\.projection|patch_embedding|conv_proj|visual\.conv1)\.weight",
        "kernel",
        2,
        follows=False,
        flat=False,
    ),
)
"""The first that fits says what a table is."""

NOT_OURS = re.compile(r"(^|\.)(text\w*|language\w*|encodings|levels)\.")
"""Parts of a name that say: a text's positions, an encoding's of ours, or a layout that is not known (NesT)."""

DERIVED = re.compile(
    r"(^|\.)(relative_position_index|relative_coords_table|relative_coordinates_log|rel_coords_log|attn_mask"
    r"|position_ids|attention_bias_idxs|rel_indices|rope\.(freqs_cos|freqs_sin|t_x|t_y|pos_embed|periods))$"
)
"""What old checkpoints hold although it follows from the sizes."""

PREFIX_TOKENS = re.compile(
    r"(cls_token(_\d)?|class_token|class_embedding|dist_token|distillation_token|reg_token|register_tokens)$"
)


ROW_WITHOUT_TOKEN = re.compile(r"(^|\.)(embeddings\.projection\.weight|backbone\.net\.pos_embed)$")
"""ViTDet: its table keeps a class token's row, and no class token (transformers, detectron2)."""

RECIPES_OF_OWNERS = {
    "DPTViTEmbeddings": "bilinear",
    "DPTViTHybridEmbeddings": "bilinear",
    "RfDetrDinov2Embeddings": "dinov2-reg",
}
"""Modules of transformers that read their table in another way than most."""


def tables_of(
    source: nn.Module | Mapping[str, Shaped], *, grid: tuple[int, int] | None = None, prefix: int | None = None
) -> tuple[Table, ...]:
    """The tables of a model, or of a state dict, in the order of its keys.

    Args:
        source: a model; or names and what has their shapes: tensors, also without memory.
        grid: the (height, width) in patches of the image that the weights are for, if it is known. Otherwise a
            flat table is taken for a square one, if its rows, less those of prefix tokens, have a root.
        prefix: how many prefix tokens have a row in tables of places, if the keys do not tell.
    """
    shapes = source.state_dict() if isinstance(source, nn.Module) else source
    owners = dict(source.named_modules()) if isinstance(source, nn.Module) else {}
    ours = {name for name, module in owners.items() if isinstance(module, PositionEncoding)}
    sizes = {
        name: tuple(shaped.shape)
        for name, shaped in shapes.items()
        if name.rpartition(".")[0] not in ours and hasattr(shaped, "shape")
    }
    prefixes = _prefixes(sizes) if prefix is None else (prefix,)
    return tuple(_found(sizes, owners, grid, prefixes))


def _found(
    sizes: Mapping[str, tuple[int, ...]],
    owners: Mapping[str, nn.Module],
    grid: tuple[int, int] | None,
    prefixes: Sequence[int],
) -> Iterator[Table]:
    features = next((s[0] for name, s in sizes.items() if len(s) == 4 and "patch" in name), None)
    tables = []
    for name, shape in sizes.items():
        pattern = next((p for p in PATTERNS if re.search(rf"(^|\.)({p.key})$", name)), None)
        if pattern is None or NOT_OURS.search(name):
            continue
        check_gathered(name, torch.empty(shape, device="meta"))
        if _official_dinov2(sizes) and pattern.kind == "absolute":
            recipe = "dinov2-reg" if any("register_tokens" in key for key in sizes) else "dinov2"
            pattern = replace(pattern, recipe=recipe)
        elif pattern.kind == "absolute" and any(key.endswith("embeddings.register_tokens") for key in sizes):
            pattern = replace(pattern, recipe="dinov2-reg")
        if recipe := RECIPES_OF_OWNERS.get(type(owners.get(name.rpartition(".")[0])).__name__):
            pattern = replace(pattern, recipe=recipe)
        tables.append(_table(name, shape, pattern, owners, grid, prefixes, features))
    home = grid or next((t.grid for t in tables if t.kind == "absolute"), None)
    for table in tables:
        yield _placed(table, home, owners)


def _official_dinov2(sizes: Mapping[str, tuple[int, ...]]) -> bool:
    return {"pos_embed", "mask_token", "cls_token"} <= sizes.keys() and any(".ls1.gamma" in key for key in sizes)


def _table(
    name: str,
    shape: tuple[int, ...],
    pattern: Pattern,
    owners: Mapping[str, nn.Module],
    grid: tuple[int, int] | None,
    prefixes: Sequence[int],
    features: int | None,
) -> Table:
    kind, axis = pattern.kind, pattern.axis
    flat = pattern.flat and len(shape) < (3 if kind == "bias" else 4)
    places: tuple[int, ...] | None
    prefix = 0
    if not flat:
        if kind == "absolute" and (shape[1] == features or shape[1] != shape[2] == shape[3]):
            axis = 2
        axis = 1 if kind == "bias" else axis
        places = shape[axis : axis + 2]
        places = tuple((n + 1) // 2 for n in places) if kind == "bias" else places
    elif kind == "strip":
        places = ((shape[0] + 1) // 2,)
    elif kind == "absolute":
        staged = (
            name[-1].isdigit() and grid is not None and grid[0] == grid[1]
        )  # pos_embed_1: a square, of its own
        places, prefix = _count(shape[axis], prefixes, None if staged else grid)
    else:
        places, prefix = _window(kind, shape[axis], _attribute(owners, name))
    follows = bool(prefix) if pattern.follows is None else pattern.follows
    heads = {"bias": shape[0 if axis else -1], "distance": shape[0]}.get(kind)
    return Table(name, kind, shape, places, follows, prefix, axis, flat, pattern.recipe, heads)


def _placed(table: Table, home: tuple[int, ...] | None, owners: Mapping[str, nn.Module]) -> Table:
    """What only the other tables tell: strips of a model without stages follow if they are as long as its grid."""
    if table.kind != "strip" or "stages." in table.name:
        return table
    block = owners.get(table.name.rpartition(".")[0].rpartition(".")[0])
    if block is not None and hasattr(block, "window_size"):
        return replace(table, follows=not block.window_size)
    return replace(table, follows=home is not None and table.grid == (home[_strip_axis(table.name)],))


def _strip_axis(name: str) -> int:
    """0 for rows, rel_pos_h and height_rel; 1 for columns."""
    return int(name.rpartition(".")[2] in ("rel_pos_w", "width_rel"))


def _attribute(owners: Mapping[str, nn.Module], name: str) -> tuple[int, ...] | None:
    """The window of the module that holds a table, if it says so."""
    owner = owners.get(name.rpartition(".")[0])
    for attribute in ("window_size", "resolution"):
        found = getattr(owner, attribute, None)
        if isinstance(found, Sequence) and len(found) == 2:
            return tuple(int(n) for n in found)
    return None


def _window(kind: Kind, rows: int, told: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, int]:
    """The window of a table of offsets, or of distances, and how many rows are for prefix tokens: BEiT has 3."""
    if told is not None:
        extra = rows - math.prod(_places(kind, told))
        if extra in (0, 3):
            return told, extra
    places, extra = _count(rows, (0, 3) if kind == "bias" else (0,), None)
    if places is None:
        return None, 0
    return (tuple((n + 1) // 2 for n in places) if kind == "bias" else places), extra


def _prefixes(sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """How many rows of a table may be prefix tokens': none, or those of one, of some or of all there are."""
    if any(ROW_WITHOUT_TOKEN.search(name) for name in sizes):
        return (1,)
    tokens = {
        name: shape for name, shape in sizes.items() if PREFIX_TOKENS.search(name) and not NOT_OURS.search(name)
    }
    registers = sum(shape[-2] for name, shape in tokens.items() if "reg" in name.rpartition(".")[2])
    others = {name.rpartition(".")[2] for name in tokens if "reg" not in name.rpartition(".")[2]}
    return tuple(sorted({0, registers, len(others), len(others) + registers, min(1, len(others))}))


def _count(rows: int, prefixes: Sequence[int], grid: tuple[int, int] | None) -> tuple[tuple[int, ...] | None, int]:
    """(height, width) and the rows of prefix tokens."""
    if grid is not None and rows - math.prod(grid) in prefixes:
        return grid, rows - math.prod(grid)
    squares = [(math.isqrt(rows - p), p) for p in prefixes if rows > p and math.isqrt(rows - p) ** 2 == rows - p]
    return ((squares[0][0],) * 2, squares[0][1]) if len(squares) == 1 and grid is None else (None, 0)
