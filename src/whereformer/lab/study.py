"""A study is a value: encodings that are compared, over seeds, by a recipe that decides their numbers."""

import json
import runpy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from whereformer.catalog import parse
from whereformer.errors import InputError

WHICH = (
    "encodings",
    "baseline",
    "seeds",
)  # the fields that say which runs there are; all others say how a run goes
PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class Study:
    """What all experiments share: which runs there are, how many epochs they take, and that they are JSON.

    A kind of experiment is a dataclass whose further fields are the recipe, each checked when it is made, so that
    a mistake costs a line and not a night.
    """

    encodings: tuple[str, ...]
    baseline: str  # the encoding that the others are compared with
    seeds: tuple[int, ...]
    epochs: int

    def __post_init__(self) -> None:
        for name in ("encodings", "seeds"):
            self._as_tuple(name)
        self._check_which()
        self._require("epochs", lambda value: is_whole(value, 1), "a whole number from 1 on")

    def words(self, result: Mapping[str, Any]) -> str:
        """The result of a run, in a few words."""
        raise NotImplementedError

    def _as_tuple(self, name: str) -> None:
        if isinstance(getattr(self, name), list):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def _check_which(self) -> None:
        self._require(
            "encodings", lambda specs: isinstance(specs, tuple) and specs, "a list of at least one encoding"
        )
        for spec in (*self.encodings, self.baseline):
            if not is_text(spec):
                raise InputError(f"encodings: {spec!r}, expected a text such as \"irpe(on='qkv')\"")
            parse(spec)
        self._require("encodings", _all_different, "each encoding once")
        if self.baseline not in self.encodings:
            raise InputError(f"baseline={self.baseline!r}, expected one of the encodings {list(self.encodings)}")
        self._require("seeds", lambda seeds: isinstance(seeds, tuple) and seeds, "a list of at least one seed")
        self._require("seeds", lambda seeds: all(is_whole(s, 0) for s in seeds), "whole numbers from 0 on")
        self._require("seeds", _all_different, "each seed once")

    def _require(self, name: str, accepts: Any, accepted: str) -> None:
        value = getattr(self, name)
        if not accepts(value):
            raise InputError(f"{name}={value!r}, expected {accepted}")

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """All (encoding, seed), seed by seed, so that early results can already be compared."""
        return tuple((encoding, seed) for seed in self.seeds for encoding in self.encodings)

    def recipe(self) -> dict[str, Any]:
        """The fields that say how a run goes: two studies with equal recipes can share their runs."""
        return {name: value for name, value in asdict(self).items() if name not in WHICH}

    def digest(self) -> str:
        """Eight letters that name the recipe."""
        return sha256(json.dumps(self.recipe(), sort_keys=True).encode()).hexdigest()[:8]

    def single(self, encoding: str, seed: int) -> Self:
        """The study of one run."""
        return replace(self, encodings=(encoding,), baseline=encoding, seeds=(seed,))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The study that `to_json` wrote, exactly."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"experiment: not JSON ({error})") from None
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            unknown = ", ".join(sorted(values.keys() - known)) if isinstance(values, dict) else repr(values)
            raise InputError(f"experiment: {unknown} is not known; the fields are {', '.join(sorted(known))}")
        if missing := sorted(known - values.keys()):
            raise InputError(f"experiment: {', '.join(missing)} missing")
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The study in a folder's experiment.json."""
        try:
            return cls.from_json(path.read_text())
        except ValueError as error:
            raise InputError(f"{str(path)!r}: {error}") from None

    @classmethod
    def from_python(cls, path: Path) -> Self:
        """The value named `experiment` in a Python file."""
        if not path.is_file():
            raise InputError(f"experiment: no file {str(path)!r}")
        try:
            value = runpy.run_path(str(path)).get("experiment")
        except (Exception, SystemExit) as error:
            raise InputError(f"experiment: {str(path)!r} fails: {type(error).__name__}: {error}") from error
        if not isinstance(value, cls):
            raise InputError(
                f"experiment: {str(path)!r} must define `experiment = {cls.__name__}(...)`, found {value!r}"
            )
        return value


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < float("inf")  # pyright: ignore[reportArgumentType]


def is_json_object(value: object) -> bool:
    try:
        return isinstance(value, dict) and json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def _all_different(values: tuple[object, ...]) -> bool:
    return len(set(values)) == len(values)
