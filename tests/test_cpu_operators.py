"""The kernel as part of torch: its operators, compiled, exported, under modes and in processes."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_calls import compiled
from loops import close, same_gradients
from test_attention import BATCH, GRID, HEAD_DIM, HEADS, TOKENS, some_mask
from test_cpu_backend import qkv, some
from test_forms import Largest
from whereformer import Grid, attention
from whereformer.backends import kernel, lookups
from whereformer.backends.kernel import Arguments

pytestmark = compiled

TOGETHER = "irpe(on='qkv') + rope_axial + swin + lepe + irpe(mode='bias')"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of opcheck's own
@pytest.mark.parametrize("text", ["none", "irpe(on='qkv')", TOGETHER, "rope_mixed + irpe", "sasa"])
@pytest.mark.parametrize("mask_kind", ["none", "-inf"])
def test_operators_are_what_they_say(text: str, mask_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake kernels, autograd and tracing, by torch's own check."""
    found: list[Arguments] = []
    monkeypatch.setattr(kernel, "attention", lambda a: (found.append(a), torch.zeros(()))[1])
    mask = some_mask(mask_kind)[0]
    q, k, v = qkv(GRID)
    attention(q, k, v, GRID, some(text), mask=None if mask is None else mask.detach().float(), backend="cpu")
    (a,) = found

    def leaves(x: object, wants: bool) -> object:
        if isinstance(x, Tensor):
            return x.detach().requires_grad_(wants and x.requires_grad)
        return [leaves(y, wants) for y in x] if isinstance(x, list) else x

    forward = torch.ops.whereformer.attention.default
    torch.library.opcheck(forward, (*(leaves(x, True) for x in a), True))
    plain = [leaves(x, False) for x in a]
    torch.library.opcheck(forward, (*plain, False))
    out, lse = forward(*plain, True)
    wanted = [n % 2 == 0 for n in range(len(a.entries))]
    backward = torch.ops.whereformer.attention_backward.default
    torch.library.opcheck(backward, (torch.randn_like(out), out, lse, *plain, wanted))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    encodings = some(TOGETHER)
    torch.compiler.reset()

    def function(q: Tensor, k: Tensor, v: Tensor, height: int, width: int) -> Tensor:
        return attention(q, k, v, Grid(height, width, GRID.prefix), encodings, backend="cpu")

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for height, width in ((3, 2), (4, 5))[: 1 + dynamic]:
        grid = Grid(height, width, GRID.prefix)
        q, k, v = qkv(grid)
        sources = {"q": q, "k": k, "v": v} | {
            f"{n}.{name}": p for n, e in enumerate(encodings) for name, p in e.named_parameters()
        }
        same_gradients(compiled(q, k, v, height, width), function(q, k, v, height, width), sources)
    torch.compiler.reset()


class Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encodings = torch.nn.ModuleList(some(TOGETHER))

    def forward(self, image: Tensor) -> Tensor:
        """[batch, dim, height, width]."""
        x = image.flatten(2).mT.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        x = torch.nn.functional.pad(x, (0, 0, GRID.prefix, 0), value=0.5)
        grid = Grid(image.shape[2], image.shape[3], GRID.prefix)
        return attention(x, x.roll(1, -1), x, grid, list(self.encodings), backend="cpu")  # type: ignore[arg-type]


def test_exports_with_free_sizes() -> None:
    model = Exported().eval()
    free = {0: torch.export.Dim("batch", min=1, max=9)}
    free |= {2: torch.export.Dim("height", min=2, max=64), 3: torch.export.Dim("width", min=2, max=64)}
    with torch.no_grad():
        image = torch.randn(2, HEADS * HEAD_DIM, 3, 4)
        exported = torch.export.export(model, (image,), dynamic_shapes=(free,)).module()
        for batch, height, width in ((2, 3, 4), (1, 5, 2), (3, 7, 8)):
            image = torch.randn(batch, HEADS * HEAD_DIM, height, width)
            close(exported(image), model(image))


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = qkv(GRID)
    out = attention(q, k, v, GRID, some("irpe"), backend="cpu")
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward.*backend='reference'"):
        gradient.sum().backward()


def test_several_gradients_at_once_are_refused() -> None:
    """By the first call, and by one like those before."""
    q, k, v = qkv(GRID)
    encodings = some("irpe(on='qkv')")
    for _ in range(3):
        out = attention(q, k, v, GRID, encodings, backend="cpu")
        with pytest.raises(NotImplementedError, match=r"several.*backend='reference'"):
            torch.autograd.grad(out, (q, k, v), torch.randn(2, *out.shape), is_grads_batched=True)


def test_output_and_gradients_lie_as_models_want_them() -> None:
    """The output as [batch, tokens, heads, d], so that heads are joined without a copy; gradients as inputs."""
    whole = torch.randn(BATCH, TOKENS, 3, HEADS, HEAD_DIM, requires_grad=True)
    q, k, v = whole.permute(2, 0, 3, 1, 4).unbind(0)
    out = attention(q, k, v, GRID, some("irpe(on='qkv')"), backend="cpu")
    assert out.transpose(1, 2).is_contiguous()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.transpose(1, 2).is_contiguous() for g in gradients)


@pytest.mark.parametrize("where", ["features", "broadcast", "expanded gradient"])
def test_any_strides(where: str) -> None:
    q, k, v = qkv(GRID)
    expected = attention(q, k, v, GRID, some_irpe := some("irpe(on='qkv')"), backend="reference")
    if where == "features":
        q_, k_, v_ = (x.detach().mT.contiguous().mT for x in (q, k, v))
        close(attention(q_, k_, v_, GRID, some_irpe, backend="cpu"), expected)
    elif where == "broadcast":
        one = torch.randn(1, 1, TOKENS, HEAD_DIM).expand(BATCH, HEADS, -1, -1)
        close(
            attention(one, one, one, GRID, some_irpe, backend="cpu"),
            attention(one, one, one, GRID, some_irpe, backend="reference"),
        )
    else:
        got = attention(q, k, v, GRID, some_irpe, backend="cpu")
        for g, e in zip(
            torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
        ):
            close(g, e)


@pytest.mark.parametrize("which", ["q", "k", "v", "gradient"])
@pytest.mark.parametrize(
    "odd", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)], ids=["negatives", "zeros"]
)
def test_numbers_that_do_not_lie_in_memory(odd: Callable[[Tensor], Tensor], which: str) -> None:
    """Such as the imaginary part of a conjugate, or zeros that need no memory; called again, too."""
    encodings = some("irpe(on='qkv')")
    for _ in range(3):
        found = []
        for backend in ("cpu", "reference"):
            torch.manual_seed(0)
            given = dict(zip("qkv", (x.detach() for x in qkv(GRID)), strict=True))
            given["gradient"] = torch.randn_like(given["v"])
            given[which] = odd(given[which])
            *inputs, grad_out = [x.requires_grad_(name != "gradient") for name, x in given.items()]
            out = attention(*inputs, GRID, encodings, backend=backend)
            found.append([out, *torch.autograd.grad(out, [*inputs, *encodings[0].parameters()], grad_out)])
        for got, expected in zip(*found, strict=True):
            close(got, expected)


@pytest.mark.parametrize("text", ["irpe(on='qkv')", "swin", "decomposed", "rope_axial"])
def test_nothing_of_queries_times_keys_is_made(text: str) -> None:
    """Forward or backward: the largest tensor has a number for each token and feature, or for each offset."""
    grid = Grid(9, 9, prefix=1)
    q, k, v = qkv(grid)
    encodings = some(text, grid)
    with Largest() as largest:
        attention(q, k, v, grid, encodings, backend="cpu").sum().backward()
    assert largest.numel <= max(q.numel(), HEADS * 17 * 17)
    assert largest.numel < BATCH * grid.tokens**2


class Called(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_operator_is_there_for_all_who_look() -> None:
    """Modes and profilers see it; where nobody looks the kernel is called without it, with the same numbers."""
    q, k, v = qkv(GRID)
    encodings = some("irpe(on='qkv')")

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, GRID, encodings, backend="cpu")
        return out, *torch.autograd.grad(out.sum(), (q, k, v, *encodings[0].parameters()))

    plain = step()
    with Called() as called:
        looked_at = step()
    assert {"whereformer.attention.default", "whereformer.attention_backward.default"} <= set(called.names)
    with torch.profiler.profile() as profile:
        step()
    assert {"whereformer::attention", "whereformer::attention_backward"} <= {e.key for e in profile.key_averages()}
    with Called() as called, torch.inference_mode():
        inferred = attention(q, k, v, GRID, encodings, backend="cpu")
    assert "whereformer.attention.default" in called.names
    for one, other in zip(plain, looked_at, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain[0], inferred)


@pytest.mark.parametrize("where", ["k", "v", "table"])
def test_tensors_elsewhere_are_refused(where: str) -> None:
    """Their addresses mean nothing to the kernel."""
    tensors = {name: torch.zeros(BATCH, HEADS, TOKENS, HEAD_DIM) for name in "qkv"}
    (encoding,) = some("irpe")
    if where == "table":
        encoding = encoding.to("meta")
    else:
        tensors[where] = tensors[where].to("meta")
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match=r"\['cpu', 'meta'\], expected one device"),
        ):
            attention(*tensors.values(), GRID, [encoding], backend="cpu")


def test_maps_made_under_a_mode_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, encodings = Grid(2, 9), some("irpe")
    with Called():
        attention(x := torch.zeros(1, HEADS, 18, HEAD_DIM), x, x, grid, encodings, backend="cpu")
    made = 0
    mapping = lookups._made

    def counted(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return mapping(*arguments)

    monkeypatch.setattr(lookups, "_made", counted)
    for _ in range(2):
        attention(x, x, x, grid, encodings, backend="cpu")
    assert made == 1


def test_no_images_and_no_gradient() -> None:
    q, k, v = (torch.zeros(0, HEADS, TOKENS, HEAD_DIM, requires_grad=True) for _ in range(3))
    encodings = some("irpe(on='qkv')")
    out = attention(q, k, v, GRID, encodings, backend="cpu")
    assert out.shape == q.shape
    out.sum().backward()
    assert all(not p.grad.any() for p in encodings[0].parameters() if p.grad is not None)


def test_trains_after_inference_mode() -> None:
    q, k, v = qkv(GRID)
    encodings = some(TOGETHER)
    with torch.inference_mode():
        expected = attention(q, k, v, GRID, encodings, backend="cpu")
    out = attention(q, k, v, GRID, encodings, backend="cpu")
    close(out, expected)
    out.sum().backward()


def test_under_autocast() -> None:
    """Tokens go in as bfloat16, tables stay float32."""
    q, k, v = qkv(GRID)
    encodings = some("irpe(on='qkv')")
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, GRID, encodings, backend="cpu")
        plain = attention(q, k, v, GRID, backend="reference")
    assert out.dtype == plain.dtype == torch.bfloat16
    out.float().sum().backward()
    for x in (q, *encodings[0].parameters()):
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
    halves = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), GRID, encodings, backend="cpu")
    assert (halves - out).abs().max() <= torch.finfo(torch.bfloat16).eps * out.abs().max()


def _on_its_part(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Exported())
    images = torch.randn(2, HEADS * HEAD_DIM, 3, 4)
    model(images[rank : rank + 1]).sum().backward()
    if rank == 0:
        results.update({name: p.grad for name, p in model.module.named_parameters()})
    torch.distributed.destroy_process_group()


def test_two_processes_share_their_gradients(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_on_its_part, (str(tmp_path / "store"), results), nprocs=2)
        got = dict(results)
    torch.manual_seed(0)
    model, images = Exported(), torch.randn(2, HEADS * HEAD_DIM, 3, 4)
    (model(images).sum() / 2).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        close(got[name], parameter.grad)
