"""The contract over the catalog, and that it can be broken."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import spellings
from whereformer import AxisBias, DenseBias, Grid, LowRankBias, PositionEncoding, Rotation, parse
from whereformer.catalog import CATALOG
from whereformer.encodings import Learned, SinCos2D
from whereformer.testing import check_encoding


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

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation]:
        yield Rotation((grid.coords() * self.frequencies.float()[:, None]).sum(-1, keepdim=True))

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


class Noise(DenseBias):
    def dense(self) -> Tensor:
        return self.tensor + torch.randn_like(self.tensor)


class AnotherMeaningEachTime(PositionEncoding):
    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[DenseBias]:
        yield Noise(torch.zeros(keys.tokens, keys.tokens, dtype=q.dtype))


class PromotesTokens(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        grid.check(x.shape[1], "x")
        return torch.cat([x[:, : grid.prefix], x[:, grid.prefix :] + self.table(grid)], 1)


class AnglesInHalf(Fine):
    """Counts in the dtype of its parameters."""

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation]:
        coords = grid.coords().to(self.frequencies.dtype)
        yield Rotation((coords * self.frequencies[:, None]).sum(-1, keepdim=True))


class AnglesUnderAutocast(Fine):
    """Its matrix product is autocast."""

    def rotations(self, grid: Grid, device: torch.device | None = None) -> Iterator[Rotation]:
        yield Rotation((self.frequencies.float() @ grid.coords().float().mT)[..., None])


class RemembersBias(PositionEncoding):
    """Takes in eval the value that its slopes had at first."""

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.slopes = nn.Parameter(torch.ones(num_heads))

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


class LooksAtNumbers(SinCos2D):
    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        return super().tokens(x, grid) if x.sum() < 1e9 else x


BROKEN = {
    SquareOnly: r"works on any grid.*InputError: x has 12 tokens, but Grid\(height=3, width=3",
    DeadParameter: "no parameter that does nothing: parameter unused has no gradient",
    TellsAnotherMoment: r"tells what it does.*moments\(\) tells \['biases'\], but on .* speaks at \['tokens'\]",
    BlocksThatAreNot: r"tells what it does.*blocks\(12\) is \[12\]",
    SavesItsIndex: r"nothing but its parameters in its state_dict.*differ in \['index'\]",
    BufferFollowsInput: "no buffer that follows the size of its input.*seen",
    DoesNotCount: "refuses a wrong number of tokens.* tokens on .* go through",
    StumblesOverPrefix: "serves prefix tokens that it was not built for.*RuntimeError: shapes do not match",
    TouchesPrefix: "adds to prefix tokens nothing.*prefix tokens on .* are touched",
    PatchesSeePrefix: "adds to prefix tokens nothing.*patches on .* depend on prefix tokens",
    SeesTheBatch: "each image of a batch as if it were alone: tokens on .*, alone is off by",
    ForbidsFarPairs: "finite gradients: attention on .* under a mask that is boolean .* is not finite",
    AnotherMeaningEachTime: "same on every backend.*attention on .* on backend 'auto', mask absent is off by",
    PromotesTokens: "keeps the dtype of tokens.*in torch.bfloat16 turn into torch.float32",
    AnglesInHalf: r"keeps the dtype.*rotations 0 of q on Grid\(height=1, width=300, prefix=1\) in .* is off by",
    AnglesUnderAutocast: "keeps the dtype.*rotations 0 of q on .* under autocast to torch.bfloat16 is off by",
    RemembersBias: "sees parameters changed in place.*, after an update in place is off by",
    CountsPatchesAlone: r"several sizes in turn.*tokens on Grid\(height=4, width=3, prefix=1\), .* is off by",
    KeepsItsGraph: "can be copied.*RuntimeError: Only Tensors created explicitly",
    CachesInferenceTensors: "trains after it was used in inference_mode.*Inference tensors",
    WritesOnItself: "changes no attribute of its own in forward.*: last_grid changed on",
    IsKeptByItsCache: "not kept alive by anything: it is still alive",
    FillsBuffersAtBirth: "can be built on the meta device.*attention on .* is off by nan",
    LooksAtNumbers: "compiles whole.*: Unsupported",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_promise_is_named(broken: type[PositionEncoding]) -> None:
    with pytest.raises(
        AssertionError, match=rf"(?s)^{broken.__name__} breaks the promise that it .*{BROKEN[broken]}"
    ):
        check_encoding(broken)


def test_the_message_tells_which_promise_which_grid_and_how_far_off() -> None:
    message = (
        r"mine breaks the promise that it sees parameters .*: attention on Grid\(height=3, width=4, prefix=1\),"
        r" after an update in place is off by [\d.]+, allowed 0$"
    )
    with pytest.raises(AssertionError, match=message):
        check_encoding(RemembersBias, name="mine")
