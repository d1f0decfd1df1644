"""The position parameters of models, and those of our encodings in their place."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from whereformer.adapters.layouts.rules import Change, Rule, Shape, each
from whereformer.encoding import PositionEncoding
from whereformer.encodings import IRPE, PEG, BEiT, Decomposed, Learned, LogCPB, RoPEMixed, Swin


def encoding_rules(model: nn.Module) -> Iterator[Rule]:
    """From what a model of this kind calls its positions to the encodings that `equip` gave this one.

    `equip` puts them beside what they stand for: `blocks.0.attn.encodings.0` has the place of the bias in
    `blocks.0.attn`.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, PositionEncoding)}
    mixed = [n for n, module in found.items() if isinstance(module, RoPEMixed) and n.startswith("blocks.")]
    for where, module in found.items():
        beside = where.rpartition("encodings.")[0]
        if isinstance(module, IRPE):
            yield from _irpe(beside, where, module)
        elif isinstance(module, Learned) and getattr(model, "pos_embed", None) is None:
            yield Rule("pos_embed", f"{where}.table", each(_row_by_row), each(lambda table: table[None]))
        elif isinstance(module, Swin | BEiT):
            yield from _tables(beside, where, module)
        elif isinstance(module, Decomposed):
            yield Rule(f"{beside}rel_pos_h", f"{where}.rows")
            yield Rule(f"{beside}rel_pos_w", f"{where}.columns")
        elif isinstance(module, LogCPB):
            for theirs, ours in (("0.weight", "w1"), ("0.bias", "b1"), ("2.weight", "w2")):
                yield Rule(f"{beside}cpb_mlp.{theirs}", f"{where}.{ours}")
        elif isinstance(module, RoPEMixed) and where not in mixed:
            yield Rule(f"{beside}rope_freqs", f"{where}.frequencies")
        elif isinstance(module, PEG):
            yield from _peg(where)
    if mixed:
        names = tuple(f"{where}.frequencies" for where in mixed)
        yield Rule("rope.freqs", names, _by_block, _of_all_blocks)
    shared = "rel_pos_bias.relative_position_bias_table"
    biases = [(name, module) for name, module in found.items() if isinstance(module, BEiT)]
    if biases and biases[0][1].prefix is not None:
        names = [f"{name}.{part}" for name, _ in biases for part in ("table", "prefix")]
        yield Rule(shared, tuple(names), _repeated(biases[0][1].grid.size, len(biases)))


def _irpe(beside: str, where: str, module: IRPE) -> Iterator[Rule]:
    kind = "bias" if module.mode == "bias" else "weight"
    parts = {"": "", "_rows": "rp_rows.", "_columns": "rp_cols."}
    for side in module.on:
        for part in module.mappings:
            yield Rule(f"{beside}rpe_{side}.{parts[part]}lookup_table_{kind}", f"{where}.tables.{side}{part}")


def _peg(where: str) -> Iterator[Rule]:
    """Twins: the PEG before the second block of stage n."""
    stage, _, rest = where.removeprefix("blocks.").partition(".")
    if where.startswith("blocks.") and rest.startswith("1.encodings."):
        yield Rule(f"pos_block.{stage}.proj.0.weight", f"{where}.weight")
        yield Rule(f"pos_block.{stage}.proj.0.bias", f"{where}.bias")


def _tables(beside: str, where: str, module: Swin | BEiT) -> Iterator[Rule]:
    name = f"{beside}relative_position_bias_table"
    if isinstance(module, BEiT) and module.prefix is not None:
        new = (f"{where}.table", f"{where}.prefix")
        yield Rule(name, new, _by_offset(module.grid.size, 3), _by_row)
    else:
        yield Rule(name, f"{where}.table", _by_offset(module.grid.size, 0), _by_row)


def _by_offset(size: tuple[int, ...], extra: int) -> Change:
    """[(2H − 1) (2W − 1) + extra, heads] to [heads, 2H − 1, 2W − 1], and [heads, extra]."""

    def change(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
        table = tensors[0].mT
        offsets = table[:, : table.shape[1] - extra].unflatten(1, [2 * n - 1 for n in size])
        return [offsets, table[:, table.shape[1] - extra :]] if extra else [offsets]

    return change


def _by_row(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    return [torch.cat([tensors[0].flatten(1), *tensors[1:]], 1).mT]


def _repeated(size: tuple[int, ...], count: int) -> Change:
    apart = _by_offset(size, 3)
    return lambda tensors, shapes: list(apart(tensors, shapes)) * count


def _row_by_row(table: Tensor) -> Tensor:
    """[1, rows, d], or [1, H, W, d], to [rows, d]."""
    return table.flatten(0, -2) if table.ndim > 2 else table


def _by_block(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """[2, blocks, heads, d/2], or with heads and pairs in one axis, to as many [2, heads, d/2]."""
    freqs = tensors[0]
    if shapes[0] is not None:
        freqs = freqs.reshape(2, freqs.shape[1], *shapes[0][1:])
    return list(freqs.unbind(1))


def _of_all_blocks(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    return [torch.stack(list(tensors), 1)]
