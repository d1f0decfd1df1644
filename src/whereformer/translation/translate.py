"""Start one encoding from another."""

from collections.abc import Sequence

import torch

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.resample import without_autocast
from whereformer.translation.copies import exact, learned, loud, spelled, write
from whereformer.translation.meaning import PARTS, Meaning, Said
from whereformer.translation.report import Part, Translation
from whereformer.translation.squares import Problem, nearest
from whereformer.translation.turns import Turns, distances

Encodings = PositionEncoding | Sequence[PositionEncoding]


def translate(source: Encodings, target: Encodings, *, grid: Grid | None = None) -> Translation:
    """Fill the target's parameters so that it says what the source says, as nearly as it can.

    Both are asked what they say on the grid: what they add to tokens; what they add to logits, and how queries and
    keys are turned, for white queries and keys; what they add to values. The sum of squared differences over all
    pairs of tokens (over all tokens) is made least. What is the same for all keys of a query does not count:
    softmax does not see it. Targets that are linear in their parameters are solved exactly; parameters that the
    grid does not reach are zeros. Others go down from where they are (Levenberg-Marquardt), to a minimum near by;
    rotations from a tenth of it, and over more and more patches, so that they do not end a turn too far.

    It works on the CPU in float64, on copies; parameters that do not require gradients stay as they are. If it
    fails, the target is left as it was.

    Args:
        source: an encoding, or several whose words add up.
        target: likewise; of as many features and heads.
        grid: where they are compared; the target's home grid if None.

    Returns:
        how near the target came: measured after its parameters were rounded to their dtype.

    Raises:
        InputError: the two differ in shape, or the target has no way to say anything of what the source says.

    >>> from whereformer.encodings import IRPE, Swin
    >>> home = Grid(4, 4)
    >>> found = translate(Swin(32, 2, home), IRPE(32, 2, home, mode="bias", shared=False, index="clip", beta=3))
    >>> found.lost < 1e-6
    True
    """
    sources, targets = _taken("source", source), _taken("target", target)
    first = targets[0]
    for encoding in (*sources, *targets):
        if (encoding.dim, encoding.num_heads) != (first.dim, first.num_heads):
            raise InputError(
                f"translate: {type(encoding).__name__} has {encoding.dim} features in {encoding.num_heads} heads,"
                f" but {type(first).__name__} has {first.dim} in {first.num_heads}"
            )
    where = first.grid if grid is None else grid
    if not isinstance(where, Grid) or not where.regular:
        raise InputError(f"translate: grid={grid!r}, expected a whereformer.Grid with all of its patches")
    for encoding in (*sources, *targets):
        if encoding.grid.axes != where.axes:
            raise InputError(
                f"translate: {type(encoding).__name__} was built for {encoding.grid}, other axes than {where}"
            )
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(torch.device("cpu")):
        ours, theirs = exact(sources), exact(targets)
        apart = all(_by_offset(encoding) for encoding in (*ours, *theirs))
        meaning = Meaning(where, first, by_offset=apart)
        spoken, able = (meaning.parts(loud(encodings)) for encodings in (ours, theirs))
        if not set(spoken) & set(able):
            raise InputError(_nothing_in_common(sources, spoken, targets, able))
        parts = [part for part in PARTS if part in spoken or part in able]
        with torch.no_grad():
            wanted = meaning.said(ours, parts)
        _fit(meaning, wanted, ours, theirs, [part for part in parts if part in able])
        write(theirs, targets)
        return Translation(
            source=" + ".join(map(spelled, sources)),
            target=" + ".join(map(spelled, targets)),
            grid=where,
            parts=tuple(_compared(meaning, wanted, ours, exact(targets))),
        )


def _fit(
    meaning: Meaning,
    wanted: Said,
    sources: list[PositionEncoding],
    targets: list[PositionEncoding],
    parts: list[str],
) -> None:
    """Change what the targets learn so that they say what is wanted."""

    def problem(centred: bool) -> Problem:
        return Problem(
            says=lambda: list(meaning.said(targets, parts).values()),
            parameters=learned(targets),
            wanted=[wanted[part] for part in parts],
            metrics=[meaning.metric(part, centred) for part in parts],
        )

    nearest(problem(True), first=problem(False), unwind=_windows(meaning, sources, targets, parts))


def _windows(
    meaning: Meaning, sources: list[PositionEncoding], targets: list[PositionEncoding], parts: list[str]
) -> list[Problem]:
    """What rotations are on a few patches, then on more."""
    if "rotations" not in parts:
        return []
    found = []
    for window in meaning.turns.windows():
        turns = Turns(window, targets[0])
        with torch.no_grad():
            wanted = [turns.said(sources)]
        metrics = [turns.metric()]
        found.append(Problem(lambda turns=turns: [turns.said(targets)], learned(targets), wanted, metrics))
    return found


def _compared(
    meaning: Meaning, wanted: Said, sources: list[PositionEncoding], targets: list[PositionEncoding]
) -> list[Part]:
    found = []
    with torch.no_grad():
        said = meaning.said(targets, wanted)
        for part in wanted:
            if part == "rotations":
                squares = distances(meaning.grid, sources, targets)
            else:
                metric = meaning.metric(part)
                squares = metric.by_head(wanted[part]), metric.by_head(wanted[part] - said[part])
            found.append(Part(part, *(tuple(x.sqrt().tolist()) for x in squares)))
    return found


def _taken(what: str, encodings: Encodings) -> list[PositionEncoding]:
    found = [encodings] if isinstance(encodings, PositionEncoding) else encodings
    if (
        not isinstance(found, Sequence)
        or not found
        or not all(isinstance(encoding, PositionEncoding) for encoding in found)
    ):
        raise InputError(f"translate: {what}={encodings!r}, expected a PositionEncoding or a sequence of them")
    return list(found)


def _by_offset(encoding: PositionEncoding) -> bool:
    """Whether one pair of tokens stands for all that are as far apart; rotations are looked at by themselves."""
    moments = set(encoding.moments()) & {"biases", "values"}
    return not moments or (encoding.by_offset and encoding.crosses)


def _nothing_in_common(
    sources: list[PositionEncoding], spoken: list[str], targets: list[PositionEncoding], able: list[str]
) -> str:
    def ways(encodings: list[PositionEncoding], parts: list[str]) -> str:
        return f"{' + '.join(map(spelled, encodings))} by {', '.join(parts) or 'nothing'}"

    return (
        f"translate: {ways(sources, spoken)}; {ways(targets, able)}: nothing in common. What one says to tokens,"
        " or by rotations, the other can say to logits only for tokens that are known: give a model, and images"
    )
