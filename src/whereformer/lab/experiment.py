"""An experiment is a value: everything that decides the numbers of a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whereformer.errors import InputError
from whereformer.lab import models
from whereformer.lab.study import PRECISIONS, Study, is_json_object, is_number, is_text, is_whole

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


@dataclass(frozen=True)
class Experiment(Study):
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
        super().__post_init__()
        self._as_tuple("test_sizes")
        for name in ("data", "train_split", "test_split", "model", "optimizer"):
            self._require(name, is_text, "a name")
        self._require("data_root", lambda root: root is None or is_text(root), "a folder or None")
        self._require("classes", lambda count: count is None or is_whole(count, 2), "a number from 2 on or None")
        for name in ("data_args", "transform", "model_args"):
            self._require(name, is_json_object, "a dictionary that JSON can hold")
        for name, least in {"image_size": 1, "patch_size": 1, "batch_size": 1}.items():
            self._require(
                name, lambda value, least=least: is_whole(value, least), f"a whole number from {least} on"
            )
        self._require("loader_workers", lambda value: is_whole(value, 0), "a whole number from 0 on")
        fewer = f"a whole number from 0 on, fewer than the {self.epochs} epochs, or None"
        self._require("warmup", lambda value: value is None or (is_whole(value, 0) and value < self.epochs), fewer)
        self._require("learning_rate", lambda value: is_number(value) and value > 0, "a number above 0")
        self._require("weight_decay", lambda value: is_number(value) and value >= 0, "a number from 0 on")
        self._require("precision", lambda value: value in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        patches = f"a multiple of patch_size={self.patch_size}"
        self._require("image_size", lambda size: size % self.patch_size == 0, patches)
        self._require("test_sizes", lambda sizes: isinstance(sizes, tuple), "sizes in pixels")
        for size in self.test_sizes:
            if not is_whole(size, 1) or size % self.patch_size:
                raise InputError(f"test_sizes: {size!r}, expected {patches}")
        if self.data == "digits" and (self.transform or self.data_args or self.data_root):
            raise InputError("data: 'digits' is embedded and takes no transform, data_args or data_root")

    @property
    def warmup_epochs(self) -> int:
        return self.epochs // 8 if self.warmup is None else self.warmup

    @property
    def sizes(self) -> tuple[int, ...]:
        """The image sizes to test at, in pixels, ascending; the one trained at is always among them."""
        grid = self.image_size // self.patch_size
        derived = {self.patch_size * max(1, round(grid * part)) for part in (0.75, 1, 1.25, 1.5)}
        return tuple(sorted({self.image_size, *(self.test_sizes or derived)}))

    def words(self, result: Mapping[str, Any]) -> str:
        return f"{result['accuracy']:.1f} %"


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
