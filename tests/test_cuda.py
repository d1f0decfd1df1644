"""On a GPU: values and gradients against the definition in float64 on the CPU, a model, a training step."""

import copy
from dataclasses import replace

import pytest
import timm
import torch

from whereformer import Grid, PositionEncoding, attention, equip, parse
from whereformer.lab.data import load
from whereformer.lab.experiment import ENCODINGS, Experiment
from whereformer.lab.measure import measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = [
    *("irpe(on='qkv')", "irpe(mode='bias', shared=False)", "irpe(method='cross', on='qk')", "learned", "peg"),
    *(
        "rope_axial(scaling='yarn')",
        "rope_mixed",
        "dinov3(rescale=None)",
        "vjepa2(pairing='repeated')",
        "liere(block=4)",
    ),
]


@pytest.fixture(autouse=True)
def exact_products():
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


def results(encoding: PositionEncoding, inputs: list[torch.Tensor], grid: Grid, mask: torch.Tensor, backend: str):
    x, q, k, v = (tensor.detach().requires_grad_() for tensor in inputs)
    out = attention(q, k, v, grid, [encoding], mask=mask, backend=backend)
    tokens = encoding.tokens(x, grid)
    sources = [x, q, k, v, *encoding.parameters()]
    total = out.square().sum() + tokens.square().sum()
    return [out, tokens, *torch.autograd.grad(total, sources, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("spec", SPECS)
def test_as_the_definition_on_the_cpu(spec, backend):
    grid = Grid(5, 7, prefix=1)
    (factory,) = parse(spec)
    encoding = factory(32, 4, grid).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    shapes = [(2, grid.tokens, 32)] + 3 * [(2, 4, grid.tokens, 8)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    mask = torch.rand(2, 1, grid.tokens, grid.tokens) > 0.3
    mask[:, :, 3] = False
    expected = results(encoding, inputs, grid, mask, "reference")
    there = copy.deepcopy(encoding).float().cuda()
    got = results(there, [tensor.float().cuda() for tensor in inputs], grid, mask.cuda(), backend)
    for one, other in zip(got, expected, strict=True):
        # 512 float32 roundings of sums over features, tokens and batch
        bound = 512 * torch.finfo(torch.float32).eps * max(1.0, other.abs().max().item())
        assert (one.cpu().double() - other).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_under_autocast_and_compiled(dtype):
    model = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True)
    model = equip(model, "learned + peg + irpe(on='qkv')").cuda().eval()
    image = torch.randn(2, 3, 160, 96, device="cuda")
    with torch.autocast("cuda", dtype):
        expected = model(image)
        compiled = torch.compile(model, fullgraph=True)(image)
    assert expected.isfinite().all()
    assert (compiled - expected).abs().max() < 0.05 * expected.abs().max()


def test_cost_of_a_training_step():
    experiment = replace(Experiment(), encodings=ENCODINGS[:2])
    costs = measure(experiment, load(experiment), torch.device("cuda"), seconds=0)
    assert costs["none"].memory == 1
    assert costs["learned"].memory >= 1
