"""What users of other libraries have met and no other file tests: averages, ranks, masks in half, one query."""

import itertools
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loops import close
from test_forms import Largest
from whereformer import Grid, InputError, PositionEncoding, Windows, attention, encode, parse
from whereformer.catalog import CATALOG
from whereformer.encodings import IRPE, RoPEAxial
from whereformer.testing import subjects


def build(name: str) -> PositionEncoding:
    (factory,) = parse(name)
    return subjects(factory)[0].make()


def output(encoding: PositionEncoding, height: int = 5, width: int = 2) -> Tensor:
    frames = encoding.grid.frames
    grid = Grid(height, width, encoding.grid.prefix, frames)
    x = torch.randn(2, grid.tokens, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = encode(x, grid, [encoding])
    q = x.unflatten(-1, (3, 8)).transpose(1, 2)
    return attention(q, q, q, grid, [encoding])


@pytest.mark.parametrize("name", CATALOG)
def test_averaged_weights_are_used_at_once(name: str) -> None:
    """Another library's averaged model kept, in eval, the biases of its first validation."""
    model = build(name)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        output(average.module)  # validation
        optimizer.zero_grad()
        output(model.train()).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
    fresh = build(name)
    fresh.load_state_dict(average.module.state_dict())
    assert torch.equal(output(average.module), output(fresh))
    assert not torch.equal(output(average.module), output(build(name))), "training moved it"


RANKS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from whereformer import Grid, attention, encode, parse

def rank(number, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=number, world_size=2)
    torch.manual_seed(0)
    home = Grid(3, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            factories = parse("learned + sincos2d + peg + irpe(on='qkv') + rope_axial")
            self.encodings = torch.nn.ModuleList(factory(16, 2, home) for factory in factories)
            self.norm = torch.nn.BatchNorm1d(16)  # its buffers are broadcast, and so would be any others

        def forward(self, x, grid):
            q = encode(x, grid, self.encodings).unflatten(-1, (2, 8)).transpose(1, 2)
            out = attention(q, q, q, grid, self.encodings).transpose(1, 2).flatten(2)
            return self.norm(out.flatten(0, 1))

    model = Model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        grid = Grid(2 + step // 2, 3 + 2 * number)  # each twice
        x = torch.randn(2, grid.tokens, 16, generator=torch.Generator().manual_seed(10 * step + number))
        optimizer.zero_grad()
        out = wrapped(x, grid)
        fresh = Model()
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(out, fresh(x, grid))
        out.square().sum().backward()
        optimizer.step()
    numbers = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(numbers) for _ in range(2)]
    dist.all_gather(both, numbers)
    assert torch.equal(*both)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_ranks_with_images_of_different_sizes(tmp_path: Path) -> None:
    """A table that follows the size of the input, kept as a buffer, is overwritten by the first rank's."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, script, tmp_path / "store"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shifted_windows_keep_the_dtype(dtype: torch.dtype) -> None:
    """Masks written as float32 promote a block in half precision, or stop it."""
    windows = Windows(Grid(5, 6), (3, 3), (1, 2))
    x = windows.split(torch.randn(2, 30, 8)).to(dtype)
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    encoding = IRPE(8, 2, windows.one, on="k")
    for backend in ("reference", "sdpa"):
        out = attention(q, q, q, windows.one, [encoding], mask=windows.mask(2), backend=backend)
        assert out.dtype == dtype
        exact = attention(*[q.double()] * 3, windows.one, [encoding.double()], mask=windows.mask(2))
        encoding.float()
        scale = 16 * torch.finfo(dtype).eps * q.double().abs().max()
        assert (out.double() - exact).abs().max() <= scale


def test_a_query_beside_its_keys_says_where_it_is() -> None:
    """One query, five keys: refused unless both say where they are; then it is the row it would be there."""
    keys, rope = Grid(1, 5), RoPEAxial(8, 1, Grid(1, 5)).double()
    q, k, v = (torch.randn(1, 1, 5, 8, dtype=torch.float64) for _ in range(3))
    with pytest.raises(InputError, match="q has 1 tokens"):
        attention(q[:, :, 3:4], k, v, keys, [rope])
    whole = attention(q, k, v, keys, [rope])
    for place in range(5):
        one = keys.keep(torch.tensor([[place]]))
        here = slice(place, place + 1)
        close(attention(q[:, :, here], k, v, one, [rope], keys=keys), whole[:, :, here])
    first = attention(q[:, :, :1], k, v, Grid(1, 1), [rope], keys=keys)
    close(first, whole[:, :, :1])


@pytest.mark.parametrize(("height", "width"), [(16, 16), (16, 32), (48, 48)])
def test_memory_of_values_grows_with_pairs_and_buckets(height: int, width: int) -> None:
    """Not with pairs times features: 64 of them would be 64 times as much."""
    grid = Grid(height, width)
    encoding = IRPE(64, 1, grid, on="v").to("meta")
    v = torch.empty(1, 1, grid.tokens, 64, device="meta", requires_grad=True)
    with Largest() as largest:
        attention(v, v, v, grid, [encoding]).sum().backward()
    assert largest.numel == grid.tokens * max(grid.tokens, 50)


def test_no_encoding_keeps_more_for_every_size_it_has_seen() -> None:
    """Caches with one entry for each size grew until the machine stood still."""
    encodings = [factory(16, 2, Grid(3, 4)) for factory in parse("learned + sincos2d + irpe + rope_axial")]
    sizes = [len(pickle.dumps(e)) for e in encodings]
    for height, width in itertools.product(range(1, 12), repeat=2):
        grid = Grid(height, width)
        q = encode(torch.zeros(1, grid.tokens, 16), grid, encodings).unflatten(-1, (2, 8)).transpose(1, 2)
        attention(q, q, q, grid, encodings)
    assert sizes == [len(pickle.dumps(e)) for e in encodings]


@pytest.mark.parametrize("text", ["fourier", "nd_rope"])
def test_constants_stay_when_a_recipe_unfreezes_everything(text: str) -> None:
    (factory,) = parse(text)
    encoding = factory(96, 4, Grid(2, 3)).requires_grad_(True)
    before = {name: value.clone() for name, value in encoding.state_dict().items()}
    x, q = torch.randn(1, 6, 96, requires_grad=True), torch.randn(1, 4, 6, 24, requires_grad=True)
    out = encode(x, Grid(2, 3), [encoding]).square().sum()
    (out + attention(q, q, q, Grid(2, 3), [encoding]).square().sum()).backward()
    torch.optim.AdamW(encoding.parameters(), lr=1.0).step()
    assert all(torch.equal(value, before[name]) for name, value in encoding.state_dict().items())
