"""Encodings that start from others: against a design matrix written out, and against all pairs measured."""

import copy

import pytest
import timm
import torch
from torch import nn

from whereformer import Grid, InputError, describe, equip, parse, translate, unequip
from whereformer.adapters import start_from
from whereformer.encodings import LookHere, RoPEAxial, RoPEMixed, SinCos2D, Swin
from whereformer.translation import Part, Translation
from whereformer.translation.meaning import Meaning
from whereformer.translation.measured import Seen, start_from_seen
from whereformer.translation.pairs import Pairs

DIM, HEADS = 24, 3
GRIDS = [Grid(3, 4, prefix=1), Grid(5, 2), Grid(1, 4, prefix=2)]
grids = pytest.mark.parametrize("grid", GRIDS, ids=["3x4+1", "5x2", "1x4+2"])


def make(text: str, grid: Grid, seed: int | None = None, dim: int = DIM, heads: int = HEADS) -> nn.Module:
    (factory,) = parse(text)
    encoding = factory(dim, heads, grid).double()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in encoding.parameters():
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.1)
    return encoding


def biases(encoding: nn.Module, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
    """On all pairs of tokens: [batch, heads, n, n]."""
    zero = q.new_zeros(q.shape[0], HEADS, grid.tokens, grid.tokens)
    return sum((bias.dense() for bias in encoding.biases(q, k, grid, grid)), start=zero)


def dense(encoding: nn.Module, grid: Grid) -> torch.Tensor:
    """Every pair by itself, of each feature of the queries: [1 + d, heads, n, n]; the bias first."""
    n, d = grid.tokens, DIM // HEADS
    q = torch.zeros(1 + d, HEADS, n, d, dtype=torch.float64)
    for feature in range(d):
        q[1 + feature, ..., feature] = 1
    said = biases(encoding, q, torch.zeros_like(q), grid)
    return torch.cat([said[:1], said[1:] - said[:1]])


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def parts(found: object) -> dict[str, Part]:
    assert isinstance(found, Translation)
    return {part.name: part for part in found.parts}


@grids
def test_every_pair_of_tokens_is_like_one_that_is_looked_at(grid):
    swin, pairs = make("swin", grid, 0), Pairs.by_offset(grid)
    one, other = (torch.zeros(1, HEADS, g.tokens, DIM // HEADS).double() for g in (pairs.queries, grid))
    (looked_at,) = swin.biases(one, other, pairs.queries, grid)
    found = looked_at.dense().expand(1, HEADS, -1, -1).flatten(2)[0][:, pairs.like]
    assert torch.equal(found, biases(swin, other, other, grid)[0])
    assert pairs.weights().sum() == pytest.approx(1)
    assert torch.equal(pairs.rows().to_dense().sum(0) / grid.tokens**2, pairs.weights())


@grids
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("swin", "beit"),
        ("swin", "irpe(mode='bias', shared=False, index='clip', beta=5)"),
        ("swin", "maxvit"),
        ("irpe(mode='bias', method='cross', shared=False)", "swin"),
        ("alibi2d", "levit"),
        ("log_cpb(hidden=4)", "swin"),
        ("irpe(shared=False)", "irpe(shared=False, ratio=4)"),
        ("decomposed", "irpe(index='clip', beta=5)"),
        ("huang(method=4, clip=2)", "irpe(on='qk', index='clip', beta=5)"),
        ("shaw(clip=2)", "irpe(on='kv', index='clip', beta=5)"),
        ("vit2d", "learned"),
    ],
)
def test_what_the_target_can_say_it_says(grid, source, target):
    says = make(source, grid, 0)
    found = translate(says, make(target, grid, 1))
    for part in parts(found).values():
        assert max(part.missed) <= 1e-11 * max(max(part.said), 1e-3), str(found)
    if source == "irpe(mode='bias', method='cross', shared=False)" and target == "swin":
        swin = make(target, grid, 1)
        translate(says, swin)
        q = torch.zeros(1, HEADS, grid.tokens, DIM // HEADS).double()
        if grid.prefix == 0:  # the very numbers, not only up to a constant
            torch.testing.assert_close(biases(swin, q, q, grid), biases(says, q, q, grid))


@grids
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("swin", "irpe(mode='bias')"),
        ("swin", "levit"),
        ("irpe(mode='bias', ratio=1.9, shared=False)", "irpe(mode='bias', ratio=1.5, method='cross')"),
        ("t5", "irpe(mode='bias', method='euclidean', shared=False, ratio=2)"),
        ("irpe", "irpe(method='cross')"),
        ("irpe(shared=False)", "decomposed"),
        ("shaw(on='k')", "botnet"),
    ],
)
def test_as_near_as_an_explicit_design_matrix(grid, source, target):
    """Column by column, over all pairs, and solved by LAPACK: no target can come nearer."""
    says, learns = make(source, grid, 0), make(target, grid, 1)
    found = translate(says, learns)
    wanted = centred(dense(says, grid))
    probe = copy.deepcopy(learns)
    columns = []
    for parameter in probe.parameters():
        parameter.data.zero_()
    for parameter in probe.parameters():
        for number in range(parameter.numel()):
            parameter.data.view(-1)[number] = 1
            columns.append(centred(dense(probe, grid)).detach().flatten())
            parameter.data.zero_()
    design = torch.stack(columns, 1)
    solution = torch.linalg.lstsq(design, wanted.flatten(), driver="gelsd").solution
    best = (design @ solution).reshape(wanted.shape)
    # the solution is not unique where tables overlap, what it says is; conditioning of such tables is below 10⁴
    torch.testing.assert_close(centred(dense(learns, grid)), best, rtol=1e-9, atol=1e-9)
    missed = (wanted - centred(dense(learns, grid))).square()
    bias, queries = missed[0].mean((-1, -2)).sqrt(), missed[1:].sum(0).mean((-1, -2)).sqrt()
    for name, measured in (("bias", bias), ("queries", queries)):
        if name in parts(found):
            assert parts(found)[name].missed == pytest.approx(measured.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["peg", "lepe"])
def test_a_convolution_in_a_larger_one(name):
    grid = Grid(2, 3, prefix=1)
    found = translate(make(name, grid, 0), make(f"{name}(kernel_size=5)", grid, 1))
    assert found.lost < 1e-10
    assert "convolution" in parts(found) or "own values" in parts(found)


@grids
def test_rotations_become_learned_ones(grid):
    source, target = RoPEAxial(DIM, 2, grid, theta=100.0), RoPEMixed(DIM, 2, grid).double()
    found = parts(translate(source, target))["rotations"]
    assert found.share < 1e-6  # angles are in float32
    x = torch.randn(2, 1, 2, grid.tokens, DIM // 2).double()
    logits = []
    for encoding in (source, target):
        (turn,) = encoding.rotations(grid)
        q, k = turn(x[0]), turn(x[1])
        logits.append(q @ k.mT)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


def test_what_rotations_lose_is_measured_over_all_pairs():
    grid = Grid(3, 4, prefix=1)
    source, target = make("rope_mixed", grid, 0, heads=2), make("rope_axial", grid, heads=2)
    found = parts(translate(source, target))["rotations"]
    one = torch.eye(DIM // 2).double()[:, None, None].expand(-1, 2, grid.tokens, -1)
    made = []
    for encoding in (source, target):
        (turn,) = encoding.rotations(grid)
        r = turn(one)
        made.append(torch.einsum("ahif,bhjf->hijab", r, r))
    missed = (made[0] - made[1]).square().sum((-1, -2)).mean((-1, -2)) / (DIM // 2)
    said = (made[0] - torch.eye(DIM // 2)).square().sum((-1, -2)).mean((-1, -2)) / (DIM // 2)
    assert found.missed == pytest.approx(missed.sqrt().tolist(), rel=1e-9)
    assert found.said == pytest.approx(said.sqrt().tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("source", "target", "most"),
    [
        ("alibi2d", "kerple(kernel='power')", 0.02),
        ("alibi2d", "kerple", 0.1),
        ("alibi2d", "fire(hidden=8)", 0.1),
        ("sincos2d", "learnable_fourier(features=8)", 0.01),
    ],
)
def test_targets_that_are_not_linear_go_down(source, target, most):
    grid = Grid(2, 3)
    torch.manual_seed(0)  # where they start
    found = translate(make(source, grid), make(target, grid))
    assert found.lost < most


def test_a_constant_for_all_keys_of_a_query_is_free():
    grid = Grid(3, 4)
    one, other = make("swin", grid, 0), make("swin", grid, 0)
    other.table.data += 5
    target = make("irpe(mode='bias', method='euclidean')", grid)
    first = translate(one, target)
    assert translate(other, target).lost == pytest.approx(
        first.lost, rel=1e-9
    )  # not: 5 is much more than the table has
    said, shifted = (parts(translate(e, target))["bias"].said for e in (one, other))
    assert said == pytest.approx(shifted, rel=1e-9)


def test_several_at_once():
    grid = Grid(3, 4, prefix=1)
    sources = [make("irpe(mode='bias')", grid, 0), make("shaw(on='kv', clip=3)", grid, 1), make("vit2d", grid, 2)]
    targets = [make("learned", grid), make("irpe(on='kv', index='clip', beta=4)", grid), make("beit", grid)]
    found = translate(sources, targets)
    assert parts(found).keys() == {"tokens", "bias", "queries", "values"}
    assert all(part.share < 1e-10 for name, part in parts(found).items() if name != "bias")
    assert parts(found)["bias"].share < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_in_the_dtype_of_the_target_the_report_counts_its_rounding(dtype):
    grid = Grid(3, 4, prefix=1)
    source, target = make("swin", grid, 0), make("beit", grid).to(dtype)
    part = parts(translate(source, target))["bias"]
    assert target.table.dtype == dtype
    assert torch.finfo(dtype).eps / 64 < part.share < torch.finfo(dtype).eps
    missed = centred(dense(source, grid) - dense(copy.deepcopy(target).double(), grid))[0]
    assert part.missed == pytest.approx(missed.square().mean((-1, -2)).sqrt().tolist(), rel=1e-9)


def test_on_another_grid_than_home():
    home, grid = Grid(3, 4), Grid(5, 6)
    source, target = make("alibi2d", home), make("swin", home)
    there = parts(translate(source, target, grid=grid))["bias"].share
    here = copy.deepcopy(target)
    translate(source, here)
    missed = [centred(dense(source, grid) - dense(t, grid)).square().sum() for t in (target, here)]
    assert missed[0] < missed[1]
    assert there == pytest.approx(
        (missed[0] / centred(dense(source, grid)).square().sum()).sqrt().item(), rel=1e-9
    )


def test_what_does_not_learn_stays():
    grid = Grid(3, 4)
    target = make("decomposed", grid, 1)
    target.rows.requires_grad_(False)
    before = target.rows.clone()
    translate(make("decomposed", grid, 0), target)
    assert torch.equal(target.rows, before)
    source, target = make("swin", grid, 0), make("alibi2d", grid)
    state = torch.random.get_rng_state()
    found = translate(source, target)  # has nothing to learn: a comparison
    assert found.lost > 0.1
    assert torch.equal(torch.random.get_rng_state(), state)


@torch.no_grad()
def test_without_gradients_too():
    grid = Grid(3, 4)
    assert translate(make("swin", grid, 0), make("maxvit", grid)).lost < 1e-12


def test_the_report_says_what_was_lost():
    grid = Grid(3, 4, prefix=1)
    found = translate(make("irpe(on='qkv')", grid, 0), make("irpe(on='k', index='clip', beta=5)", grid))
    assert found.lost == pytest.approx(1)
    text = str(found)
    assert "values (added to values): lost 100 % (R² 0.0000)" in text
    assert parts(found)["queries"].r2 == pytest.approx(1)


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("rope_axial", "swin", "rotations.*bias: nothing in common"),
        ("learned", "irpe", "tokens.*queries: nothing in common"),
        ("swin", "none", "bias.*nothing: nothing in common"),
        ("swin", "irpe", "bias.*queries: nothing in common"),
    ],
)
def test_nothing_in_common(source, target, said):
    grid = Grid(3, 4, prefix=1)
    learns = make(target, grid, 1)
    before = copy.deepcopy(learns.state_dict())
    with pytest.raises(InputError, match=said):
        translate(make(source, grid, 0), learns)
    assert all(torch.equal(before[key], value) for key, value in learns.state_dict().items())


def test_bad_arguments():
    grid = Grid(3, 4)
    swin = Swin(DIM, HEADS, grid)
    for source, target, options, said in [
        (swin, Swin(2 * DIM, HEADS, grid), {}, "Swin has 48 features in 3 heads|Swin has 24"),
        (swin, swin, {"grid": 4}, "grid=4"),
        (swin, "irpe", {}, "target='irpe'"),
        ([], swin, {}, r"source=\[\]"),
        (Swin(DIM, HEADS, Grid(3, 4, frames=2)), swin, {}, "other axes"),
        (swin, LookHere(DIM, HEADS, grid), {}, "which layer"),
        (swin, copy.deepcopy(swin).to("meta"), {}, "meta device"),
    ]:
        with pytest.raises(InputError, match=said):
            translate(source, target, **options)


def test_numbers_too_large_for_the_dtype_leave_the_target_as_it_was():
    grid = Grid(3, 4)
    source, target = make("swin", grid, 0), make("swin", grid, 1).half()
    source.table.data[0, 0, 0] = 1e6
    before = target.table.clone()
    with pytest.raises(InputError, match="too large for its dtype"):
        translate(source, target)
    assert torch.equal(target.table, before)


SIZE, PATCH = (24, 32), 8
HOME = Grid(3, 4)


def model(positions: bool = True) -> timm.models.VisionTransformer:
    """Half of its features say where, half what; queries and keys read the former, values the latter."""
    torch.manual_seed(0)
    made = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIZE,
        patch_size=PATCH,
        embed_dim=48,
        depth=2,
        num_heads=3,
        num_classes=10,
        class_token=False,
        global_pool="",
    ).eval()
    table = SinCos2D(24, 3, HOME, temperature=8.0).tokens(torch.zeros(1, 12, 24), HOME)
    with torch.no_grad():
        made.pos_embed.zero_()
        if positions:
            made.pos_embed[..., 24:] = (table - table.mean(1, keepdim=True)) * 0.5
        made.patch_embed.proj.weight.normal_(std=0.15)[24:].zero_()
        for block in made.blocks:
            q, k, v = block.attn.qkv.weight.chunk(3)
            q.zero_()[:, 24:].normal_(std=1.5)
            k.copy_(q)
            v.normal_(std=0.2)[:, 24:].zero_()
            block.attn.proj.weight.normal_(std=0.2)[24:].zero_()
            block.mlp.fc1.weight.normal_(std=0.2)[:, 24:].zero_()
            block.mlp.fc2.weight.normal_(std=0.1)[24:].zero_()
        made.head.weight.normal_(std=0.2)[:, 24:].zero_()
    return made


def images(seed: int, batch: int = 8) -> torch.Tensor:
    return torch.randn(batch, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def apart(one: nn.Module, other: nn.Module, x: torch.Tensor) -> float:
    return float((one(x) - other(x)).norm() / other(x).norm())


@pytest.mark.parametrize("encoding", ["swin", "irpe(mode='bias', shared=False)", "irpe(on='kv', ratio=0.6)"])
def test_a_model_stays_nearer_than_with_encodings_that_start_at_zero(encoding):
    original, fresh = model(), model()
    equip(fresh, encoding)
    given = images(1, 32)  # of fewer, what encodings read in queries and keys fits others less
    found = translate(original, encoding, images=given)
    assert found.now == pytest.approx(apart(original, model(), given), rel=1e-4)
    assert found.start == pytest.approx(apart(fresh, model(), given), abs=0.02)  # swin starts at random
    held_out = images(2, 16)
    assert apart(original, model(), held_out) < 0.9 * apart(fresh, model(), held_out)
    assert [name for name, _ in found.attentions] == ["blocks.0.attn", "blocks.1.attn"]
    for _, (logits, outputs) in found.attentions:
        assert logits.share < 1
        assert outputs.share < 1
    assert f"{100 * found.now:.3g} %" in str(found)


def test_a_table_that_stays_leaves_nothing_to_say():
    original = model()
    found = translate(original, "learned + irpe(on='qkv')", images=images(1))
    assert found.now < 1e-6
    assert found.tokens.lost < 1e-6
    assert all(float(p.detach().abs().max()) < 1e-5 for p in original.blocks[0].attn.encodings.parameters())


def test_an_equipped_model_gives_what_it_has_to_another():
    """Of the logits of Swin's table, Swin's own equation can say everything: again and again, block by block."""
    other = equip(model(positions=False), "swin")
    for block in other.blocks:
        nn.init.normal_(block.attn.encodings[0].table, std=2.0)
    student = equip(model(positions=False), "maxvit")
    found = start_from(student, other, images(1, 2))
    assert found.now < 1e-5 < 1e-2 < found.start
    assert apart(student, other, images(2)) < 1e-5
    translate(other, "maxvit", images=images(1, 2))  # in one call, in place
    assert {seat.encoding.partition("(")[0] for seat in describe(other).seats} == {"MaxViT"}
    assert apart(other, student, images(2)) < 1e-6
    assert type(unequip(other)).__name__ == "VisionTransformer"


def test_tokens_of_an_equipped_model_start_from_its_encodings():
    other = equip(model(), "vit2d")
    nn.init.normal_(other.encodings[0].rows)
    before = copy.deepcopy(other)
    assert translate(other, "learned").tokens.lost < 1e-5
    assert apart(other, before, images(2)) < 1e-5


@pytest.mark.parametrize("encoding", ["irpe(mode='bias', shared=False)", "irpe(on='q', method='euclidean')"])
def test_what_images_add_to_all_keys_of_a_query_is_free(encoding):
    """Keys that all have one more vector c add q·c to logits: to softmax nothing, to other norms nearly all."""
    grid, shape = Grid(3, 4), (2, HEADS, 12, DIM // HEADS)
    q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    swin, found = make("swin", grid, 0), []
    for more in (0.0, 10.0):
        target = Seen(q, k, v, grid, (make(encoding, grid),))
        found.append(start_from_seen(Seen(q, k + more, v, grid, (swin,)), target))
    for one, other in zip(*found, strict=True):
        assert other.said == pytest.approx(one.said, rel=1e-9)
        assert other.missed == pytest.approx(one.missed, rel=1e-6)
    assert found[0][0].share < 0.99


def test_tokens_need_no_images():
    original = model()
    found = translate(original, "pix2struct")
    assert found.now is None
    assert found.tokens.lost < 1e-5  # a sum of what rows and columns say is what sinusoids are
    assert apart(original, model(), images(1)) < 1e-4


def test_what_fails_leaves_the_model_as_it_was():
    original = model()
    before = list(original.state_dict())
    for encoding, options, said in [
        ("irpe", {}, "images="),
        ("learned", {"grid": HOME}, "grid="),
        ("no", {}, "no"),
        ("irpe", {"images": HOME}, "images=Grid"),
    ]:
        with pytest.raises(InputError, match=said):
            translate(original, encoding, **options)
    assert list(original.state_dict()) == before
    assert type(original).__name__ == "VisionTransformer"
    assert original.training is False
    assert not any(block.attn._forward_pre_hooks for block in original.blocks)


def test_models_that_are_not_served():
    layer = nn.TransformerEncoderLayer(24, 3, batch_first=True)
    parallel = timm.models.VisionTransformer(
        SIZE,
        PATCH,
        embed_dim=24,
        depth=1,
        num_heads=3,
        block_fn=timm.models.vision_transformer.ParallelScalingBlock,
    )
    compiled = torch.compile(model())
    for wrong, said in [
        (layer, "TransformerEncoderLayer, expected a timm VisionTransformer"),
        (parallel, r"speak in blocks.0, a \w*ParallelScalingBlock, expected timm's Attention"),
        (compiled, "_orig_mod"),
    ]:
        kind = type(wrong)
        with pytest.raises(InputError, match=said):
            translate(wrong, "irpe", images=images(1))
        assert type(wrong) is kind
    with pytest.raises(InputError, match="start_from: VisionTransformer is not equipped"):
        start_from(model(), model(), None)


def test_meaning_of_silent_parts_is_left_out():
    grid = Grid(3, 4)
    meaning = Meaning(grid, make("swin", grid), by_offset=False)
    ways = {"learned": ["tokens"], "swin": ["bias"], "irpe": ["queries"], "huang(method=2)": ["products"]}
    ways |= {"peg": ["tokens", "convolution"], "lepe": ["own values"], "irpe(on='v')": ["values"]}
    for text, expected in ways.items():
        assert meaning.parts([make(text, grid, 0)]) == expected
