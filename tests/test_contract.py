"""The contract over the catalog, and that it can be broken."""

import functools
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import spellings
from whereformer import (
    AxisBias,
    DenseBias,
    Grid,
    InputError,
    LowRankBias,
    MatrixRotation,
    OffsetBias,
    PositionEncoding,
    Rotation,
    parse,
)
from whereformer.catalog import CATALOG
from whereformer.encodings import Learned, SinCos2D
from whereformer.testing import PROMISES, SLOW, Promise, check_encoding, graphs, numbers, places, sizes, state


@pytest.mark.parametrize("text", spellings.ALL)
def test_the_catalog_keeps_its_promises(text: str) -> None:
    (factory,) = parse(text)
    check_encoding(factory, compile=text in spellings.COMPILED)


def test_all_of_the_catalog_is_held_to_them() -> None:
    assert {text.split("(")[0] for text in spellings.ALL} >= set(CATALOG)
    assert set(spellings.ALL) >= spellings.COMPILED


class Fine(PositionEncoding):
    """Lives elsewhere, speaks through rotations and the biases that can be features, and keeps its promises."""

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.frequencies = nn.Parameter(torch.ones(num_heads, 2))
        self.slopes = nn.Parameter(torch.ones(num_heads))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.frequencies)
        nn.init.ones_(self.slopes)

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation]:
        places = grid.coords(self.frequencies.device).unsqueeze(-3)  # [(b,) 1, patches, axes]
        yield Rotation((places * self.frequencies.float()[:, None]).sum(-1, keepdim=True))

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[LowRankBias | AxisBias]:
        yield LowRankBias(q[..., :1] * self.slopes.to(q.dtype)[:, None, None], k[..., :1])
        yield AxisBias(q[..., :1].expand(*q.shape[:-1], keys.height), q.new_zeros(1, 1, 1, keys.width), keys)


def test_an_encoding_that_lives_elsewhere() -> None:
    check_encoding(Fine)


# ---------------------------------------------------------------------------------------------------------------
# Encodings that break one promise each.


class SquareOnly(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        side = int(grid.patches**0.5)
        return super().tokens(x, Grid(side, side, grid.prefix))


class DeadParameter(Learned):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.unused = nn.Parameter(torch.ones(1))


class TellsAnotherMoment(SinCos2D):
    def moments(self) -> tuple[str, ...]:
        return ("biases",)


class BlocksThatAreNot(SinCos2D):
    def blocks(self, depth: int) -> list[int]:
        return [depth]


class SavesItsIndex(SinCos2D):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.register_buffer("index", torch.arange(grid.patches))


class BufferFollowsInput(SinCos2D):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        self.seen = torch.zeros(grid.tokens)
        return super().tokens(x, grid)


class DoesNotCount(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        table = self.table(grid).to(x.dtype)
        return torch.cat([x[:, : grid.prefix], x[:, grid.prefix :] + table[: x.shape[1] - grid.prefix]], 1)


class StumblesOverPrefix(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        if grid.prefix != self.grid.prefix:
            raise RuntimeError("shapes do not match")
        return super().tokens(x, grid)


class TouchesPrefix(SinCos2D):
    """Adds positions before it knows which tokens are patches."""

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        grid.check(x.shape[1], "x")
        return x + self.table(Grid(1, grid.tokens)).to(x.dtype)


class PatchesSeePrefix(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        grid.check(x.shape[1], "x")
        patches = x[:, grid.prefix :] + self.table(grid).to(x.dtype)
        return torch.cat([x[:, : grid.prefix], patches + x[:, : grid.prefix].sum(1, keepdim=True)], 1)


class SeesTheBatch(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        patches = x[:, grid.prefix :]
        centred = torch.cat([x[:, : grid.prefix], patches - patches.mean(0)], 1)
        return super().tokens(centred, grid)


class ForbidsFarPairs(PositionEncoding):
    """-inf leaves nothing where a mask forbids the near ones."""

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[DenseBias]:
        place = torch.arange(keys.tokens)
        far = (place[:, None] - place).abs() > 1
        yield DenseBias(torch.zeros(keys.tokens, keys.tokens, dtype=q.dtype).masked_fill(far, -torch.inf))


class Doubled(LowRankBias):
    def dense(self) -> Tensor:
        return 2 * super().dense()


class SaysTwoThings(PositionEncoding):
    """One to the reference, another to backends that read its factors."""

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[LowRankBias]:
        yield Doubled(q[..., :1], k[..., :1])


class PromotesTokens(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        grid.check(x.shape[1], "x")
        return torch.cat([x[:, : grid.prefix], x[:, grid.prefix :] + self.table(grid)], 1)


class AnglesInHalf(Fine):
    """Counts in the dtype of its parameters."""

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation]:
        places = grid.coords(self.frequencies.device).unsqueeze(-3).to(self.frequencies.dtype)
        yield Rotation((places * self.frequencies[:, None]).sum(-1, keepdim=True))


class AnglesUnderAutocast(Fine):
    """Its matrix product is autocast."""

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation]:
        places = grid.coords(self.frequencies.device).float()
        yield Rotation((self.frequencies.float() @ places.mT)[..., None].float())


class RemembersBias(PositionEncoding):
    """Takes in eval the value that its slopes had at first."""

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.slopes = nn.Parameter(torch.ones(num_heads))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.slopes)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[DenseBias]:
        if self.training or not hasattr(self, "first"):
            self.first = self.slopes.detach().clone()
        slopes = self.first + self.slopes - self.slopes.detach()
        place = torch.arange(keys.tokens)
        yield DenseBias(slopes[:, None, None] * (place[:, None] - place).abs())


class CountsPatchesAlone(SinCos2D):
    """Its cache takes 4 x 3 for 3 x 4."""

    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        cache = self.__dict__.setdefault("cache", {})
        if grid.patches not in cache:
            cache[grid.patches] = super().table(grid, device)
        return cache[grid.patches]


class KeepsItsGraph(Learned):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        self.last = self.table * 2
        return super().tokens(x, grid)


class CachesInferenceTensors(SinCos2D):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.scale = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        cache = self.__dict__.setdefault("cache", {})
        if grid not in cache:
            cache[grid] = super().table(grid, device)
        return cache[grid] * self.scale.float()


class WritesOnItself(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        self.last_grid = grid
        return super().tokens(x, grid)


class IsKeptByItsCache(SinCos2D):
    @functools.lru_cache  # noqa: B019
    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:  # type: ignore[override]
        with torch.inference_mode(False):
            return super().table(grid, device)


class FillsBuffersAtBirth(PositionEncoding):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.register_buffer("slopes", 2.0 ** -torch.arange(num_heads), persistent=False)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[DenseBias]:
        distance = torch.arange(keys.tokens) - torch.arange(keys.tokens)[:, None]
        yield DenseBias(-self.get_buffer("slopes")[:, None, None] * distance.abs())


class LeavesTheGraph(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        torch._dynamo.graph_break()
        return super().tokens(x, grid)


class SaysVideos(SinCos2D):
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        if grid.frames is not None:
            raise InputError("no videos")
        super().__init__(dim, num_heads, grid)


class TakesAVideoForAnImage(SinCos2D):
    axes = (2, 3)

    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        return super().table(grid if grid.axes == 2 else Grid(grid.height, grid.width), device)


class FreezesItsIndex(Fine):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.index = nn.Parameter(torch.arange(3.0), requires_grad=False)


class FillsItselfAtBirth(Fine):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.slopes)


class Dithers(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        patches = super().tokens(x, grid)[:, grid.prefix :]
        return torch.cat([x[:, : grid.prefix], patches + 1e-14 * torch.randn_like(patches)], 1)


class AsksForMemoryInOrder(PositionEncoding):
    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[LowRankBias]:
        yield LowRankBias(q.view(*q.shape[:2], -1).view(q.shape)[..., :1], k[..., :1])


class TurnsByComplexNumbers(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        patches = super().tokens(x, grid)[:, grid.prefix :]
        turns = torch.polar(torch.ones(patches.shape), torch.ones(patches.shape))
        return torch.cat([x[:, : grid.prefix], (patches * turns).real.to(x.dtype)], 1)


class SlowAnglesInHalf(Fine):
    """Off by too little to see in a cosine, but neighbours fall together."""

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation]:
        places = grid.coords(self.frequencies.device).unsqueeze(-3).to(self.frequencies.dtype).float()
        yield Rotation((places * self.frequencies.float()[:, None]).sum(-1, keepdim=True) * 1e-3)


class StaysOnTheCPU(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        grid.check(x.shape[1], "x")
        rows = torch.cat([x.new_zeros(grid.prefix, self.dim, device="cpu"), self.table(Grid(1, grid.patches))])
        return x + rows.to("cpu", x.dtype)


WORKSPACE = torch.zeros(1, dtype=torch.float64)


class SharesAWorkspace(SinCos2D):
    """The second image overwrites what the first one's gradients need."""

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        WORKSPACE.fill_(0.5 / grid.height)
        patches = super().tokens(x, grid)[:, grid.prefix :]
        return torch.cat([x[:, : grid.prefix], patches * WORKSPACE.to(x)], 1)


class CountsKeptPatches(SinCos2D):
    def table(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        return super().table(Grid(grid.height, grid.width), device)[: grid.patches]


class TakesKeysForQueries(PositionEncoding):
    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[DenseBias]:
        yield OffsetBias(torch.ones(1, 2 * keys.height - 1, 2 * keys.width - 1).to(q), keys, keys)


class CountsQueriesAsKeys(PositionEncoding):
    """Right where both grids are one."""

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[DenseBias]:
        bias = OffsetBias.of(lambda offsets: offsets.to(q.dtype).sum(-1)[None], keys, keys, q.device).dense()
        yield DenseBias(bias[..., torch.arange(queries.tokens, device=q.device) % keys.tokens, :])


class Stretches(Fine):
    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[MatrixRotation]:
        turn = torch.eye(self.head_dim, device=self.frequencies.device) * self.frequencies[:1, :1, None, None]
        yield MatrixRotation(turn.expand(self.num_heads, grid.patches, -1, -1))


class SaysItStretches(Fine):
    keeps_norms = False


class FadesToTheRight(Fine):
    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[LowRankBias | AxisBias]:
        yield from super().biases(q, k, queries, keys)
        columns = torch.arange(keys.width, device=q.device).sqrt().to(q.dtype)
        yield AxisBias(q.new_zeros(1, 1, 1, keys.height), -columns.expand(1, 1, 1, -1), keys)


class SaysItGoesByPlace(Fine):
    by_offset = False


class LeavesItsTable(Learned):
    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {}


class ResizesInHalf(Learned):
    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": super().tables_on(grid)["table"] / 3 * 3}


class CountsInPython(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        for _ in range(grid.height):
            x = x + 0
        return super().tokens(x, grid)


class LooksForItsHome(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return super().tokens(x, grid) if grid.height == self.grid.height else super().tokens(x + 0, grid)


BROKEN: dict[type[PositionEncoding], tuple[Promise, str]] = {
    SquareOnly: (places.any_grid, r"InputError: x has 12 tokens, but Grid\(height=3, width=3"),
    DeadParameter: (state.tells_the_truth, "parameter unused has no gradient"),
    TellsAnotherMoment: (
        state.tells_the_truth,
        r"moments\(\) tells \['biases'\], but on .* speaks at \['tokens'\]",
    ),
    BlocksThatAreNot: (state.tells_the_truth, r"blocks\(12\) is \[12\]"),
    SavesItsIndex: (state.keeps_only_parameters, r"differ in \['index'\]"),
    BufferFollowsInput: (state.keeps_only_parameters, "buffers changed from .*seen"),
    DoesNotCount: (places.counts_tokens, "tokens on .* go through"),
    StumblesOverPrefix: (places.knows_its_prefix, "RuntimeError: shapes do not match"),
    TouchesPrefix: (places.spares_prefix_tokens, "prefix tokens on .* are touched"),
    PatchesSeePrefix: (places.spares_prefix_tokens, "patches on .* depend on prefix tokens"),
    SeesTheBatch: (places.sees_one_image, "tokens on .*, alone is off by"),
    ForbidsFarPairs: (places.keeps_to_masks, "attention on .* under a mask that is boolean .* is not finite"),
    PromotesTokens: (numbers.keeps_dtypes, "tokens on .* in torch.bfloat16 turn into torch.float32"),
    AnglesInHalf: (numbers.keeps_dtypes, "angles on .* in torch.bfloat16 are torch.bfloat16"),
    AnglesUnderAutocast: (numbers.keeps_dtypes, "the cosine of angles on .* under autocast .* is off by"),
    RemembersBias: (state.sees_updates, ", after an update in place is off by"),
    CountsPatchesAlone: (state.forgets_sizes, r"tokens on Grid\(height=4, width=3, prefix=1\), .* is off by"),
    KeepsItsGraph: (state.can_be_copied, "RuntimeError: Only Tensors created explicitly"),
    CachesInferenceTensors: (state.trains_after_inference, "Inference tensors"),
    WritesOnItself: (state.changes_nothing, "last_grid changed on"),
    IsKeptByItsCache: (state.changes_nothing, "it is still alive"),
    FillsBuffersAtBirth: (state.can_start_without_memory, "attention on .* is off by nan"),
    LeavesTheGraph: (graphs.compiles, "Unsupported"),
    SaysVideos: (
        places.is_built_where_it_says,
        r"axes are \(2, 3\), but Grid.*frames=2\) is refused: .*no videos",
    ),
    TakesAVideoForAnImage: (places.any_grid, "RuntimeError: The size of tensor"),
    FreezesItsIndex: (state.keeps_nothing_derived, "parameter index is frozen"),
    FillsItselfAtBirth: (state.starts_anew, "frequencies on .*, started anew is off by nan"),
    Dithers: (state.repeats_itself, "tokens on .*, called again is off by"),
    AsksForMemoryInOrder: (numbers.takes_any_strides, "RuntimeError: view size is not compatible"),
    SaysTwoThings: (numbers.backends_agree, "attention on .*, mask absent, on backend 'auto' is off by"),
    TurnsByComplexNumbers: (numbers.is_real, "polar.* makes torch.complex64"),
    SlowAnglesInHalf: (numbers.keeps_dtypes, "only .* of 300 angles on .* stay apart"),
    StaysOnTheCPU: (state.moves, "RuntimeError"),
    SharesAWorkspace: (places.keeps_images_apart, "RuntimeError: .*modified by an inplace operation"),
    CountsKeptPatches: (places.serves_kept_patches, "tokens on Points.* is off by"),
    TakesKeysForQueries: (places.crosses_grids, "RuntimeError: The size of tensor"),
    CountsQueriesAsKeys: (places.crosses_grids, "attention on Points.*, with keys on all of .* is off by"),
    Stretches: (places.tells_if_it_keeps_norms, "the norm of what is turned on .* is off by"),
    SaysItStretches: (places.tells_if_it_keeps_norms, "keeps_norms is False, but the norms stay the same"),
    FadesToTheRight: (places.tells_if_it_goes_by_offset, r"attention on Points.*, moved by \(3, 5\) is off by"),
    SaysItGoesByPlace: (places.tells_if_it_goes_by_offset, "attention on .* stays the same"),
    LeavesItsTable: (sizes.can_be_resized, "RuntimeError: .*unflatten"),
    ResizesInHalf: (sizes.resizes_in_float32, "table on .*, resized in torch.bfloat16 is off by"),
    CountsInPython: (graphs.compiles, "[567] graphs for sizes"),
    LooksForItsHome: (graphs.exports, "height"),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_promise_is_named(broken: type[PositionEncoding]) -> None:
    promise, detail = BROKEN[broken]
    assert promise.__doc__
    message = f"{broken.__name__} breaks the promise that it {promise.__doc__}: "
    with pytest.raises(AssertionError, match=f"(?s)^{re.escape(message)}.*{detail}"):
        check_encoding(broken)


def test_every_promise_can_be_broken() -> None:
    assert {promise for promise, _ in BROKEN.values()} == {*PROMISES, *SLOW}


def test_the_message_tells_which_promise_which_grid_and_how_far_off() -> None:
    message = (
        r"mine breaks the promise that it sees parameters .*: attention on Grid\(height=3, width=4, prefix=1\),"
        r" after an update in place is off by [\d.]+, allowed 0$"
    )
    with pytest.raises(AssertionError, match=message):
        check_encoding(RemembersBias, name="mine")
