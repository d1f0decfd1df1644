"""Timm's names among themselves: buffers that follow from the rest, and one thing under two names."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from whereformer.adapters.files import Entries
from whereformer.adapters.layouts.rules import Change, Drop, Rule, Shape, joined, split
from whereformer.errors import InputError

DERIVED = (
    *("*relative_position_index", "*relative_coords_table", "*attn_mask", "*.relative_coords"),
    *("*freqs_cos", "*freqs_sin", "*freqs_t_x", "*freqs_t_y", "*rope_t_x", "*rope_t_y", "*freqs_cis"),
    "whereformer.adapters.from_pretrained",  # a mark that transformers' files of equipped models bear
    *("*rope_embed.periods", "*rope.periods", "*inv_freq", "*.bias_mask", "*attention_bias_idxs", "*.rp_bucket"),
)
"""Buffers that follow from sizes: older code saved them, and at another size they do not fit."""


def derived(entries: Entries, wanted: Collection[str] = ()) -> list[Drop]:
    """A rule for each derived buffer that nobody asks for."""
    why = "follows from the size"
    return [
        Drop(name, why)
        for name in entries
        if name not in wanted and any(fnmatchcase(name, pattern) for pattern in DERIVED)
    ]


def qkv_bias(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """The bias of queries, none of keys, and that of values, in one."""
    q, v = tensors
    return [torch.cat([q, torch.zeros_like(q), v])]


def of_a_still(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """A kernel over frames, summed: what it does to a still image."""
    return [tensors[0].sum(2)]


def copies(count: int) -> Change:
    """The same for each of so many."""
    return lambda tensors, shapes: [tensors[0]] * count


def the_same(tensors: Sequence[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
    """The way back: one of several that must be equal."""
    if not tensors[0].is_meta and any(not torch.equal(tensors[0], other) for other in tensors[1:]):
        raise InputError("the blocks' tables differ, so they cannot be one table for all")
    return [tensors[0]]


SYNONYMS = (
    Rule("blocks.{n}.gamma_{m}", "blocks.{n}.ls{m}.gamma"),
    Rule("head.{rest}", "head.fc.{rest}"),
    *(
        Rule(tuple(f"{{rest}}.{side}_proj.{kind}" for side in "qkv"), f"{{rest}}.qkv.{kind}", joined, split(3))
        for kind in ("weight", "bias")
    ),
    Rule(("{rest}.q_bias", "{rest}.v_bias"), "{rest}.qkv.bias", qkv_bias),
    Rule(("{rest}.mlp.fc1_g.weight", "{rest}.mlp.fc1_x.weight"), "{rest}.mlp.fc1.weight", joined, split(2)),
    Rule(("{rest}.mlp.fc1_g.bias", "{rest}.mlp.fc1_x.bias"), "{rest}.mlp.fc1.bias", joined, split(2)),
)
"""What timm's models call differently although it is the same."""


def synonyms(entries: Entries, wanted: Mapping[str, Shape]) -> Iterator[Rule]:
    """Rules that may lead from these names to those of a model."""
    for rule in SYNONYMS:
        yield rule
        if back := rule.reversed():
            yield back
    kernel = entries.get("patch_embed.proj.weight")
    if kernel is not None and len(kernel.shape) == 5 and len(wanted.get("patch_embed.proj.weight", ())) == 4:
        yield Rule("patch_embed.proj.weight", "patch_embed.proj.weight", of_a_still)
    table = "relative_position_bias_table"
    tables = [name for name in wanted if re.fullmatch(rf"blocks\.\d+\.attn\.{table}", name)]
    if tables:
        yield Rule(f"rel_pos_bias.{table}", tuple(tables), copies(len(tables)), the_same)
    yield from _resnet(wanted)


def _resnet(wanted: Collection[str]) -> Iterator[Rule]:
    """torchvision's and timm's names of a ResNet, and transformers'."""
    theirs, ours = "model.backbone.model.", "model.backbone.model.encoder.stages.{s-1}.layers.{b}."
    if not any(name.startswith("model.backbone.model.encoder.") for name in wanted):
        return
    stem = "model.backbone.model.embedder.embedder."
    yield Rule(f"{theirs}conv1.{{rest}}", f"{stem}convolution.{{rest}}")
    yield Rule(f"{theirs}bn1.{{rest}}", f"{stem}normalization.{{rest}}")
    block = f"{theirs}layer{{s}}.{{b}}."
    yield Rule(f"{block}conv{{k}}.{{rest}}", f"{ours}layer.{{k-1}}.convolution.{{rest}}")
    yield Rule(f"{block}bn{{k}}.{{rest}}", f"{ours}layer.{{k-1}}.normalization.{{rest}}")
    yield Rule(f"{block}downsample.0.{{rest}}", f"{ours}shortcut.convolution.{{rest}}")
    yield Rule(f"{block}downsample.1.{{rest}}", f"{ours}shortcut.normalization.{{rest}}")
