"""An experiment is a value: everything that decides the numbers of a comparison."""

import json
import runpy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from whereformer.catalog import parse
from whereformer.errors import InputError
from whereformer.lab import models

ENCODINGS = (
    "none",
    "learned",
    "sincos2d",
    "peg",
    "irpe(mode='bias')",
    "irpe",
    "irpe(on='qkv')",
    "learned + irpe",
)
SMALL = {
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 3,
    "mlp_ratio": 2,
    "weight_init": "jax",
    "class_token": False,  # with one, patches of the last layer are not read, nor what is said about them there
    "global_pool": "avg",
}
PRECISIONS = ("no", "bf16", "fp16")
WHICH = (
    "encodings",
    "baseline",
    "seeds",
)  # the fields that say which runs there are; all others say how a run goes


@dataclass(frozen=True)
class Experiment:
    """The encodings, the data, the model and the recipe. The defaults are the job on the embedded digits.

    Every field is checked here, so that a mistake costs a line and not a night.
    """

    encodings: tuple[str, ...] = ENCODINGS
    baseline: str = "none"  # the encoding that the others are compared with
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    data: str = "digits"  # or an image folder, or what timm's create_dataset reads: torch/..., hfds/..., wds/...
    data_root: str | None = None  # where torch/..., hfds/... and wds/... find their files
    data_args: Mapping[str, Any] = field(default_factory=dict)  # further arguments of create_dataset
    train_split: str = "train"
    test_split: str = "validation"
    classes: int | None = None  # None: as the data says
    transform: Mapping[str, Any] = field(default_factory=dict)  # of timm's create_transform, for training images
    loader_workers: int = 0  # processes that read images, for each process that trains

    model: str = "vit_tiny_patch16_224"  # any timm vision transformer
    model_args: Mapping[str, Any] = field(default_factory=lambda: dict(SMALL))
    image_size: int = 8  # in pixels
    patch_size: int = 2  # in pixels
    test_sizes: tuple[int, ...] = ()  # in pixels; (): 3/4, 1, 5/4 and 3/2 of the grid trained on

    epochs: int = 25
    batch_size: int = 48  # over all processes together
    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: int | None = None  # epochs of linear warm-up, before a cosine to zero; None: an eighth of them
    precision: str = "no"  # mixed precision: "no", "bf16" or "fp16"

    def __post_init__(self) -> None:
        for name in ("encodings", "seeds", "test_sizes"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_which()
        for name in ("data", "train_split", "test_split", "model", "optimizer"):
            self._require(name, _is_text, "a name")
        self._require("data_root", lambda root: root is None or _is_text(root), "a folder or None")
        self._require("classes", lambda count: count is None or _is_whole(count, 2), "a number from 2 on or None")
        for name in ("data_args", "transform", "model_args"):
            self._require(name, _is_json_object, "a dictionary that JSON can hold")
        for name, least in {"image_size": 1, "patch_size": 1, "epochs": 1, "batch_size": 1}.items():
            self._require(
                name, lambda value, least=least: _is_whole(value, least), f"a whole number from {least} on"
            )
        self._require("loader_workers", lambda value: _is_whole(value, 0), "a whole number from 0 on")
        fewer = f"a whole number from 0 on, fewer than the {self.epochs} epochs, or None"
        self._require(
            "warmup", lambda value: value is None or (_is_whole(value, 0) and value < self.epochs), fewer
        )
        self._require("learning_rate", lambda value: _is_number(value) and value > 0, "a number above 0")
        self._require("weight_decay", lambda value: _is_number(value) and value >= 0, "a number from 0 on")
        self._require("precision", lambda value: value in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        patches = f"a multiple of patch_size={self.patch_size}"
        self._require("image_size", lambda size: size % self.patch_size == 0, patches)
        self._require("test_sizes", lambda sizes: isinstance(sizes, tuple), "sizes in pixels")
        for size in self.test_sizes:
            if not _is_whole(size, 1) or size % self.patch_size:
                raise InputError(f"test_sizes: {size!r}, expected {patches}")
        if self.data == "digits" and (self.transform or self.data_args or self.data_root):
            raise InputError("data: 'digits' is embedded and takes no transform, data_args or data_root")

    def _check_which(self) -> None:
        self._require(
            "encodings", lambda specs: isinstance(specs, tuple) and specs, "a list of at least one encoding"
        )
        for spec in (*self.encodings, self.baseline):
            if not _is_text(spec):
                raise InputError(f"encodings: {spec!r}, expected a text such as \"irpe(on='qkv')\"")
            parse(spec)
        self._require("encodings", _all_different, "each encoding once")
        if self.baseline not in self.encodings:
            raise InputError(f"baseline={self.baseline!r}, expected one of the encodings {list(self.encodings)}")
        self._require("seeds", lambda seeds: isinstance(seeds, tuple) and seeds, "a list of at least one seed")
        self._require("seeds", lambda seeds: all(_is_whole(s, 0) for s in seeds), "whole numbers from 0 on")
        self._require("seeds", _all_different, "each seed once")

    def _require(self, name: str, accepts: Any, accepted: str) -> None:
        value = getattr(self, name)
        if not accepts(value):
            raise InputError(f"{name}={value!r}, expected {accepted}")

    @property
    def warmup_epochs(self) -> int:
        return self.epochs // 8 if self.warmup is None else self.warmup

    @property
    def sizes(self) -> tuple[int, ...]:
        """The image sizes to test at, in pixels, ascending; the one trained at is always among them."""
        grid = self.image_size // self.patch_size
        derived = {self.patch_size * max(1, round(grid * part)) for part in (0.75, 1, 1.25, 1.5)}
        return tuple(sorted({self.image_size, *(self.test_sizes or derived)}))

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """All (encoding, seed), seed by seed, so that early results can already be compared."""
        return tuple((encoding, seed) for seed in self.seeds for encoding in self.encodings)

    def recipe(self) -> dict[str, Any]:
        """The fields that say how a run goes: two experiments with equal recipes can share their runs."""
        return {name: value for name, value in asdict(self).items() if name not in WHICH}

    def digest(self) -> str:
        """Eight letters that name the recipe."""
        return sha256(json.dumps(self.recipe(), sort_keys=True).encode()).hexdigest()[:8]

    def single(self, encoding: str, seed: int) -> "Experiment":
        """The experiment of one run."""
        return replace(self, encodings=(encoding,), baseline=encoding, seeds=(seed,))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """The experiment that `to_json` wrote, exactly."""
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
    def from_file(cls, path: Path) -> "Experiment":
        """The experiment in a folder's experiment.json."""
        try:
            return cls.from_json(path.read_text())
        except ValueError as error:
            raise InputError(f"{str(path)!r}: {error}") from None

    @classmethod
    def from_python(cls, path: Path) -> "Experiment":
        """The value named `experiment` in a Python file."""
        if not path.is_file():
            raise InputError(f"experiment: no file {str(path)!r}")
        try:
            value = runpy.run_path(str(path)).get("experiment")
        except (Exception, SystemExit) as error:
            raise InputError(f"experiment: {str(path)!r} fails: {type(error).__name__}: {error}") from error
        if not isinstance(value, cls):
            raise InputError(
                f"experiment: {str(path)!r} must define `experiment = Experiment(...)`, found {value!r}"
            )
        return value


def images(data: str, model: str = "vit_tiny_patch16_224") -> Experiment:
    """The defaults for image files: 224 pixels in the model's own patches, randomly cropped, flipped, coloured."""
    return Experiment(
        data=data,
        model=model,
        seeds=(0, 1, 2),
        transform={"hflip": 0.5, "color_jitter": 0.3},
        model_args={},
        image_size=224,
        patch_size=models.patch_size(model),
        epochs=100,
        batch_size=256,
        learning_rate=5e-4,
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < float("inf")  # pyright: ignore[reportArgumentType]


def _all_different(values: tuple[object, ...]) -> bool:
    return len(set(values)) == len(values)


def _is_json_object(value: object) -> bool:
    try:
        return isinstance(value, dict) and json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
