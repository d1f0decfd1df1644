"""Content-dependent relative encodings: against their papers pair by pair, against timm, transformers and others.

`data/contextual/reference.safetensors` holds values computed in float64 by the code of the papers or by well-known
code, `out` and the gradients of `(out * cotangent).sum()`:

- transformer_xl: kimiyoung/transformer-xl, pytorch, RelPartialLearnableMultiHeadAttn, without and with memory.
- shaw: OpenNMT-py 1.2.0, relative_matmul on keys and on values.
- relative_key (Shaw on keys), relative_key_query (Huang, method 4): BERT of transformers 4.44.2.
- sasa: skmhrk1209/Stand-Alone-Self-Attention, the patches whose windows do not leave the image.
- axial: csrhddlam/axial-deeplab, AxialAttention, with random statistics, training and not.
"""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers import bottleneck_attn, halo_attn
from timm.models.mvitv2 import cal_rel_pos_type
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loops import attend, close, leaf, places, same_gradients
from whereformer import (
    BucketBias,
    Buckets,
    Grid,
    InputError,
    LowRankBias,
    Points,
    PositionEncoding,
    Scores,
    attention,
    parse,
)
from whereformer.encodings import (
    SASA,
    AxialDeepLab,
    BoTNet,
    Decomposed,
    Huang,
    Shaw,
    TransformerXL,
    ViTRelative,
)
from whereformer.index import Clip, Separable
from whereformer.lab.cost import costs
from whereformer.layers import AxialAttention

VALUES = load_file(Path(__file__).parent / "data/contextual/reference.safetensors")
HEADS, HEAD_DIM, BATCH = 2, 4, 2
SCALE = HEAD_DIM**-0.5

FLOAT32 = 64 * 2**29
"""Roundings of float64 that are 64 of float32, where one side rounds to it: the weights of interpolation between
up to 60 rows, and some peers' logits."""

Term = Callable[[int, int], Tensor | float]


def values(case: str) -> dict[str, Tensor]:
    return {name.removeprefix(case + "/"): t for name, t in VALUES.items() if name.startswith(case + "/")}


def randomized(encoding: Any) -> Any:
    for parameter in encoding.double().parameters():
        torch.nn.init.normal_(parameter)
    return encoding


def build(text: str, home: Grid) -> Any:
    (factory,) = parse(text)
    return randomized(factory(HEADS * HEAD_DIM, HEADS, home))


def inputs(queries: Grid, keys: Grid) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (leaf(BATCH, HEADS, grid.tokens, HEAD_DIM) for grid in (queries, keys, keys))
    return q, k, v


def said(encoding: PositionEncoding, q: Tensor, queries: Grid, keys: Grid | None = None) -> Tensor:
    """All its biases for queries q, not yet scaled, and keys of zeros."""
    keys = keys or queries
    zeros = torch.zeros(*q.shape[:2], keys.tokens, q.shape[-1], dtype=q.dtype)
    biases = encoding.biases(q, zeros, queries, keys)
    return torch.stack([bias.dense().expand(*q.shape[:-1], keys.tokens) for bias in biases]).sum(0)


# ---------------------------------------------------------------------------------------------------------------
# The papers, pair by pair. Each gives bias(i, j) and value(i, j).


def clip(x: int, k: int) -> int:
    return max(-k, min(k, x))


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


class Pairs:
    """Where the tokens of two grids are."""

    def __init__(self, queries: Grid, keys: Grid) -> None:
        self.queries, self.keys = queries, keys
        self.at, self.to = places(queries), places(keys)

    def numbers(self, i: int, j: int) -> tuple[int, int] | None:
        query, key = self.at[i], self.to[j]
        if query is None or key is None:
            return None
        return query[0] * self.queries.width + query[1], key[0] * self.keys.width + key[1]

    def offset(self, i: int, j: int) -> tuple[int, int] | None:
        """Query − key."""
        query, key = self.at[i], self.to[j]
        return None if query is None or key is None else (query[0] - key[0], query[1] - key[1])

    def clipped(self, i: int, j: int, e: Shaw | Huang, sign: int) -> int:
        """The row of a table of clipped offsets, sign · (query − key); −1, the last, for prefix tokens."""
        if e.offsets == "raster":
            numbers = self.numbers(i, j)
            return -1 if numbers is None else clip(sign * (numbers[0] - numbers[1]), e.clip) + e.clip
        offset = self.offset(i, j)
        if offset is None:
            return -1
        dy, dx = (clip(sign * o, e.clip) + e.clip for o in offset)
        return dy * (2 * e.clip + 1) + dx


def paper(e: Any, q: Tensor, k: Tensor, pairs: Pairs) -> tuple[Term, Term]:
    def nothing(i: int, j: int) -> float:
        return 0.0

    match e:
        case ViTRelative():

            def bias(i: int, j: int) -> Tensor | float:
                numbers = pairs.numbers(i, j)
                if numbers is None:
                    return 0.0
                return dot(q[:, :, i], e.table[numbers[0] - numbers[1] + len(e.table) // 2]) * SCALE

            return bias, nothing
        case Shaw():

            def on(side: str) -> Callable[[int, int], Tensor]:
                return lambda i, j: e.tables[side][:, pairs.clipped(i, j, e, -1)]

            keys, vals = ("k" in e.on and on("k")), ("v" in e.on and on("v"))
            return (lambda i, j: dot(q[:, :, i], keys(i, j)) * SCALE) if keys else nothing, vals or nothing
        case Huang():
            return (lambda i, j: huang(e, q[:, :, i], k[:, :, j], pairs, i, j) * SCALE), nothing
        case TransformerXL():
            return (lambda i, j: transformer_xl(e, q[:, :, i], k[:, :, j], pairs, i, j) * SCALE), nothing
        case SASA():

            def bias(i: int, j: int) -> Tensor | float:
                offset, logit = pairs.offset(i, j), 0.0
                if offset is not None:
                    row, column = (
                        table[min(max(len(table) // 2 - o, 0), len(table) - 1)]
                        for o, table in zip(offset, (e.rows, e.columns), strict=True)
                    )
                    logit = dot(q[:, :, i], torch.cat([row, column]))
                content = dot(q[:, :, i], k[:, :, j])
                return logit * SCALE if e.scaled else logit + content - content * SCALE

            return bias, nothing
        case BoTNet():

            def bias(i: int, j: int) -> Tensor | float:
                offset = pairs.offset(i, j)
                if offset is None:
                    return 0.0
                row, column = (t[len(t) // 2 - o] for o, t in zip(offset, (e.rows, e.columns), strict=True))
                return dot(q[:, :, i], row + column) * (SCALE if e.scaled else 1)

            return bias, nothing
        case Decomposed():

            def bias(i: int, j: int) -> Tensor | float:
                query, key = pairs.at[i], pairs.to[j]
                if query is None or key is None:
                    return 0.0
                sizes = zip(query, key, pairs.queries.size, pairs.keys.size, strict=True)
                row, column = (
                    a * max(Fraction(m, n), 1) - b * max(Fraction(n, m), 1) + (m - 1) * max(Fraction(n, m), 1)
                    for a, b, n, m in sizes
                )
                r = e.rows[int(row)] + e.columns[int(column)]
                return dot(q[:, :, i], r) * (SCALE if e.scaled else 1)

            return bias, nothing
        case AxialDeepLab():
            axis = ("height", "width").index(e.axis)
            tables = e.relative.unflatten(0, (3, HEAD_DIM))
            middle = e.relative.shape[1] // 2

            def bias(i: int, j: int) -> Tensor | float:
                offset = pairs.offset(i, j)
                if offset is None:
                    return 0.0
                r_q, r_k = tables[0, :, middle + offset[axis]], tables[1, :, middle - offset[axis]]
                return (dot(q[:, :, i], r_q) + dot(k[:, :, j], r_k)) * SCALE

            def value(i: int, j: int) -> Tensor | float:
                offset = pairs.offset(i, j)
                return 0.0 if offset is None else tables[2, :, middle + offset[axis]]

            return bias, value
    raise AssertionError(e)


def huang(e: Huang, q: Tensor, k: Tensor, pairs: Pairs, i: int, j: int) -> Tensor:
    """What is added to q_i·k_j."""
    row = pairs.clipped(i, j, e, 1)
    if e.method == 1 and row >= 0:
        if e.offsets == "raster":
            row = abs(row - e.clip)
        else:
            dy, dx = (abs(o - e.clip) for o in divmod(row, 2 * e.clip + 1))
            row = dy * (e.clip + 1) + dx
    a = e.table[:, row]
    match e.method:
        case 1 | 2:
            return dot(q, k) * a - dot(q, k)
        case 3:
            return (q * k * a).sum(-1) - dot(q, k)
        case _:
            return dot(q + a, k + a) - dot(a, a) - dot(q, k)


def transformer_xl(e: TransformerXL, q: Tensor, k: Tensor, pairs: Pairs, i: int, j: int) -> Tensor:
    """What is added to q_i·k_j."""
    bias = dot(e.u, k)
    numbers, offset = pairs.numbers(i, j), pairs.offset(i, j)
    if numbers is None or offset is None:
        return bias
    along = offset if e.offsets == "product" else (numbers[0] - numbers[1],)
    channels = e.weight.shape[1] // len(along)
    waves: list[float] = []
    for x in along:
        x = x if e.clip is None else clip(x, e.clip)
        angles = [x / e.temperature ** (2 * c / channels) for c in range(channels // 2)]
        waves += [*map(math.sin, angles), *map(math.cos, angles)]
    r = torch.stack([sum(w * s for w, s in zip(row, waves, strict=True)) for row in e.weight])  # type: ignore[misc]
    return bias + dot(q + e.v, r.unflatten(0, (-1, HEAD_DIM)))


SPELLINGS = [
    "vit_relative",
    *("shaw", "shaw(on='k', clip=1)", "shaw(on='v', shared=False)", "shaw(offsets='raster', clip=4)"),
    *("transformer_xl", "transformer_xl(shared=True, clip=2)", "transformer_xl(offsets='raster', clip=4)"),
    "transformer_xl(offsets='raster', temperature=100.0)",
    *(f"huang(method={m}, offsets={o!r}, clip=2)" for m in (1, 2, 3, 4) for o in ("product", "raster")),
    *(f"huang(method={m}, shared=False)" for m in (1, 2, 3, 4)),
    "huang(offsets='raster')",
    *("sasa", "sasa(scaled=False)", "sasa(window=3)", "sasa(window=5, scaled=False)"),
    *("botnet", "botnet(scaled=False)"),
    *("decomposed", "decomposed(scaled=True)"),
    *("axial_deeplab", "axial_deeplab(axis='width')"),
]

TWO = [
    (Grid(2, 5), Grid(2, 5), Grid(2, 5)),
    (Grid(4, 3, prefix=1), Grid(4, 3, prefix=1), Grid(4, 3, prefix=1)),
    (Grid(3, 2, prefix=2), Grid(2, 4, prefix=1), Grid(3, 4, prefix=1)),
    (Grid(2, 3), Grid(4, 6), Grid(4, 6)),
]
"""Grids of the queries and of the keys; and a home whose tables hold every offset between the two, one for one."""


@pytest.mark.parametrize(("queries", "keys", "home"), TWO, ids=lambda g: f"{g.height}x{g.width}+{g.prefix}")
@pytest.mark.parametrize("text", SPELLINGS)
def test_equations(text: str, queries: Grid, keys: Grid, home: Grid) -> None:
    if text == "vit_relative":
        home = Grid(1, max(queries.patches, keys.patches))
    encoding = build(text, home)
    q, k, v = inputs(queries, keys)
    bias, value = paper(encoding, q, k, Pairs(queries, keys))
    got = attention(q, k, v, queries, [encoding], keys=None if queries == keys else keys)
    sources = {"q": q, "k": k, "v": v, **dict(encoding.named_parameters())}
    same_gradients(got, attend(q, k, v, bias, value), sources)


READ = [t for t in (*SPELLINGS, "irpe(on='qk')", "irpe(method='cross', on='qk')") if "on='v'" not in t]


@pytest.mark.parametrize("text", [t for t in READ if not t.startswith("huang") or "method" not in t or "=4" in t])
def test_tables_are_read_by_q_and_k_themselves(text: str) -> None:
    """So that a backend can read them where they are; beside them there are scores that all queries share."""
    grid = Grid(3, 4, prefix=1)
    q, k, _ = inputs(grid, grid)
    found = [b for b in build(text, grid).biases(q, k, grid, grid) if not isinstance(b, LowRankBias)]
    readers = []
    for bias in found:
        assert isinstance(bias, BucketBias), "each offset has a bucket on one grid"
        if isinstance(bias.scores, Scores):
            readers.append(bias.scores.reader)
            assert readers[-1] is (q if bias.side == "query" else k)
        else:
            assert bias.scores.shape[::2] == (1, 1)
    assert readers


def test_vit_relative_counts_a_video_frame_by_frame() -> None:
    video, line = Grid(2, 3, prefix=1, frames=2), Grid(1, 12, prefix=1)
    of_video, of_line = build("vit_relative", video), build("vit_relative", line)
    of_line.load_state_dict(of_video.state_dict())
    q, k, v = inputs(line, line)
    close(attention(q, k, v, video, [of_video]), attention(q, k, v, line, [of_line]), roundings=0)


def test_vit_relative_takes_the_end_of_a_row_for_a_neighbour_of_the_next() -> None:
    encoding = build("vit_relative", Grid(2, 3))
    bias = said(encoding, torch.ones(1, HEADS, 6, HEAD_DIM, dtype=torch.float64), Grid(2, 3))[0, 0]
    assert bias[2, 3] == bias[0, 1] == bias[4, 5]
    assert bias[2, 3] != bias[0, 3]


@pytest.mark.parametrize("text", SPELLINGS)
def test_dropping_patches_is_masking_them(text: str) -> None:
    grid, index = Grid(3, 4, prefix=1), torch.tensor([[7, 0, 3, 10], [2, 11, 5, 4]])
    encoding = build(text, grid)
    q, k, v = inputs(grid, grid)
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.long), index + 1], 1)
    allowed = torch.zeros(2, 1, 1, grid.tokens, dtype=torch.bool).scatter(-1, tokens[:, None, None], True)

    def rows(x: Tensor) -> Tensor:
        return x.gather(2, tokens[:, None, :, None].expand(2, HEADS, -1, HEAD_DIM))

    masked = rows(attention(q, k, v, grid, [encoding], mask=allowed))
    dropped = attention(rows(q), rows(k), rows(v), grid.keep(index), [encoding])
    same_gradients(dropped, masked, {"q": q, "k": k, "v": v} | dict(encoding.named_parameters()))


@pytest.mark.parametrize("height", range(1, 7))
@pytest.mark.parametrize("width", range(1, 7))
def test_each_offset_has_a_row_of_its_own(height: int, width: int) -> None:
    """With the stride of the other axis, 2 x 3 would have 11 distinct ids, not 15."""
    grid = Grid(height, width)
    clip = max(height, width)
    ids = Buckets(Separable(Clip(clip), Clip(clip)), grid, grid).dense()
    count = (2 * clip + 1) ** 2
    assert len(ids.unique()) == (2 * height - 1) * (2 * width - 1)
    assert torch.equal(ids + ids.mT, torch.full_like(ids, count - 1))
    encoding = build(f"shaw(on='k', clip={clip})", grid)
    q = torch.ones(1, HEADS, grid.tokens, HEAD_DIM, dtype=torch.float64)
    assert len(said(encoding, q, grid)[0, 0].unique()) == (2 * height - 1) * (2 * width - 1)


def test_ids_of_two_by_three() -> None:
    ids = Buckets(Separable(Clip(1), Clip(2)), Grid(2, 3), Grid(2, 3)).dense()
    assert ids[0].tolist() == [7, 6, 5, 2, 1, 0]


@pytest.mark.parametrize("text", SPELLINGS)
def test_queries_and_keys_apart_need_two_grids(text: str) -> None:
    grid, keys = Grid(3, 4), Grid(2, 4)
    encoding = build(text, grid)
    q, k, v = inputs(grid, keys)
    with pytest.raises(InputError, match="expected the same"):
        attention(q, k, v, grid, [encoding])
    assert attention(q, k, v, grid, [encoding], keys=keys).shape == q.shape


@pytest.mark.parametrize("text", ["vit_relative", "sasa", "botnet", "decomposed", "axial_deeplab"])
def test_tables_of_other_grids_are_resized_linearly(text: str) -> None:
    """As torch resizes them; and what was said at home stays as it was."""
    home, grid = Grid(3, 5, prefix=1), Grid(4, 2, prefix=1)
    encoding = build(text, home)
    q, k, v = inputs(home, home)
    before = attention(q, k, v, home, [encoding])
    there = build(text, grid)
    for name, table in encoding.named_parameters():
        target = there.get_parameter(name)
        last = name == "relative"
        size = target.shape[-1 if last else 0]
        line = (table if last else table.mT)[None]
        new = F.interpolate(line, size, mode="linear")[0]
        target.data.copy_(new if last else new.mT)
    q2, k2, v2 = inputs(grid, grid)
    close(attention(q2, k2, v2, grid, [encoding]), attention(q2, k2, v2, grid, [there]), roundings=FLOAT32)
    assert torch.equal(attention(q, k, v, home, [encoding]), before)


@pytest.mark.parametrize("text", ["vit_relative", "transformer_xl", "sasa(window=3)", "botnet", "decomposed"])
def test_points_between_patches_have_no_row(text: str) -> None:
    points = Points(3, 4, at=torch.tensor([[[0.5, 1.0], [2.0, 0.0]]]))
    encoding = build(text, Grid(3, 4))
    q, k, v = inputs(points, points)
    with pytest.raises(InputError, match=r"lies between patches: expected whole \(int64\) coordinates"):
        attention(q, k, v, points, [encoding])


class AnySize(torch.nn.Module):
    """Attention of an image [batch, heads, height, width, features] to itself."""

    def __init__(self, encoding: PositionEncoding) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2, 3)
        return attention(tokens, tokens, tokens, Grid(x.shape[2], x.shape[3]), [self.encoding])


@pytest.mark.parametrize("text", ["vit_relative", "transformer_xl", "decomposed", "axial_deeplab"])
def test_an_exported_program_takes_any_size(text: str) -> None:
    model = AnySize(build(text, Grid(3, 4)))
    sizes = {axis: torch.export.Dim(name, min=2, max=64) for axis, name in ((2, "height"), (3, "width"))}
    exported = torch.export.export(
        model, (torch.randn(1, HEADS, 5, 6, HEAD_DIM).double(),), dynamic_shapes=(sizes,)
    )
    for height, width in ((3, 4), (2, 9)):
        x = torch.randn(1, HEADS, height, width, HEAD_DIM).double()
        close(exported.module()(x), model(x))


class Largest(TorchDispatchMode):
    """How many bytes the largest tensor has that is made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.bytes = max(self.bytes, *made, 0)
        return out


@pytest.mark.parametrize("text", [text for text in SPELLINGS if "method=3" not in text])
def test_nothing_is_made_for_each_pair_and_feature(text: str) -> None:
    """Forward and backward: at most scores at twice as many offsets as there are pairs."""
    grid, head_dim = Grid(8, 12), 32
    (factory,) = parse(text)
    encoding = randomized(factory(head_dim, 1, grid))
    q, k, v = (leaf(1, 1, grid.tokens, head_dim) for _ in range(3))
    pairs = grid.tokens**2 * q.element_size()
    with Largest() as largest:
        attention(q, k, v, grid, [encoding], backend="reference").sum().backward()
    assert pairs <= largest.bytes <= 2 * pairs < head_dim * pairs


# ---------------------------------------------------------------------------------------------------------------
# Masks.


@pytest.mark.parametrize("prefix", [0, 2])
def test_sasa_in_its_windows(prefix: int) -> None:
    grid = Grid(4, 5, prefix)
    encoding = build("sasa(window=3)", grid)
    q, k, v = inputs(grid, grid)
    pairs = Pairs(grid, grid)
    mask = encoding.mask(grid)
    for i, j in itertools.product(range(grid.tokens), repeat=2):
        offset = pairs.offset(i, j)
        assert mask[i, j] == (offset is None or max(map(abs, offset)) <= 1)
    bias, _ = paper(encoding, q, k, pairs)
    got = attention(q, k, v, grid, [encoding], mask=mask)
    sources = {"q": q, "k": k, "v": v, "rows": encoding.rows, "columns": encoding.columns}
    same_gradients(got, attend(q, k, v, bias, allowed=mask), sources)
    kept = grid.keep(torch.tensor([[3, 9], [0, 19]]))
    assert encoding.mask(kept).shape == (2, 1, kept.tokens, kept.tokens)
    assert encoding.mask(grid, Grid(2, 2)).shape == (grid.tokens, 4)


@pytest.mark.parametrize("axis", ["height", "width"])
def test_axial_attention_masked_is_that_of_lines_alone(axis: str) -> None:
    grid, line = Grid(3, 4), Grid(3, 1) if axis == "height" else Grid(1, 4)
    encoding = build(f"axial_deeplab(axis={axis!r})", grid)
    q, k, v = inputs(grid, grid)

    def lines(x: Tensor) -> Tensor:
        image = x.unflatten(2, (3, 4))
        image = image.permute(0, 3, 1, 2, 4) if axis == "height" else image.permute(0, 2, 1, 3, 4)
        return image.flatten(0, 1)

    alone = attention(lines(q), lines(k), lines(v), line, [encoding])
    masked = attention(q, k, v, grid, [encoding], mask=encoding.mask(grid))
    same_gradients(lines(masked), alone, {"q": q, "k": k, "v": v, "relative": encoding.relative})


# ---------------------------------------------------------------------------------------------------------------
# Against others' code.


@pytest.mark.parametrize(("scaled", "scale"), [(True, True), (False, False)])
def test_botnet_is_timms(scaled: bool, scale: bool) -> None:
    grid = Grid(3, 5)
    layer = bottleneck_attn.BottleneckAttn(8, feat_size=(3, 5), num_heads=HEADS, scale_pos_embed=scale).double()
    encoding = randomized(BoTNet(8, HEADS, grid, scaled=scaled))
    layer.pos_embed.load_state_dict({"height_rel": encoding.rows, "width_rel": encoding.columns})
    x = torch.randn(BATCH, 8, 3, 5, dtype=torch.float64)
    q, k, v = (t.flatten(2).unflatten(1, (HEADS, -1)).mT for t in layer.qkv(x).chunk(3, 1))
    found = attention(q, k, v, grid, [encoding]).mT.flatten(1, 2).unflatten(-1, (3, 5))
    close(found, layer(x))


@pytest.mark.parametrize(("block", "window"), [(2, 4), (3, 7)])
def test_halonets_blocks_among_their_surroundings_are_two_grids(block: int, window: int) -> None:
    queries, keys = Grid(block, block), Grid(window, window)
    encoding = randomized(BoTNet(HEAD_DIM, 1, keys, scaled=False))
    peer = halo_attn.PosEmbedRel(block, window, HEAD_DIM, 1.0).double()
    peer.load_state_dict({"height_rel": encoding.rows, "width_rel": encoding.columns})
    q = torch.randn(BATCH, 1, block**2, HEAD_DIM, dtype=torch.float64)
    close(said(encoding, q, queries, keys), peer(q))


SIZES = [((4, 5), (4, 5)), ((4, 6), (2, 3)), ((8, 8), (4, 2)), ((2, 3), (6, 3)), ((7, 5), (3, 2))]


@pytest.mark.parametrize(("query", "key"), SIZES)
@pytest.mark.parametrize("prefix", [0, 1])
def test_decomposed_is_mvitv2s(query: tuple[int, int], key: tuple[int, int], prefix: int) -> None:
    """With the class token left out, and the tables made for the finer of the two grids."""
    queries, keys = Grid(*query, prefix), Grid(*key, prefix)
    encoding = build("decomposed", Grid(*(max(n, m) for n, m in zip(query, key, strict=True))))
    q = torch.randn(BATCH, HEADS, queries.tokens, HEAD_DIM, dtype=torch.float64)
    zeros = torch.zeros(BATCH, HEADS, queries.tokens, keys.tokens, dtype=torch.float64)
    expected = cal_rel_pos_type(zeros, q, bool(prefix), [*query], [*key], encoding.rows, encoding.columns)
    close(said(encoding, q, queries, keys), expected)


@pytest.mark.parametrize(("query", "key"), SIZES)
def test_decomposed_is_that_of_sam_and_vitdet(query: tuple[int, int], key: tuple[int, int]) -> None:
    """From a table made for another size, too. Their weights of interpolation are float32's or float64's."""
    from transformers.models.sam.modeling_sam import SamVisionAttention
    from transformers.models.vitdet.modeling_vitdet import add_decomposed_relative_positions

    encoding = randomized(Decomposed(HEAD_DIM, 1, Grid(5, 3)))
    q = torch.randn(BATCH, query[0] * query[1], HEAD_DIM, dtype=torch.float64)
    tables = (encoding.rows, encoding.columns)
    found = said(encoding, q[:, None], Grid(*query), Grid(*key))[:, 0]
    zeros = torch.zeros_like(found)
    sam = SamVisionAttention.get_decomposed_rel_pos
    peers = [
        get_decomposed_rel_pos_bias(q, *tables, query, key),
        add_decomposed_relative_positions(zeros, q, *tables, query, key),
        sam(SamVisionAttention.__new__(SamVisionAttention), q, *tables, query, key).reshape(zeros.shape),
    ]
    for expected in peers:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_shaw_on_keys_is_wav2vec2_berts() -> None:
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import _apply_relative_key_position_encoding

    grid, clip = Grid(1, 9), 3
    encoding = build(f"shaw(on='k', offsets='raster', clip={clip})", grid)
    module = torch.nn.Module()
    module.left_max_position_embeddings = module.right_max_position_embeddings = clip  # type: ignore[assignment]
    module.distance_embedding = torch.nn.Embedding.from_pretrained(encoding.tables["k"][0])
    module.scaling = SCALE  # type: ignore[assignment]
    q = torch.randn(BATCH, HEADS, 9, HEAD_DIM, dtype=torch.float64)
    close(said(encoding, q, grid), _apply_relative_key_position_encoding(module, q, q)[1])


def test_shaw_is_opennmts() -> None:
    case = values("shaw")
    length, clip = case["q"].shape[2], case["table_k"].shape[0] // 2
    encoding = Shaw(12, 2, Grid(1, length), offsets="raster", clip=clip).double()
    encoding.load_state_dict({"tables.k": case["table_k"][None], "tables.v": case["table_v"][None]})
    out = attention(case["q"], case["k"], case["v"], Grid(1, length), [encoding])
    close(out, case["out"])
    (out * case["cotangent"]).sum().backward()
    for side in "kv":
        grad = encoding.tables[side].grad
        assert grad is not None
        close(grad[0], case[f"grad_{side}"])


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_berts_relative_positions(kind: str) -> None:
    """Its offsets are query − key: Shaw's table mirrored, and Huang's as it is."""
    case = values(kind)
    grid = Grid(1, case["q"].shape[2])
    encoding: Any
    if kind == "relative_key":
        encoding = Shaw(12, 2, grid, on="k", offsets="raster", clip=grid.width - 1).double()
        encoding.load_state_dict({"tables.k": case["table"].flip(0)[None]})
    else:
        encoding = Huang(12, 2, grid, offsets="raster").double()
        encoding.load_state_dict({"table": case["table"][None]})
    out = attention(case["q"], case["k"], case["v"], grid, [encoding])
    close(out, case["out"])
    (table,) = encoding.parameters()
    (grad,) = torch.autograd.grad((out * case["cotangent"]).sum(), table)
    close(grad[0].flip(0) if kind == "relative_key" else grad[0], case["grad"])


@pytest.mark.parametrize("memory", [0, 3])
def test_transformer_xl_is_the_released_code(memory: int) -> None:
    """Its shift where queries are fewer than keys: they are the last ones of the sequence. Causal, as it is used.

    It rounds masked logits to float32.
    """
    case = values("transformer_xl/memory" if memory else "transformer_xl/self")
    length, heads, head_dim = case["k"].shape[2], *case["u"].shape
    keys = Grid(1, length)
    queries = keys.keep(torch.arange(memory, length)[None])
    encoding = TransformerXL(heads * head_dim, heads, keys, offsets="raster").double()
    encoding.load_state_dict({"u": case["u"], "v": case["bias_v"], "weight": case["weight"]})
    past = torch.arange(length) <= torch.arange(memory, length)[:, None]
    out = attention(case["q"], case["k"], case["v"], queries, [encoding], keys=keys, mask=past)
    close(out, case["out"], roundings=FLOAT32)
    (out * case["cotangent"]).sum().backward()
    for name in ("u", "v", "weight"):
        grad = encoding.get_parameter(name).grad
        assert grad is not None
        close(grad, case[f"grad_{name}"], roundings=FLOAT32)


@pytest.mark.parametrize(("clamp", "queries"), [(None, 7), (2, 7), (None, 4)])
def test_transformer_xl_is_xlnets(clamp: int | None, queries: int) -> None:
    """In both directions. XLNet's waves are float32: errors of 7 roundings of its angles."""
    from transformers import XLNetConfig
    from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

    keys, dim = Grid(1, 7), HEADS * HEAD_DIM
    config = XLNetConfig(
        d_model=dim, n_head=HEADS, n_layer=1, d_inner=8, vocab_size=4, dropout=0.0, clamp_len=clamp or -1
    )
    layer = XLNetRelativeAttention(config).double()
    encoding = build(f"transformer_xl(offsets='raster', clip={clamp})", keys)
    layer.r_w_bias.data, layer.r_r_bias.data = encoding.u.data, encoding.v.data
    waves = XLNetModel(config).relative_positional_encoding(queries, keys.width, bsz=1)
    heads = torch.einsum("ibh,ndh->ibnd", waves.double(), encoding.weight.unflatten(0, (HEADS, HEAD_DIM)))
    q, k, v = (torch.randn(BATCH, HEADS, n, HEAD_DIM, dtype=torch.float64) for n in (queries, 7, 7))
    q_head, k_head, v_head = (t.permute(2, 0, 1, 3) for t in (q, k, v))
    expected: Any = layer.rel_attn_core(q_head, k_head, v_head, heads.expand(-1, BATCH, -1, -1))
    expected = expected.permute(1, 2, 0, 3)
    last = keys.keep(torch.arange(7 - queries, 7)[None])
    found = attention(q, k, v, last, [encoding], keys=keys)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_sasa_is_another_port() -> None:
    """The original scales nothing; its windows at the border reach into zeros, so that the inner patches count."""
    case = values("sasa")
    grid = Grid(5, 6)
    encoding = SASA(6, 1, grid, window=3, scaled=False).double()
    encoding.load_state_dict({"rows": case["rows"].mT, "columns": case["columns"].mT})
    out = attention(case["q"], case["k"], case["v"], grid, [encoding], mask=encoding.mask(grid))
    out = out[:, 0].mT.unflatten(-1, (5, 6))[:, :, 1:-1, 1:-1]
    close(out, case["out"])
    (out * case["cotangent"]).sum().backward()
    for name in ("rows", "columns"):
        grad = encoding.get_parameter(name).grad
        assert grad is not None
        close(grad.mT, case[f"grad_{name}"])


# ---------------------------------------------------------------------------------------------------------------
# The attention layer of Axial-DeepLab.


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("axis", ["height", "width"])
def test_axial_attention_is_the_released_code(axis: Any, mode: str) -> None:
    case = values(f"axial/{axis}/{mode}")
    layer = AxialAttention(8, 2, 4, axis=axis, normalized=True).double()
    layer.load_state_dict({n.removeprefix("state/"): t for n, t in case.items() if n.startswith("state/")})
    layer.train(mode == "train")
    image = case["x"].requires_grad_()
    grid = Grid(*image.shape[2:])
    out = layer(image.flatten(2).mT, grid).mT.unflatten(-1, grid.size)
    close(out, case["out"])
    grads = torch.autograd.grad((out * case["cotangent"]).sum(), [image, *layer.parameters()])
    close(grads[0], case["grad_x"], roundings=2**14)
    for (name, _), grad in zip(layer.named_parameters(), grads[1:], strict=True):
        close(grad, case[f"grad/{name}"], roundings=2**14)


@pytest.mark.parametrize("axis", ["height", "width"])
def test_axial_attention_is_its_equation(axis: Any) -> None:
    grid, heads = Grid(3, 4), 2
    span = 3 if axis == "height" else 4
    layer = randomized(AxialAttention(8, heads, span, axis=axis))
    x = leaf(2, 12, 8)
    weight = layer.qkv_transform.weight[:, :, 0].unflatten(0, (heads, 8))
    q, k, v = torch.einsum("bnc,hdc->bhnd", x, weight).split([2, 2, 4], -1)
    r_q, r_k, r_v = layer.relative.split([2, 2, 4])
    place = places(grid)
    rows = []
    for i in range(12):
        line = [j for j in range(12) if place[i][axis == "height"] == place[j][axis == "height"]]  # type: ignore[index]
        offsets = [place[i][axis == "width"] - place[j][axis == "width"] for j in line]  # type: ignore[index]
        logits = [
            dot(q[:, :, i], k[:, :, j])
            + dot(q[:, :, i], r_q[:, o + span - 1])
            + dot(k[:, :, j], r_k[:, -o + span - 1])
            for j, o in zip(line, offsets, strict=True)
        ]
        a = torch.stack(logits, -1).softmax(-1)
        parts = [v[:, :, j] + r_v[:, o + span - 1] for j, o in zip(line, offsets, strict=True)]
        rows.append(sum(a[..., n, None] * part for n, part in enumerate(parts)))
    expected = torch.stack(rows, 1).flatten(2)  # type: ignore[arg-type]
    same_gradients(layer(x, grid), expected, {"x": x} | dict(layer.named_parameters()))


def test_axial_attention_on_lines_longer_or_shorter_than_its_span() -> None:
    layer = randomized(AxialAttention(8, 2, 3))
    longer = AxialAttention(8, 2, 5).double()
    table = F.interpolate(layer.relative[None], 9, mode="linear")[0]
    longer.load_state_dict(layer.state_dict() | {"relative": table})
    x = torch.randn(1, 10, 8, dtype=torch.float64)
    close(layer(x, Grid(5, 2)), longer(x, Grid(5, 2)), roundings=FLOAT32)
    assert layer(x[:, :2], Grid(1, 2)).shape == (1, 2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 6}, r"dim=6 is not a multiple of 2 \* num_heads=4"),
        ({"span": 0}, "span=0, expected a positive integer"),
        ({"axis": "depth"}, "axis='depth', expected one of .*'height'"),
    ],
)
def test_axial_attention_refuses(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"dim": 8, "num_heads": 2, "span": 2} | options
    with pytest.raises(InputError, match=message):
        AxialAttention(**given)


@pytest.mark.parametrize("grid", [Grid(2, 2, prefix=1), Grid(2, 4).keep(torch.tensor([[0, 1, 2, 3]]))])
def test_axial_attention_wants_whole_images(grid: Grid) -> None:
    with pytest.raises(InputError, match="expected a whole image without prefix tokens"):
        AxialAttention(8, 2, 2)(torch.zeros(1, grid.tokens, 8), grid)


# ---------------------------------------------------------------------------------------------------------------
# What they cost, how they start, what they refuse.

TABLE_5 = [
    ("shaw(on='k')", 22, 4659),
    ("huang", 22, 4706),
    ("sasa", 22, 4639),
]
"""iRPE, Table 5, DeiT-S: parameters and multiply-adds in M. (For Transformer-XL see below.)"""


@pytest.mark.parametrize(("text", "millions", "paper_macs"), TABLE_5)
def test_counts_of_the_irpe_paper(text: str, millions: int, paper_macs: int) -> None:
    (cost,) = costs("deit_small_patch16_224", [f"learned + {text}"])
    assert round(cost.parameters / 1e6) == millions
    assert cost.macs / 1e6 == pytest.approx(paper_macs, rel=1e-3)


def test_transformer_xls_counts_of_the_irpe_paper() -> None:
    """Table 5 has 23 M and 4828 M: as if W s were made for all 27² offsets, W and s as small as a head, then the
    products for all pairs, and s were a parameter. Ours adds one axis' waves to the other's: cheaper."""
    none, shared, own = costs(
        "deit_small_patch16_224",
        [f"learned{e}" for e in ("", " + transformer_xl(shared=True)", " + transformer_xl")],
    )
    offsets, tokens, dim, head_dim, depth = 27**2, 197, 384, 64, 12
    dense = none.macs + depth * (tokens**2 * dim + offsets * head_dim**2)
    assert round(dense / 1e6) == 4828
    assert round((shared.parameters + depth * offsets * head_dim) / 1e6) == 23
    assert shared.parameters - none.parameters == depth * (2 * head_dim + head_dim**2)
    assert own.parameters - none.parameters == depth * (2 * dim + dim**2)
    assert none.macs < shared.macs < own.macs < dense


@pytest.mark.parametrize(
    ("text", "macs"),
    [
        ("vit_relative", 13 * 24 * 23),
        ("shaw", 2 * 13 * 24 * 50),
        ("shaw(offsets='raster', on='v')", 13 * 24 * 34),
        ("transformer_xl", 12 * 24 * 12 + 13 * 24 * (12 + 1)),
        ("transformer_xl(offsets='raster')", 23 * 24 * 24 + 13 * 24 * (23 + 1)),
        ("huang", 2 * 13 * 24 * 50),
        ("huang(method=2)", 13**2 * (24 + 3)),
        ("huang(method=3)", 2 * 13**2 * 24),
        ("sasa", 13 * 12 * 12),
        ("sasa(window=3)", 13 * 12 * 6),
        ("botnet", 13 * 24 * 12),
        ("decomposed", 13 * 24 * 12),
        ("axial_deeplab(axis='width')", 3 * 13 * 24 * 7),
    ],
)
def test_macs(text: str, macs: int) -> None:
    (factory,) = parse(text)
    grid = Grid(3, 4, prefix=1)
    assert factory(24, 3, grid).macs(grid) == macs


STARTS = [
    ("vit_relative", 0.02),
    ("shaw", (2 / (50 + 64)) ** 0.5),
    ("transformer_xl", 0.02),
    ("huang", 0.02),
    ("sasa", 1 / 8),
    ("botnet", 1 / 8),
    ("decomposed", 0.02),
    ("decomposed(std=0)", 0.0),
    ("axial_deeplab", 1 / 8),
]


@pytest.mark.parametrize(("text", "std"), STARTS)
def test_starts(text: str, std: float) -> None:
    """Tables of 1,600 numbers or more: their deviation deviates by < 2 %."""
    (factory,) = parse(text)
    for parameter in factory(384, 6, Grid(14, 14, prefix=1)).parameters():
        if parameter.numel() > 1600:
            assert abs(parameter.std().item() - std) <= 5 * 0.02 * std
            assert abs(parameter.mean().item()) <= 5 * std / 1600**0.5


@pytest.mark.parametrize("method", [1, 2, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_huangs_factors_start_as_attention_without_positions(method: int, shared: bool) -> None:
    grid = Grid(3, 4, prefix=1)
    encoding = Huang(8, 2, grid, method=method, shared=shared).double()
    q, k, v = inputs(grid, grid)
    close(attention(q, k, v, grid, [encoding]), attention(q, k, v, grid))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vit_relative(std=0)", "std=0, expected a positive number"),
        ("shaw(on='qk')", "on='qk', expected 'k', 'v' or 'kv'"),
        ("shaw(offsets='cross')", r"offsets='cross', expected one of \['product', 'raster'\]"),
        ("shaw(clip=0)", "clip=0, expected a positive integer"),
        ("huang(method=5)", "method=5, expected one of the paper's, 1 to 4"),
        ("huang(clip=1.5)", "clip=1.5, expected a positive integer"),
        ("transformer_xl(temperature=0)", "temperature=0, expected a positive number"),
        ("sasa(window=4)", "window=4, expected an odd positive integer"),
        ("sasa(window=-1)", "window=-1, expected an odd positive integer"),
        ("decomposed(std=-1)", "std=-1, expected a positive number"),
        ("axial_deeplab(axis='both')", "axis='both', expected one of .*'height'"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    (factory,) = parse(text)
    with pytest.raises(InputError, match=message):
        factory(8, 2, Grid(3, 4))


def test_refuses_dimensions_that_do_not_divide() -> None:
    with pytest.raises(InputError, match="expected an even number of features a head"):
        SASA(6, 2, Grid(2, 2))
    with pytest.raises(InputError, match="dim=6, expected a multiple of 4"):
        TransformerXL(6, 2, Grid(2, 2))
    with pytest.raises(InputError, match="head_dim=3, expected a multiple of 2"):
        TransformerXL(6, 2, Grid(2, 2), offsets="raster", shared=True)


@pytest.mark.parametrize("text", [text for text in SPELLINGS if text.startswith(("shaw", "huang"))])
def test_a_table_without_a_row_for_prefix_tokens_refuses_them(text: str) -> None:
    grid = Grid(3, 4, prefix=1)
    encoding = build(text, Grid(3, 4))
    q, k, v = inputs(grid, grid)
    with pytest.raises(InputError, match="prefix"):
        attention(q, k, v, grid, [encoding])


def test_sasa_without_windows_has_no_mask() -> None:
    with pytest.raises(InputError, match="window=None has no mask"):
        SASA(8, 2, Grid(2, 2)).mask(Grid(2, 2))


def test_the_second_term_is_scaled_where_it_says_so() -> None:
    """MViTv2 and SAM do not scale it, iRPE does (here its cross mapping, with tables as long as the grid)."""
    grid = Grid(3, 4)
    q = torch.randn(BATCH, HEADS, 12, HEAD_DIM, dtype=torch.float64)
    decomposed = build("decomposed", grid)
    scaled = Decomposed(8, HEADS, grid, scaled=True).double()
    scaled.load_state_dict(decomposed.state_dict())
    close(said(decomposed, q, grid), said(scaled, q, grid) / SCALE)
    (factory,) = parse("irpe(method='cross', index='clip', beta=3)")
    irpe = factory(8, HEADS, grid).double()
    irpe.get_parameter("tables.k_rows").data[0, :, 1:6] = decomposed.rows.data.mT
    irpe.get_parameter("tables.k_columns").data[0] = decomposed.columns.data.mT
    close(said(irpe, q, grid), said(scaled, q, grid))
