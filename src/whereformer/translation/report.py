"""How near one encoding comes to another."""

import math
from dataclasses import dataclass

from whereformer.grid import Grid
from whereformer.translation.meaning import PARTS


@dataclass(frozen=True)
class Part:
    """One way to speak, and how near the target comes to the source there.

    Args:
        name: one of `PARTS`.
        said: root mean square of what the source says, head by head (one number where tokens are spoken to), in
            logits of white queries and keys, or in units of tokens or values.
        missed: root mean square of the difference.
    """

    name: str
    said: tuple[float, ...]
    missed: tuple[float, ...]

    @property
    def lost(self) -> tuple[float, ...]:
        """`missed` as a share of `said`, head by head: 0, all is said; 1, as if nothing were."""
        return tuple(m / s if s else (math.inf if m else 0.0) for s, m in zip(self.said, self.missed, strict=True))

    @property
    def share(self) -> float:
        """`lost` of all heads together."""
        said, missed = (sum(x * x for x in xs) ** 0.5 for xs in (self.said, self.missed))
        return missed / said if said else (math.inf if missed else 0.0)

    @property
    def r2(self) -> float:
        """How much of the variance the target explains: 1 − share²."""
        return 1 - self.share**2


@dataclass(frozen=True)
class Translation:
    """What became of what an encoding says; `print` it.

    Args:
        source, target: classes and options.
        grid: where both were compared.
        parts: the ways to speak in which either says something.
    """

    source: str
    target: str
    grid: Grid
    parts: tuple[Part, ...]

    @property
    def lost(self) -> float:
        """The largest share that is lost of any part of what the source says."""
        return max((part.share for part in self.parts if any(part.said)), default=0.0)

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target} on {self.grid}"]
        for part in self.parts:
            heads = ""
            if len(part.lost) > 1:
                heads = f", from {_percent(min(part.lost))} to {_percent(max(part.lost))} by head"
            lost = f"lost {_percent(part.share)} (R² {part.r2:.4f}){heads}"
            if not any(part.said):
                lost = "the source says nothing"
            lines.append(f"  {part.name} ({PARTS[part.name]}): {lost}")
        return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
