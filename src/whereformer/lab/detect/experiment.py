"""An experiment in detection is a value: everything that decides the numbers of its runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from whereformer.errors import InputError
from whereformer.grid import Grid
from whereformer.lab.detect.augment import Augmentation
from whereformer.lab.detect.checks import FORMS as BROKEN
from whereformer.lab.detect.checks import Broken
from whereformer.lab.detect.evaluate import AREAS
from whereformer.lab.detect.shapes import Shapes
from whereformer.lab.study import PRECISIONS, Study, is_json_object, is_number, is_text, is_whole

SINE = "detr_sine(offset=-0.5)"  # of the middles of patches, where those of object queries are looked for
ENCODINGS = ("none", SINE, f"{SINE} + irpe(ratio=2)")
ON = ("self", "cross", "both")
SCHEDULES = ("drop", "cosine")
MODELS = ("detr", "conditional_detr")
SMALL_SHAPES = {"train": 4000, "val": 500, "size": 64, "most": 4, "sides": [0.2, 0.6]}
SMALL_AUGMENTATION = {"scaled": 64, "shorter": [64], "longest": 64, "crops": 0.0}  # but for flips, none
SMALL_MODEL = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "dropout": 0.0,
}
SMALL_BACKBONE = {"stem": 16, "layers": [1, 1], "channels": [32, 64]}


@dataclass(frozen=True)
class DetectionExperiment(Study):
    """The encodings, the data, the detector and the recipe. The defaults are the small run on the drawn shapes.

    An encoding is one text of the catalog, put on a detector whose own sines have been removed: "detr_sine" is
    DETR as published, "none" knows nothing of positions, "detr_sine + irpe(ratio=2)" is the iRPE paper's. Every
    field is checked here, so that a mistake costs a line and not a night.
    """

    encodings: tuple[str, ...] = ENCODINGS
    baseline: str = SINE  # the encoding that the others are compared with
    seeds: tuple[int, ...] = (0, 1, 2)

    data: str = "shapes"  # or a folder or a zip file of annotated images
    data_args: Mapping[str, Any] = field(default_factory=dict)  # of `Shapes`, other than `SMALL_SHAPES`
    broken: Broken = "skip"  # or "refuse": what becomes of data with broken images or boxes
    augmentation: Mapping[str, Any] = field(default_factory=lambda: dict(SMALL_AUGMENTATION))
    """Of `Augmentation`; "scaled": its sizes are those for images of so many pixels instead of DETR's 800."""
    areas: Literal["pixels", "share"] = "share"  # by what objects are small and large: see `evaluate`
    loader_workers: int = 0  # processes that read images, for each process that trains

    model: str = "conditional_detr"  # or "detr"
    model_args: Mapping[str, Any] = field(default_factory=lambda: dict(SMALL_MODEL))  # of transformers' config
    backbone: str = "small"  # a ResNet of few blocks; or a timm model
    backbone_args: Mapping[str, Any] = field(default_factory=lambda: dict(SMALL_BACKBONE))
    """Of the small one, whose stages halve the map; or else of timm's `create_model`."""
    backbone_weights: str | None = None  # None: random; "pretrained": timm's, from the hub; or a file
    backbone_epochs: int = 6
    """In which the backbone first learns to tell apart the objects, cut out: see `learn_objects`. None of them if
    the detector starts from `weights`."""
    frozen_norm: bool = False  # True: batch norm, the stem and the first stage stay as the weights say, as in DETR
    weights: str | None = (
        None  # of a whole detector to start from, for other classes or encodings too: see `start`
    )
    queries: tuple[int, int] | None = (5, 5)  # None; or (rows, columns): object queries on a lattice
    decoder_encoding: str | None = None  # for queries on a lattice: a text, of the decoder's attentions
    decoder_on: str = "both"  # of these, or "self" or "cross"

    epochs: int = 12
    schedule: str = "cosine"  # how the learning rates go: they drop once; or "cosine", to zero
    drop: int | None = None  # epochs after which they are a tenth; None: never
    batch_size: int = 32  # over all processes together
    learning_rate: float = 1e-3
    backbone_learning_rate: float = 1e-3  # 0: the backbone is not trained
    weight_decay: float = 1e-4  # of all weights
    warmup: int = 100  # steps of linear warm-up
    clip: float | None = 0.1  # the greatest norm of the gradient
    ema: float | None = (
        None  # decay of a moving average of the weights, which is then tested and kept in their place
    )
    precision: str = "no"  # mixed precision: "no", "bf16" or "fp16"
    evaluate_every: int = 4  # epochs; the last one is always followed by a test

    def __post_init__(self) -> None:
        super().__post_init__()
        self._as_tuple("queries")
        for name in ("data", "backbone"):
            self._require(name, is_text, "a name")
        for name in ("backbone_weights", "weights"):
            self._require(name, lambda value: value is None or is_text(value), "a file or None")
        for name in ("data_args", "augmentation", "model_args", "backbone_args"):
            self._require(name, is_json_object, "a dictionary that JSON can hold")
        choices = {
            "model": MODELS,
            "broken": BROKEN,
            "areas": AREAS,
            "precision": PRECISIONS,
            "decoder_on": ON,
            "schedule": SCHEDULES,
        }
        for name, accepted in choices.items():
            self._require(name, lambda value, among=accepted: value in among, f"one of {', '.join(accepted)}")
        self._require("frozen_norm", lambda value: type(value) is bool, "True or False")
        for name, least in {
            "batch_size": 1,
            "evaluate_every": 1,
            "loader_workers": 0,
            "warmup": 0,
            "backbone_epochs": 0,
        }.items():
            self._require(
                name, lambda value, least=least: is_whole(value, least), f"a whole number from {least} on"
            )
        self._require(
            "drop",
            lambda value: value is None or (is_whole(value, 1) and value < self.epochs),
            f"a whole number from 1 on, fewer than the {self.epochs} epochs, or None",
        )
        self._require("learning_rate", lambda value: is_number(value) and value > 0, "a number above 0")
        for name in ("backbone_learning_rate", "weight_decay"):
            self._require(name, lambda value: is_number(value) and value >= 0, "a number from 0 on")
        self._require(
            "clip", lambda value: value is None or (is_number(value) and value > 0), "a number above 0 or None"
        )
        self._require(
            "ema", lambda value: value is None or (is_number(value) and 0 < value < 1), "between 0 and 1, or None"
        )
        if self.schedule != "drop":
            self._require("drop", lambda value: value is None, f"None: schedule={self.schedule!r}")
        self._check_queries()
        if self.data != "shapes" and self.data_args:
            raise InputError(f"data_args={dict(self.data_args)!r}: only data='shapes' takes any")
        _ = self.shapes, self.home(1)  # they say what is wrong with their arguments

    def _check_queries(self) -> None:
        lattice = self.queries is None or (
            isinstance(self.queries, tuple)
            and len(self.queries) == 2
            and all(is_whole(side, 1) for side in self.queries)
        )
        self._require("queries", lambda _: lattice, "(rows, columns) or None")
        if self.decoder_encoding is not None:
            self._require("decoder_encoding", is_text, "a text such as 'irpe', or None")
            self._require("decoder_encoding", lambda _: self.queries, "None: no queries=(rows, columns) are said")

    @property
    def shapes(self) -> Shapes:
        """What is drawn if the data is "shapes"."""
        return _made("data_args", Shapes, {**SMALL_SHAPES, **self.data_args})

    @property
    def augmented(self) -> Augmentation:
        """What becomes of images before they are trained or tested on."""
        args = dict(self.augmentation)
        base = Augmentation.scaled(args.pop("scaled")) if "scaled" in args else Augmentation()
        return _made("augmentation", lambda **more: replace(base, **more), args, kind=Augmentation)

    def home(self, stride: int) -> Grid:
        """The grid of the largest images, whose cells are `stride` x `stride` pixels."""
        sizes = max(self.augmented.shorter), self.augmented.longest
        return Grid(*(-(-size // stride) for size in sizes))

    def recipe(self) -> dict[str, Any]:
        return {name: value for name, value in super().recipe().items() if name != "loader_workers"}  # no number's

    def words(self, result: Mapping[str, Any]) -> str:
        ap = result["metrics"]["AP"]
        return "AP –" if ap is None else f"AP {100 * ap:.1f}"


def paper(data: str, epochs: int = 150) -> DetectionExperiment:
    """The recipe of the iRPE paper (Wu et al. 2021, section 4.3) for annotated images, such as COCO's: DETR-R50,
    150 or 300 epochs, the learning rates a tenth in the last third of them.

    The official code draws the start of iRPE's tables, as of every matrix of the transformer, from Xavier's
    distribution; ours start at zero, as the paper says.
    """
    return DetectionExperiment(
        encodings=("detr_sine", "detr_sine + irpe(ratio=2)"),
        baseline="detr_sine",
        seeds=(0,),
        data=data,
        augmentation={},
        areas="pixels",
        loader_workers=2,
        model="detr",
        model_args={},
        queries=None,
        backbone="resnet50.tv_in1k",
        backbone_args={},
        backbone_weights="pretrained",
        backbone_epochs=0,
        frozen_norm=True,
        epochs=epochs,
        schedule="drop",
        warmup=0,
        drop=max(1, epochs * 2 // 3),
        batch_size=16,
        learning_rate=1e-4,
        backbone_learning_rate=1e-5,
        weight_decay=1e-4,
        clip=0.1,
        evaluate_every=10,
    )


def _made(name: str, make: Any, args: Mapping[str, Any], kind: Any = None) -> Any:
    known = {f.name for f in fields(kind or make)}
    if unknown := sorted(args.keys() - known):
        raise InputError(f"{name}: {', '.join(unknown)} unknown, expected some of {', '.join(sorted(known))}")
    return make(**args)
