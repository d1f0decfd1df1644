"""Give a model another encoding that starts from what the model has learned."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from whereformer.adapters.behaviours import EquippedAttention, EquippedModel, held
from whereformer.adapters.describe import equipped
from whereformer.adapters.equip import equip, unequip
from whereformer.adapters.find import refuse_wrapped
from whereformer.adapters.seats import Blocks, Encoding
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
    target: Encodings | Encoding | Mapping[Blocks, Encoding],
    *,
    grid: Grid | None = None,
    images: Tensor | None = None,
) -> Translation | ModelTranslation:
    """Start one encoding from another, so that what it says, or the model it is for, stays as it can.

    Of encodings: `whereformer.translation.translate(source, target, grid=grid)`. Of a model: as
    `whereformer.equip(model, target)`, with encodings that start from the model's own positions, see `start_from`;
    if it is equipped, from those of its encodings, which go.

    Args:
        source: an encoding, or several; or a timm `VisionTransformer`, which is changed in place.
        target: an encoding, or several; or, for a model, what `equip` takes.
        grid: of encodings: where they are compared.
        images: of a model: [batch, 3, height, width], as the model gets them. A few are enough for biases, more
            are better for what depends on content.

    Returns:
        what was lost; `print` it.

    Raises:
        InputError: what `equip` raises, or a model that is no `VisionTransformer`, or encodings that have nothing
            in common. Then nothing was changed.
    """
    if not isinstance(source, nn.Module) or isinstance(source, PositionEncoding):
        return translate_encodings(source, cast("Encodings", target), grid=grid)
    if grid is not None:
        raise InputError(f"translate: grid={grid}, expected none: a model knows its own")
    _refuse_others(source)
    wanted = cast("Encoding | Mapping[Blocks, Encoding]", target)
    student = _equipped_anew(copy.deepcopy(source), wanted)
    found = start_from(student, source, images)
    _equipped_anew(source, wanted).load_state_dict(student.state_dict())
    return found


def start_from(model: nn.Module, other: nn.Module, images: Tensor | None) -> ModelTranslation:
    """Start a model's encodings from what another of the same architecture does with some images.

    Encodings of tokens before the first block start from what the other adds there, by
    `whereformer.translation.translate`. Then, block after block, on what the blocks before them now make of the
    images, those in attention are fitted: first biases and rotations, such that logits are as near as they can to
    the other's, but for what is the same for all keys of a query; then what is said to values, such that the
    outputs are. Least squares both.

    Args:
        model: a timm `VisionTransformer`, equipped; the parameters of its encodings are changed in place.
        other: equipped or not; with attentions of the same names.
        images: [batch, 3, height, width]; None if no encoding speaks in attention.

    Raises:
        InputError: a model is of another kind, or not equipped; attentions or images are missing, or
            encodings have nothing in common.
    """
    student = equipped(model, "start_from")
    _refuse_others(model, other)
    seats = [(n, m) for n, m in _attentions(student) if isinstance(m, EquippedAttention) and any(m.inside())]
    others = dict(_attentions(other))
    if missing := [name for name, _ in seats if name not in others]:
        raise InputError(f"translate: {missing[0]} has no counterpart in the {type(other).__name__} to start from")
    if images is None and seats:
        raise InputError(
            f"translate: {seats[0][0]} has encodings that speak in attention, and what a table of tokens is to"
            " logits depends on images: expected images=[batch, 3, height, width]"
        )
    if images is not None and not (isinstance(images, Tensor) and images.ndim == 4):
        raise InputError(f"translate: images={images!r}, expected a tensor [batch, 3, height, width]")
    tokens = _start_tokens(student, other)
    if images is None:
        return ModelTranslation(tokens, (), None, None)
    modes = {module: module.training for module in (*model.modules(), *other.modules())}
    model.eval()
    other.eval()
    try:
        with torch.no_grad():
            start = model(images)
            seen = _Seen(student)
            with _before([(others[name], partial(seen.look, name)) for name, _ in seats]):
                wanted = other(images)
            with _before([(module, partial(seen.start, name)) for name, module in seats]):
                model(images)
            now = model(images)
    finally:
        for module, mode in modes.items():
            module.training = mode
    apart = [float((x - wanted).norm() / wanted.norm()) for x in (start, now)]
    return ModelTranslation(tokens, tuple(seen.found), *apart)


class _Seen:
    """What attentions are given, and what becomes of those that start from it: hooks before their forwards."""

    def __init__(self, model: EquippedModel) -> None:
        self.grid = cast(Grid, model.place.grid)
        self.seen: dict[str, Seen] = {}
        self.found: list[tuple[str, tuple[Part, ...]]] = []

    def look(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.seen[name] = self._given(module, *inputs)

    def start(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.found.append((name, start_from_seen(self.seen.pop(name), self._given(module, *inputs))))

    def _given(self, module: Any, x: Tensor) -> Seen:
        """What timm's `Attention` makes of its input."""
        qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
        q, k, v = module.q_norm(qkv[0]), module.k_norm(qkv[1]), qkv[2]
        inside = module.inside() if isinstance(module, EquippedAttention) else ()
        return Seen(q, k, v, self.grid, tuple(inside))


@contextmanager
def _before(hooks: Sequence[tuple[nn.Module, Callable[..., None]]]) -> Iterator[None]:
    """Call functions before modules, inside."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _equipped_anew(model: nn.Module, wanted: Encoding | Mapping[Blocks, Encoding]) -> nn.Module:
    return equip(unequip(model) if isinstance(model, EquippedModel) else model, wanted)


def _refuse_others(*models: nn.Module) -> None:
    """Raise unless these are such that their tables and attentions are known."""
    for model in models:
        refuse_wrapped(model, "translate")
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
        if "timm.models.vision_transformer.VisionTransformer" not in kinds:
            raise InputError(
                f"translate: {type(model).__name__}, expected a timm VisionTransformer; of other models, translate"
                " the encodings: translate(source_encoding, target_encoding)"
            )


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    from timm.layers.attention import Attention

    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield name, module
        elif isinstance(module, EquippedAttention) and any(module.inside()):
            raise InputError(
                f"translate: encodings speak in {name}, a {type(module).__name__}, expected timm's Attention"
            )


def _start_tokens(model: EquippedModel, other: nn.Module) -> Translation | None:
    """Before the first block; unless one of the two says nothing there, or the model kept its table."""
    table, own = (cast("Tensor | None", getattr(m, "pos_embed", None)) for m in (other, model))
    targets = _first(model)
    sources = _first(other) if isinstance(other, EquippedModel) else []
    if table is not None and targets:
        sources.append(_learned(table[0], targets[0]))
    if not targets or not sources or own is not None:
        return None
    return translate_encodings(sources, targets, grid=model.home_grid)


def _first(model: EquippedModel) -> list[PositionEncoding]:
    return [encoding for encoding in held(model) if "tokens" in encoding.moments()]


def _learned(table: Tensor, like: PositionEncoding) -> Learned:
    found = Learned(like.dim, like.num_heads, like.grid, prefix_rows=table.shape[0] > like.grid.patches)
    found.to(table.device, table.dtype).start_from(table.detach())
    return found
