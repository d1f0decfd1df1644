"""Give a model another encoding that starts from what the model has learned."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from whereformer.adapters.describe import home_of
from whereformer.adapters.equip import equip
from whereformer.catalog import Factory
from whereformer.encoding import PositionEncoding
from whereformer.encodings import Learned
from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.translation import Part, Translation
from whereformer.translation import translate as translate_encodings
from whereformer.translation.measured import Seen, start_from_seen
from whereformer.translation.translate import Encodings


@dataclass(frozen=True)
class ModelTranslation:
    """What became of a model's positions; `print` it.

    Args:
        tokens: of what was added to tokens, if both models add something there.
        attentions: of each attention that has encodings: its name, and how far its logits and its outputs are from
            the first model's, without encodings and as they start now.
        start, now: how far the model's outputs are from the first model's, relative to these: with encodings as
            they came, and as they start now; None without images.
    """

    tokens: Translation | None
    attentions: tuple[tuple[str, tuple[Part, ...]], ...]
    start: float | None
    now: float | None

    def __str__(self) -> str:
        lines = []
        if self.start is not None and self.now is not None:
            now, start = 100 * self.now, 100 * self.start
            lines.append(f"outputs differ by {now:.3g} %; with encodings as they came, by {start:.3g} %")
        lines += [] if self.tokens is None else [str(self.tokens)]
        for name, parts in self.attentions:
            left = ", ".join(f"{100 * part.share:.3g} % of that of {part.name}" for part in parts)
            lines.append(f"  {name}: left of the difference without encodings: {left}")
        return "\n".join(lines)


def translate(
    source: Encodings | nn.Module,
    target: Encodings | str | Factory | Sequence[Factory],
    *,
    grid: Grid | None = None,
    images: Tensor | None = None,
) -> Translation | ModelTranslation:
    """Start one encoding from another, so that what it says, or the model it is for, stays as it can.

    Of encodings: `whereformer.translation.translate(source, target, grid=grid)`. Of a model: as
    `whereformer.equip(model, target)`, with encodings that start from the model's own positions, see `start_from`.

    Args:
        source: an encoding, or several; or a timm `VisionTransformer`, which is changed in place.
        target: an encoding, or several; or, for a model, what `equip` takes.
        grid: of encodings: where they are compared.
        images: of a model: [batch, 3, height, width], as the model gets them, of its home size. A few are enough
            for biases, more are better for what depends on content.

    Returns:
        what was lost; `print` it.

    Raises:
        InputError: what `equip` raises, or encodings that have nothing in common. Then nothing was changed.
    """
    if not isinstance(source, nn.Module) or isinstance(source, PositionEncoding):
        return translate_encodings(source, cast("Encodings", target), grid=grid)
    if grid is not None:
        raise InputError(f"translate: grid={grid}, expected none: a model is on its home grid")
    wanted = cast("str | Factory | Sequence[Factory]", target)
    student = equip(copy.deepcopy(source), wanted)
    found = start_from(student, source, images)
    equip(source, wanted).load_state_dict(student.state_dict())
    return found


def start_from(model: nn.Module, other: nn.Module, images: Tensor | None) -> ModelTranslation:
    """Start a model's encodings from what another of the same architecture does with some images.

    Encodings of tokens start from the other's table, by `whereformer.translation.translate`. Then, block after
    block, on what the blocks before them now make of the images, those in attention are fitted: first biases and
    rotations, such that logits are as near as they can to the other's, but for what is the same for all keys of a
    query; then what is said to values, such that the outputs are. Least squares both.

    Args:
        model: equipped; the parameters of its encodings are changed in place.
        other: equipped or not; with attentions of the same names.
        images: [batch, 3, height, width].
    """
    from timm.layers.attention import Attention

    seats = _seats(model, Attention)
    others = dict(_seats(other, Attention, equipped=False))
    if missing := [name for name, _ in seats if name not in others]:
        raise InputError(f"translate: {missing[0]} has no counterpart in the {type(other).__name__} to start from")
    if images is None and seats:
        raise InputError(
            f"translate: {seats[0][0]} has encodings that speak in attention, and what a table of tokens is to"
            " logits depends on images: expected images=[batch, 3, height, width]"
        )
    table = getattr(other, "pos_embed", None)
    held = cast("Sequence[PositionEncoding]", model.encodings)
    encodings = [encoding for encoding in held if "tokens" in encoding.moments()]
    tokens = None
    if table is not None and encodings and getattr(model, "pos_embed", None) is None:
        tokens = translate_encodings(_learned(table[0], encodings[0]), encodings, grid=home_of(model, "translate"))
    if images is None:
        return ModelTranslation(tokens, (), None, None)
    grid, found = home_of(model, "translate"), []
    modes = {module: module.training for module in (*model.modules(), *other.modules())}
    model.eval()
    other.eval()
    hooks = []
    try:
        with torch.no_grad():
            start = model(images)
            seen: dict[str, Seen] = {}
            for name, _ in seats:
                hooks.append(others[name].register_forward_pre_hook(partial(_look, seen, name, grid)))
            wanted = other(images)
            for name, module in seats:
                hooks.append(module.register_forward_pre_hook(partial(_start, seen, name, grid, found)))
            model(images)
            for hook in hooks:
                hook.remove()
            now = model(images)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    apart = [float((x - wanted).norm() / wanted.norm()) for x in (start, now)]
    return ModelTranslation(tokens, tuple(found), *apart)


def _seats(model: nn.Module, kind: type[nn.Module], equipped: bool = True) -> list[tuple[str, nn.Module]]:
    """The attentions, or those alone that hold encodings."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kind) and not (equipped and not hasattr(module, "encodings"))
    ]


def _learned(table: Tensor, like: PositionEncoding) -> Learned:
    found = Learned(like.dim, like.num_heads, like.grid, prefix_rows=table.shape[0] > like.grid.patches)
    found.to(table.device, table.dtype).start_from(table.detach())
    return found


def _qkv(module: Any, x: Tensor, grid: Grid) -> Seen:
    """What timm's `Attention` makes of its input."""
    qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    return Seen(module.q_norm(q), module.k_norm(k), v, grid, tuple(getattr(module, "encodings", ())))


def _look(seen: dict[str, Seen], name: str, grid: Grid, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    seen[name] = _qkv(module, inputs[0], grid)


def _start(
    seen: dict[str, Seen],
    name: str,
    grid: Grid,
    found: list[tuple[str, tuple[Part, ...]]],
    module: nn.Module,
    inputs: tuple[Any, ...],
) -> None:
    found.append((name, start_from_seen(seen.pop(name), _qkv(module, inputs[0], grid))))
