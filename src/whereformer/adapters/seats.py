"""Which encoding comes where: everything that can fail about equipping a model, before anything is changed."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from whereformer.adapters.host import Attention, Block, Host, Stage
from whereformer.attention import said
from whereformer.catalog import Factory, parse, spell
from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid, Points

Encoding = str | Factory | Sequence[Factory]
"""What people write: a text, a class or a partial of one, or a sequence of these."""

Blocks = int | range | tuple[int, ...]
"""Some blocks of a model, counted from 0."""


@dataclass
class Heard:
    """One attention, and the encodings that come to it."""

    attention: Attention
    encodings: list[PositionEncoding] = field(default_factory=list)


@dataclass
class Seat:
    """One block, and the encodings that come to it."""

    block: Block
    number: int
    tokens: list[PositionEncoding] = field(default_factory=list)
    attentions: list[Heard] = field(init=False)

    def __post_init__(self) -> None:
        found = self.block.attentions
        self.attentions = [Heard(a if isinstance(a, Attention) else Attention(a)) for a in found]


def seats_of(
    host: Host, encoding: Encoding | Mapping[Blocks, Encoding], like: Tensor, *, share: bool, keep_own: bool
) -> list[list[Seat]]:
    """For each stage a seat for each block, filled with new encodings, where and in what dtype `like` is."""
    stages = [[Seat(block, number) for number, block in enumerate(stage.blocks)] for stage in host.stages]
    seats = [seat for stage in stages for seat in stage]
    if len({id(seat.block.module) for seat in seats}) < len(seats):
        raise InputError("equip: one block stands in several places of the model; each needs encodings of its own")
    attentions = [id(heard.attention.module) for seat in seats for heard in seat.attentions]
    if len(set(attentions)) < len(attentions):
        raise InputError(
            "equip: one attention stands in several places of the model; each needs encodings of its own"
        )
    for chosen, factories in _chosen(encoding, len(seats)):
        of_these = {id(seats[number]) for number in chosen}
        for factory in factories:
            for stage, all_seats in zip(host.stages, stages, strict=True):
                if among := [seat for seat in all_seats if id(seat) in of_these]:
                    _distribute(factory, stage, among, like, share)
    if not keep_own:
        for seat in seats:
            _start(seat)
    return stages


def spelled(encoding: Encoding | Mapping[Blocks, Encoding]) -> str:
    """As text."""
    if isinstance(encoding, Mapping):
        return ", ".join(f"{blocks}: {spelled(one)}" for blocks, one in encoding.items())
    return " + ".join(map(spell, factories_of(encoding)))


def written(encoding: Encoding | Mapping[Blocks, Encoding]) -> str | list[list[Any]]:
    """`spelled`, for JSON: of different blocks a list of [blocks, text]."""
    if not isinstance(encoding, Mapping):
        return spelled(encoding)
    return [[[b] if isinstance(b, int) else list(b), spelled(one)] for b, one in encoding.items()]


def read(text: str | list[list[Any]]) -> str | dict[Blocks, Encoding]:
    """`written` reversed."""
    return text if isinstance(text, str) else {tuple(blocks): one for blocks, one in text}


def factories_of(encoding: Encoding) -> list[Factory]:
    """What builds the encodings that someone has written down.

    Raises:
        InputError: it is none of the ways in which they may be written.
    """
    if isinstance(encoding, str):
        return list(parse(encoding))
    factories = list(encoding) if isinstance(encoding, Sequence) else [encoding]
    for factory in factories:
        if isinstance(factory, PositionEncoding):
            raise InputError(
                f"encoding: {type(factory).__name__} is built already, but each block gets its own: give"
                " the class, or a functools.partial of it"
            )
    if not factories or not all(callable(factory) for factory in factories):
        raise InputError(f"encoding={encoding!r}, expected a text, an encoding class, or a sequence of classes")
    return factories


def _chosen(
    encoding: Encoding | Mapping[Blocks, Encoding], depth: int
) -> Iterator[tuple[Collection[int], list[Factory]]]:
    if not isinstance(encoding, Mapping):
        yield range(depth), factories_of(encoding)
        return
    if not encoding:
        raise InputError("encoding={}, expected some blocks and their encodings")
    taken: set[int] = set()
    for blocks, one in encoding.items():
        numbers = (blocks,) if isinstance(blocks, int) else tuple(blocks)
        for number in numbers:
            if not isinstance(number, int) or not 0 <= number < depth:
                raise InputError(f"encoding: block {number!r}, but the model has {depth}, counted from 0")
            if number in taken:
                raise InputError(f"encoding: block {number} is named twice; join its encodings with +")
            taken.add(number)
        yield numbers, factories_of(one)


def _distribute(factory: Factory, stage: Stage, seats: list[Seat], like: Tensor, share: bool) -> None:
    """Build one encoding for each place in a stage that asks for it."""
    shared: dict[tuple[int, int, Grid], PositionEncoding] = {}

    def build(dim: int, heads: int, grid: Grid, seat: Seat) -> PositionEncoding:
        if share and (dim, heads, grid) in shared:
            return shared[dim, heads, grid]
        encoding = _built(factory, like, dim, heads, grid)
        if share and type(encoding).at_block is not PositionEncoding.at_block:
            raise InputError(f"equip: {spell(factory)} is another one in each block, so that none can be shared")
        encoding.at_block(seat.number, len(stage.blocks))
        shared[dim, heads, grid] = encoding
        return encoding

    scout = _scout(factory, like, stage, seats)
    moments = scout.moments()
    attends = [moment for moment in moments if moment != "tokens"]
    for position in scout.blocks(len(seats)):
        if not 0 <= position < len(seats):
            raise InputError(
                f"equip: {spell(factory)} asks for block {position} of the {len(seats)} of a stage, counted from 0"
            )
        seat = seats[position]
        alone = [heard for heard in seat.attentions if heard.attention.module is seat.block.module]
        if "tokens" in moments and alone and seat.block.behaviour is None:
            raise InputError(
                f"equip: {spell(factory)} speaks to tokens before a block, but a"
                f" {type(seat.block.module).__name__} alone is none; encodings of attention can come"
            )
        if not moments and alone:
            continue  # nothing to say, and no block to stand before
        if not attends:
            seat.tokens.append(build(stage.dim, stage.heads, stage.grid, seat))
            continue
        if not seat.attentions:
            raise InputError(
                f"equip: {spell(factory)} speaks in attention, but block {seat.number} is a"
                f" {type(seat.block.module).__name__}, which has none that takes it"
                + _why(seat.block)
                + "; encodings of tokens can come"
            )
        for heard in seat.attentions:
            attention = heard.attention
            if deaf := [moment for moment in attends if moment not in attention.takes]:
                raise InputError(
                    f"equip: {spell(factory)} speaks at {', '.join(deaf)}, but a"
                    f" {type(attention.module).__name__} takes {', '.join(attention.takes) or 'nothing'}"
                    + _why(seat.block)
                )
            queries, keys = attention.grids(attention.module, attention.home or stage.grid)
            if queries != keys and not scout.crosses:
                raise InputError(
                    f"equip: {spell(factory)} says nothing of queries on {queries} and keys on {keys}: two grids,"
                    f" as in a {type(attention.module).__name__}"
                )
            home = _home(queries, keys)
            made = build(attention.dim or stage.dim, attention.heads or stage.heads, home, seat)
            if isinstance(queries, Points) and not queries.whole:
                _check_between(
                    made, queries, keys, like, f"{spell(factory)} in a {type(attention.module).__name__}"
                )
            heard.encodings.append(made)
        if "tokens" in moments:
            both = seat.attentions[0].encodings[-1]
            if both.dim != stage.dim:
                raise InputError(
                    f"equip: {spell(factory)} speaks to tokens and in attention, but in block {seat.number} those"
                    f" have {stage.dim} features and this {both.dim}"
                )
            seat.tokens.append(both)


def _check_between(encoding: PositionEncoding, queries: Points, keys: Grid, like: Tensor, what: str) -> None:
    """Raise if an encoding has nothing to say of queries between the patches of the keys."""
    q, k = (like.new_zeros(1, encoding.num_heads, grid.tokens, encoding.head_dim) for grid in (queries, keys))
    try:
        said(q, k, k, queries, keys, (encoding,), None, 0.0)
    except InputError as error:
        raise InputError(f"equip: {what}: {error}") from None


def _why(block: Block) -> str:
    return f": its attention {block.deaf}" if block.deaf else ""


def _home(queries: Grid, keys: Grid) -> Grid:
    """The finer of two grids; all of a grid of which both are a part."""
    whole = next((grid for grid in (queries, keys) if not isinstance(grid, Points)), None)
    return whole or Grid(*queries.size, prefix=queries.prefix)


def _scout(factory: Factory, like: Tensor, stage: Stage, seats: list[Seat]) -> PositionEncoding:
    """One to ask what it is: as for the stage's tokens or, where these have no such width, for its attention."""
    try:
        return _built(factory, like, stage.dim, stage.heads, stage.grid)
    except InputError:
        heard = next((heard.attention for seat in seats for heard in seat.attentions), None)
        if heard is None or not (heard.dim and heard.heads):
            raise
        scout = _built(factory, like, heard.dim, heard.heads, stage.grid)
        if all(moment == "tokens" for moment in scout.moments()):
            raise
        return scout


def _built(factory: Factory, like: Tensor, dim: int, heads: int, grid: Grid) -> PositionEncoding:
    encoding = factory(dim, heads, grid)
    if not isinstance(encoding, PositionEncoding):
        raise InputError(f"equip: {factory!r} gave {type(encoding).__name__}, expected a PositionEncoding")
    return encoding.to(like.device, like.dtype)


def _start(seat: Seat) -> None:
    """Let encodings go on from what the model has itself: of each kind the first."""
    pairs = [(seat.block.start, seat.tokens)]
    pairs += [(heard.attention.start, heard.encodings) for heard in seat.attentions]
    for start, encodings in pairs:
        if start is not None:
            next((encoding for encoding in encodings if start(encoding)), None)
