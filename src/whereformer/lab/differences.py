"""Numbers of several seeds, and what their differences show and do not show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with the standard deviation, which one seed alone does not have."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + ("" if self.sd is None else f" ± {self.sd:.1f}")


@dataclass(frozen=True)
class Difference:
    """A mean difference over paired seeds, and half the width of its confidence interval (None for one seed)."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float], baseline: Sequence[float], finest: float) -> "Difference":
        """Student's t on differences, seed by seed; no narrower than the `finest` difference there can be."""
        from scipy.stats import t

        differences = [value - base for value, base in zip(values, baseline, strict=True)]
        middle, count = mean(differences), len(differences)
        if count < 2:
            return cls(middle, None)
        half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * stdev(differences) / count**0.5
        return cls(middle, max(half, finest))

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is above or below zero; 0 if it is not, or if there is none."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" + ("" if self.half is None else f" ± {self.half:.1f}")


def against(baseline: str, differences: Mapping[str, Difference], seeds: int) -> list[str]:
    """What the differences to a baseline show, by encoding, over so many seeds; nothing if there are none."""
    if not differences:
        return []
    if seeds == 1:
        return [f"With one seed there are no intervals: any difference to {baseline!r} may be chance."]
    by_sign = {sign: [name for name, d in differences.items() if d.sign == sign] for sign in (1, -1, 0)}
    parts = [
        f"{_listed(by_sign[sign])} {verdict}"
        for sign, verdict in (
            (1, "came out higher"),
            (-1, "came out lower"),
            (0, "cannot be told apart from it (their intervals include zero)"),
        )
        if by_sign[sign]
    ]
    return [f"Against {baseline!r}, over {seeds} paired seeds: {'; '.join(parts)}."]


def about_intervals(baseline: str, differences: Mapping[str, Difference], seeds: int) -> str:
    """For what the intervals hold; nothing if there are none."""
    if not differences or seeds == 1:
        return ""
    return (
        " Each interval holds by itself, for the choice of seed and not for that of test images; "
        f"only differences to {baseline!r} have one."
    )


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["peg"]), _listed(["learned", "peg", "irpe"])
    ("'peg'", "'learned', 'peg' and 'irpe'")
    """
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} and {last}" if most else last
