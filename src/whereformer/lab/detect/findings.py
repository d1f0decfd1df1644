"""What is wrong with annotations, as data, and the report of it."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

EXAMPLES = 5  # findings of each kind that a report shows

Fate = Literal["skipped", "mended"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, and what became of it.

    Args:
        kind: a few words, the same for all findings of a kind.
        where: the image or the annotation, with its id or its file and line.
        says: what stands there.
        fate: "skipped", or "mended" if enough was left to use it.
    """

    kind: str
    where: str
    says: str
    fate: Fate = "skipped"

    def __str__(self) -> str:
        return f"{self.where}: {self.says}"


@dataclass(frozen=True)
class Report:
    """What a set holds and what is wrong with it.

    Args:
        name: of the set.
        images, boxes: how many there are, and how many are left.
        crowds: boxes left that hold a crowd.
        empty: images left that hold no boxes.
        per_category: boxes left of each category, crowds among them.
        findings: all of them.
    """

    name: str
    images: tuple[int, int]
    boxes: tuple[int, int]
    crowds: int
    empty: int
    per_category: Mapping[str, int]
    findings: tuple[Finding, ...]

    def kinds(self) -> dict[str, list[Finding]]:
        """The findings of each kind, the most frequent kind first."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: [one for one in self.findings if one.kind == kind] for kind, _ in counts.most_common()}

    def lines(self) -> Iterator[str]:
        """The report as text."""
        (images, images_left), (boxes, boxes_left) = self.images, self.boxes
        yield (
            f"{self.name}: {_of(images_left, images, 'images')}, {_of(boxes_left, boxes, 'boxes')} in"
            f" {len(self.per_category)} categories; {self.crowds:,} are crowds; {self.empty:,} images hold none"
        )
        for kind, findings in self.kinds().items():
            fates = Counter(finding.fate for finding in findings)
            yield f"  {kind}: {', '.join(f'{count:,} {fate}' for fate, count in fates.items())}"
            yield from (f"    {finding}" for finding in findings[:EXAMPLES])
            if len(findings) > EXAMPLES:
                yield f"    and {len(findings) - EXAMPLES:,} more"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name,
            "images": {"found": self.images[0], "left": self.images[1], "empty": self.empty},
            "boxes": {"found": self.boxes[0], "left": self.boxes[1], "crowds": self.crowds},
            "per_category": dict(self.per_category),
            "findings": {
                kind: [{"where": one.where, "says": one.says, "fate": one.fate} for one in findings]
                for kind, findings in self.kinds().items()
            },
        }


def short(value: object) -> str:
    """As JSON, cut short.

    >>> short(list(range(100)))
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1...'
    """
    text = json.dumps(value, default=str)
    return text if len(text) <= 43 else f"{text[:40]}..."


def _of(left: int, count: int, things: str) -> str:
    return f"{count:,} {things}" if left == count else f"{left:,} of {count:,} {things}"
