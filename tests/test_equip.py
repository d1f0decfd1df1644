"""`equip` and `describe` on timm's vision transformers, as people have them."""

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from whereformer import Grid, InputError, PositionEncoding, describe, equip
from whereformer.encodings import IRPE, PEG, Learned

FAMILIES = {
    "vit": ("vit_tiny_patch16_224", {}),
    "deit": ("deit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "clip, norm before blocks": ("vit_base_patch16_clip_224", {}),
    "dinov2 with registers": ("vit_small_patch14_reg4_dinov2", {}),
    "average pooling, no class token": ("vit_base_patch16_gap_224", {}),
    "two attentions a block": ("vit_small_patch16_18x2_224", {}),
    "qk norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "scale norm": ("vit_tiny_patch16_224", {"scale_attn_norm": True}),
    "attention pooling": ("vit_base_patch16_siglip_224", {}),
}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}


def small(name: str = "vit_tiny_patch16_224", **options) -> timm.models.VisionTransformer:
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **options}).eval()


def images(height: int = 32, width: int = 32, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def randomise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.5)


@pytest.fixture(params=FAMILIES, ids=str)
def family(request):
    name, options = FAMILIES[request.param]
    return partial(small, name, **options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_learned_table_goes_on_from_the_models_own_and_zero_irpe_changes_nothing(family, dynamic):
    model = family(dynamic_img_size=dynamic)
    with torch.no_grad():
        before = model(images())
        after = equip(model, "learned + irpe(on='qkv')")(images())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_works_on_any_grid(family):
    model = equip(family(dynamic_img_size=True), "learned + irpe(on='qkv') + peg")
    randomise(model)
    first = model(images())
    for height, width in [(40, 24), (8, 64), (24, 40)]:
        assert model(images(height, width)).shape == first.shape
    torch.testing.assert_close(model(images()), first)


def test_set_input_size_moves_a_fixed_model():
    model = equip(small(), "learned + irpe")
    randomise(model)
    dynamic = equip(small(dynamic_img_size=True), "learned + irpe")
    dynamic.load_state_dict(model.state_dict())
    model.set_input_size((48, 24))
    torch.testing.assert_close(model(images(48, 24)), dynamic(images(48, 24)))


def test_own_names_and_weights_stay():
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    equip(model, "irpe(on='qkv')")
    after = model.state_dict()
    assert before.keys() - after.keys() == {"pos_embed"}
    assert {name.rpartition(".encodings.")[0] for name in after.keys() - before.keys()} == {
        f"blocks.{i}.attn" for i in range(3)
    }
    for name in before.keys() & after.keys():
        assert torch.equal(before[name], after[name]), name


def test_equip_returns_the_same_model_and_patches_no_class():
    model, forward = small(), timm.layers.Attention.forward
    assert equip(model, "irpe") is model
    assert isinstance(model, timm.models.VisionTransformer)
    assert timm.layers.Attention.forward is forward
    assert type(small().blocks[0].attn) is timm.layers.Attention


def test_none_removes_the_table_and_keeps_prefix_tokens():
    model = equip(small(reg_tokens=4), "none")
    assert model.pos_embed is None
    assert model.forward_features(images()).shape[1] == 1 + 4 + 16
    shuffled = images().unfold(2, 8, 8).unfold(3, 8, 8)  # patches [batch, channel, 4, 4, 8, 8]
    shuffled = shuffled.flip(2).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    torch.testing.assert_close(model(images()), model(shuffled), rtol=1e-4, atol=1e-5)


def test_keep_own():
    model = small()
    before = model(images())
    table = model.pos_embed
    equip(model, "irpe", keep_own=True)
    assert model.pos_embed is table
    torch.testing.assert_close(model(images()), before, rtol=1e-5, atol=1e-6)
    assert describe(model).own == (("pos_embed", 17 * 24),)


def test_without_positions_it_is_timm_with_masks_and_causal_too():
    plain = small(pos_embed="none")
    model = equip(copy.deepcopy(plain), partial(IRPE, on="qkv"))
    mask = torch.rand(2, 1, 17, 17, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[..., 0] = True
    for options in ({"attn_mask": mask}, {"is_causal": True}, {"attn_mask": torch.randn(17, 17)}):
        torch.testing.assert_close(model(images(), **options), plain(images(), **options), rtol=1e-5, atol=1e-6)


def test_peg_stands_after_the_blocks_named():
    plain = equip(small(), "none")
    model = equip(small(), "peg(after=1)")
    tokens = model._pos_embed(model.patch_embed(images()))
    assert torch.equal(tokens, plain._pos_embed(plain.patch_embed(images())))
    peg = model.blocks[2].encodings[0]
    assert isinstance(peg, PEG)
    x = model.blocks[1](model.blocks[0](tokens))
    expected = plain.blocks[2](peg.tokens(x, Grid(4, 4, 1)))
    torch.testing.assert_close(model.blocks[2](x), expected)
    assert not len(model.blocks[1].encodings)


def test_every_parameter_is_in_one_group_and_encodings_do_not_decay():
    model = equip(small(), "learned + peg + irpe(on='qkv')")
    encodings = {id(p) for m in model.modules() if isinstance(m, PositionEncoding) for p in m.parameters()}
    assert len(encodings) == 1 + 2 + 3 * 3
    for groups in (
        param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay()),
        param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay()),
    ):
        seen = [id(p) for group in groups for p in group["params"]]
        assert sorted(seen) == sorted(id(p) for p in model.parameters())
        still = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
        assert encodings <= still
    assert {"cls_token", "pos_embed"} <= model.no_weight_decay()


def test_layer_decay_puts_first_encodings_into_the_stem():
    model = equip(small(), "learned + irpe")
    groups = param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert scale[id(model.encodings[0].table)] == scale[id(model.patch_embed.proj.weight)]
    table = model.blocks[0].attn.encodings[0].tables["k"]
    assert scale[id(table)] == scale[id(model.blocks[0].attn.qkv.weight)]


@pytest.mark.parametrize("text", ["learned + irpe(on='qkv')", "peg", "sincos2d"])
def test_copies_are_independent_and_equal(text):
    model = equip(small(), text)
    randomise(model)
    expected = model(images())
    expected.sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(twin) is type(model)
        torch.testing.assert_close(twin(images()), expected)
        assert twin.place is not model.place
        assert twin.place is twin.blocks[0].attn.place if "irpe" in text else True
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
    torch.testing.assert_close(model(images()), expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    model = equip(small(dynamic_img_size=True), "learned + peg + irpe(on='qkv')").train()
    randomise(model)
    twin = copy.deepcopy(model)
    twin.set_grad_checkpointing()
    for one in (model, twin):
        one(images(40, 24)).square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_checkpointed_backward_after_forwards_at_other_sizes():
    """24 x 40 and 40 x 24 have as many tokens: nothing but the grid tells them apart."""
    model = equip(small(dynamic_img_size=True), "learned + peg + irpe(on='qkv')").train()
    randomise(model)
    sizes = [(24, 40), (40, 24), (32, 32)]
    expected = []
    for height, width in sizes:
        model(images(height, width)).square().sum().backward()
        expected.append(gradients(model))
    for features in (False, True):
        model.set_grad_checkpointing()
        read = model.forward_intermediates if features else model
        outputs = [read(images(height, width)) for height, width in sizes]
        for out, wanted in zip(outputs, expected, strict=True):
            out = model.forward_head(out[0]) if features else out
            out.square().sum().backward()
            found = gradients(model)
            for name, gradient in wanted.items():
                torch.testing.assert_close(found[name], gradient, msg=name)


def test_checkpointed_backward_on_another_thread():
    """As on GPUs, where backward has a thread of its own."""
    model = equip(small(dynamic_img_size=True), "peg + irpe(on='qkv')").train()
    randomise(model)
    model(images(24, 40)).square().sum().backward()
    expected = gradients(model)
    model.set_grad_checkpointing()
    loss = model(images(24, 40)).square().sum()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_checkpointing_compiles_whole():
    model = equip(small(dynamic_img_size=True, depth=2), "peg + irpe(on='qkv')").train()
    randomise(model)
    model(images(24, 40)).square().sum().backward()
    expected = gradients(model)
    model.set_grad_checkpointing()
    torch.compile(model, fullgraph=True, backend="aot_eager")(images(24, 40)).square().sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_checkpointing_that_was_on_stays_on():
    model = small(dynamic_img_size=True).train()
    model.set_grad_checkpointing()
    calls = []
    equip(model, "irpe").blocks[1].norm1.register_forward_hook(lambda *_: calls.append(1))
    model(images()).sum().backward()
    assert len(calls) == 2
    model.set_grad_checkpointing(False)
    model(images()).sum().backward()
    assert len(calls) == 3


def test_threads_may_use_one_model_at_different_sizes():
    """One thread stops inside its forward while another runs a whole one."""
    model = equip(small(dynamic_img_size=True), "peg + irpe(on='qkv')")
    randomise(model)
    sizes = [(24, 40), (40, 24)]
    expected = [model(images(*size)) for size in sizes]
    inside, go_on = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(timeout=60)

    model.blocks[0].norm1.register_forward_hook(stop)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(model, images(*sizes[0]))
        assert inside.wait(timeout=60)
        torch.testing.assert_close(model(images(*sizes[1])), expected[1])
        go_on.set()
        torch.testing.assert_close(slow.result(timeout=60), expected[0])


def test_forward_intermediates():
    model = equip(small(), "learned + irpe(on='qkv')")
    randomise(model)
    last, features = model.forward_intermediates(images(), indices=2)
    assert [tuple(f.shape) for f in features] == [(2, 24, 4, 4)] * 2
    torch.testing.assert_close(last, model.forward_features(images()))


def test_compile_is_one_graph_and_follows_the_size():
    model = equip(small(dynamic_img_size=True), "learned + peg + irpe(on='qkv')")
    randomise(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for height, width in [(32, 32), (24, 40), (48, 16)]:
        torch.testing.assert_close(compiled(images(height, width)), model(images(height, width)))


@pytest.mark.parametrize(
    "text", ["learned + peg + irpe(on='qkv')", "sincos2d + irpe(method='quant', quant='rank')"]
)
def test_export_with_any_batch_height_and_width(text):
    model = equip(small(dynamic_img_size=True), text)
    randomise(model)
    size = {0: torch.export.Dim("batch", max=64)}
    size |= {axis: 8 * torch.export.Dim(name, min=2, max=64) for axis, name in ((2, "height"), (3, "width"))}
    exported = torch.export.export(model, (images(),), dynamic_shapes=(size,)).module()
    for height, width, batch in [(32, 32, 2), (24, 64, 3), (40, 16, 1)]:
        torch.testing.assert_close(exported(images(height, width, batch)), model(images(height, width, batch)))


def test_autocast_and_half_precision():
    model = equip(small(qk_norm=True), "learned + peg + irpe(on='qkv')")
    randomise(model)
    exact = model(images())
    with torch.autocast("cpu", torch.bfloat16):
        low = model(images())
    assert low.dtype == torch.bfloat16
    scale = exact.abs().max()
    assert (low - exact).abs().max() < 0.1 * scale  # a few roundings of 2**-8 in each of three blocks
    assert (model.bfloat16()(images().bfloat16()) - exact).abs().max() < 0.1 * scale


def test_meta_device_then_weights():
    reference = equip(small(), "learned + irpe(on='qkv') + peg")
    randomise(reference)
    with torch.device("meta"):
        model = equip(small(), "learned + irpe(on='qkv') + peg")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").load_state_dict(reference.state_dict())
    torch.testing.assert_close(model(images()), reference(images()))


def test_dtype_and_mode_of_the_model_are_taken_over():
    model = equip(small().double().train(), "learned + irpe + peg")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in equip(small(), "learned + irpe").modules())


def test_timms_init_weights_starts_encodings_anew():
    model = equip(small(), "learned + irpe")
    randomise(model)
    model.init_weights()
    assert model.blocks[0].attn.encodings[0].tables["k"].abs().max() == 0
    assert 0 < model.encodings[0].table.std() < 0.03


def test_wrapped_projections_and_frozen_weights_keep_working():
    class Adapted(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear, self.low = linear, nn.Linear(linear.in_features, linear.out_features, bias=False)

        def forward(self, x):
            return self.linear(x) + self.low(x)

    model = small().requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = Adapted(block.attn.qkv)
    equip(model, "irpe(on='qkv')").train()
    model(images()).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in model.named_parameters() if ".low." in n or ".encodings." in n}


def snapshot(model: nn.Module):
    return (
        {name: type(module) for name, module in model.named_modules()},
        {name: (id(p), p.requires_grad) for name, p in model.named_parameters()},
    )


class Exploding(PositionEncoding):
    """Fits the first two blocks, not the third."""

    built = 0

    def __init__(self, dim, num_heads, grid):
        super().__init__(dim, num_heads, grid)
        type(self).built += 1
        if type(self).built == 4:
            raise RuntimeError("no memory left")

    def biases(self, q, k, queries, keys):
        return ()


@pytest.mark.parametrize(
    ("encoding", "options", "match"),
    [
        ("irpe(on='x')", {}, "on='x'"),
        ("learned + peg(after=2)", {}, "after=2"),
        ("no_such", {}, "unknown encoding 'no_such'"),
        (Exploding, {}, "no memory left"),
        ([], {}, "expected a text"),
        (5, {}, "encoding=5, expected a text"),
        (["learned", "irpe"], {}, "expected a text"),
        (IRPE(24, 3, Grid(4, 4, 1)), {}, "IRPE is built already, .*give the class"),
        (lambda dim, heads, grid: nn.Identity(), {}, "expected a PositionEncoding"),
        ("sincos2d", {"embed_dim": 30, "num_heads": 5}, "multiple of 4"),
    ],
)
def test_a_failure_leaves_the_model_as_it_was(encoding, options, match):
    Exploding.built = 0
    model = small(**options)
    before, expected = snapshot(model), model(images())
    with pytest.raises((InputError, RuntimeError), match=match):
        equip(model, encoding)
    assert snapshot(model) == before
    assert torch.equal(model(images()), expected)


@pytest.mark.parametrize("encoding", ["learned", "learned + irpe(on='qkv')", "sincos2d + lepe", "peg"])
def test_dropped_patches(encoding):
    """Each image's patches know where they are: dropped and masked are the same (a convolution sees zeros)."""
    torch.manual_seed(0)
    model = equip(small(patch_drop_rate=0.5, depth=1 if encoding != "peg" else 2), encoding).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    heard = []
    model.blocks[0].register_forward_hook(
        lambda block, given, out: heard.append((block.place.grid, given[0], out))
    )
    out = model(images())
    assert out.shape == (2, 5)
    out.sum().backward()
    assert all(p.grad is not None for e in encodings_of(model) for p in e.parameters())
    grid, given, got = heard[0]
    whole = model.home_grid
    assert grid.patches == whole.patches // 2
    index = torch.cat([torch.zeros(2, 1, dtype=torch.long), grid.raster() + 1], 1)[..., None].expand_as(given)
    full = torch.zeros(2, whole.tokens, given.shape[-1]).scatter(1, index, given)
    allowed = torch.zeros(2, 1, 1, whole.tokens, dtype=torch.bool).scatter(-1, index[:, None, None, :, 0], True)
    if "lepe" not in encoding:  # its convolution is on values, which are not zero where tokens are
        model.place.grid = whole
        expected = model.blocks[0](full, attn_mask=allowed).gather(1, index)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.eval()(images()), model(images())), "nothing is dropped in evaluation"


def encodings_of(model):
    return [module for module in model.modules() if isinstance(module, PositionEncoding)]


class OwnAttention(timm.layers.Attention):
    """It may do what it likes."""


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Linear(2, 2), "Linear is none of the models that are known"),
        (lambda: torch.compile(small()), "before torch.compile"),
        (lambda: equip(small(), "learned"), "has 'learned' already"),
        (lambda: small(embed_layer=partial(timm.layers.PatchEmbed, strict_img_size=False)),
         "dynamic_img_size=True"),
        (lambda: small(attn_layer=OwnAttention), "a Block, which has none that takes it"),
    ],
)  # fmt: skip
def test_models_that_cannot(make, match):
    with pytest.raises(InputError, match=match):
        equip(make(), "irpe")


def test_an_encoding_that_asks_for_a_block_that_is_not_there():
    class Late(Exploding):
        def blocks(self, depth):
            return [depth]

    model = small()
    before = snapshot(model)
    with pytest.raises(InputError, match="block 3 of the 3"):
        equip(model, Late)
    assert snapshot(model) == before


def test_a_block_that_stands_twice_is_refused():
    model = small()
    model.blocks[1] = model.blocks[0]
    before = snapshot(model)
    with pytest.raises(InputError, match="several places"):
        equip(model, "irpe")
    assert snapshot(model) == before


def test_a_model_of_ones_own_class():
    class Mine(timm.models.VisionTransformer):
        pass

    model = equip(Mine(**SMALL), "learned + irpe")
    assert isinstance(model, Mine)
    assert type(model).__name__ == "EquippedMine"
    assert model(images()).shape == (2, 5)


def test_an_encoding_that_speaks_twice_is_one_module_in_two_places():
    class Both(PositionEncoding):
        def __init__(self, dim, num_heads, grid):
            super().__init__(dim, num_heads, grid)
            self.shift = nn.Parameter(torch.ones(dim))

        def tokens(self, x, grid):
            return x + self.shift

        def biases(self, q, k, queries, keys):
            return ()

    model = equip(small(), Both)
    assert model.encodings[0] is model.blocks[0].attn.encodings[0]
    assert model.blocks[1].encodings[0] is model.blocks[1].attn.encodings[0]
    assert sum(p.numel() for n, p in model.named_parameters() if n.endswith("shift")) == 3 * 24


def test_describe_says_what_sits_where():
    found = describe(equip(small(), "learned + irpe(on='qkv') + peg(after=(0, 1))"))
    assert found.grid == Grid(4, 4, 1)
    assert found.own == ()
    assert [seat.where for seat in found.seats] == [
        "", "blocks.0.attn", "blocks.1", "blocks.1.attn", "blocks.2", "blocks.2.attn",
    ]  # fmt: skip
    assert found.seats[0].moments == ("tokens",)
    assert found.seats[0].parameters == 17 * 24
    assert found.seats[1].moments == ("biases", "values")
    assert found.seats[1].parameters == 3 * 50 * 8
    text = str(found)
    assert "Grid(height=4, width=4, prefix=1)" in text
    assert "blocks.0.attn ... blocks.2.attn" in text
    assert "3 x 1,200" in text
    with pytest.raises(InputError, match="not equipped"):
        describe(small())


def test_learned_keeps_rows_it_can_keep():
    own = small("deit3_small_patch16_224")  # its class token has no row
    table = own.pos_embed[0].detach().clone()
    learned = equip(own, "learned").encodings[0]
    assert isinstance(learned, Learned)
    assert torch.equal(learned.table[1:], table)
    assert learned.table[0].abs().max() == 0
    own = small()
    table = own.pos_embed[0].detach().clone()
    learned = equip(own, "learned(prefix_rows=False)").encodings[0]
    assert torch.equal(learned.table, table[1:])


def test_grid_mismatch_is_an_error():
    model = equip(small(), "irpe")
    model.place.grid = Grid(4, 5, 1)
    with pytest.raises(InputError, match="17 tokens"):
        model.blocks(torch.randn(1, 17, 24))


def test_no_images_at_all():
    model = equip(small(), "learned + swin + rope_axial")
    assert model(images()[:0]).shape == (0, 5)
