"""An experiment is a value: what it accepts, and how it is written and read."""

from dataclasses import FrozenInstanceError, replace

import pytest

from whereformer import InputError
from whereformer.lab.experiment import ENCODINGS, Experiment, images


def test_json_gives_back_the_same_experiment():
    for experiment in (
        Experiment(),
        images("photos"),
        Experiment(encodings=("learned", "irpe(on='qkv', ratio=2.5)"), baseline="learned", test_sizes=(8, 14)),
    ):
        assert Experiment.from_json(experiment.to_json()) == experiment


def test_images_are_cut_as_the_model_is_made_for():
    assert images("photos").patch_size == 16
    assert images("photos", "vit_small_patch32_224").patch_size == 32
    with pytest.raises(InputError, match="ResNet, expected a vision transformer"):
        images("photos", "resnet18")
    with pytest.raises(InputError, match="no_such_model"):
        images("photos", "no_such_model")


def test_a_python_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from whereformer.lab.experiment import Experiment\nexperiment = Experiment(epochs=7, warmup=1)\n"
    )
    assert Experiment.from_python(path) == Experiment(epochs=7, warmup=1)
    path.write_text("experiment = 3")
    with pytest.raises(InputError, match="must define"):
        Experiment.from_python(path)
    path.write_text("experiment = (")
    with pytest.raises(InputError, match=r"mine\.py' fails: SyntaxError"):
        Experiment.from_python(path)
    path.write_text("1 / 0")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        Experiment.from_python(path)
    with pytest.raises(InputError, match="no file"):
        Experiment.from_python(tmp_path / "nowhere.py")


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Experiment().epochs = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encodings", ()),
        ("encodings", ("none", "none")),
        ("encodings", ("nonsense",)),
        ("encodings", ("irpe(side='k')",)),
        ("encodings", (3,)),
        ("baseline", "irpe(on='q')"),
        ("seeds", ()),
        ("seeds", (0, 0)),
        ("seeds", (-1,)),
        ("seeds", (True,)),
        ("data", ""),
        ("data_args", [1]),
        ("model", None),
        ("model_args", {"norm_layer": object()}),
        ("image_size", 9),
        ("image_size", 0),
        ("image_size", 8.0),
        ("patch_size", 0),
        ("test_sizes", (7,)),
        ("test_sizes", 12),
        ("epochs", 0),
        ("batch_size", 0),
        ("warmup", 30),
        ("warmup", -1),
        ("loader_workers", -1),
        ("learning_rate", 0),
        ("learning_rate", float("inf")),
        ("learning_rate", "1e-3"),
        ("weight_decay", -0.1),
        ("precision", "fp8"),
        ("classes", 1),
        ("data_root", 3),
        ("transform", {"auto_augment": "rand-m9"}),  # digits take none
    ],
)
def test_a_mistake_is_named_at_the_door(field, value):
    named = {"encodings": "encoding|irpe", "transform": "digits"}.get(field, field)
    with pytest.raises(InputError, match=named):
        replace(Experiment(), **{field: value})


def test_json_with_unknown_fields_is_refused():
    with pytest.raises(InputError, match="epoch is not known"):
        Experiment.from_json('{"epoch": 3}')
    with pytest.raises(InputError, match=r"baseline, .*warmup, .*missing"):
        Experiment.from_json("{}")
    with pytest.raises(InputError, match="not JSON"):
        Experiment.from_json("{")
    with pytest.raises(InputError, match="not known"):
        Experiment.from_json("[]")


def test_sizes_are_whole_grids_with_the_one_trained_on():
    assert Experiment().sizes == (6, 8, 10, 12)
    assert Experiment(test_sizes=(16,)).sizes == (8, 16)
    assert images("photos").sizes == (160, 224, 288, 336)


def test_warm_up_follows_the_epochs():
    assert Experiment().warmup_epochs == 3
    assert Experiment(epochs=1).warmup_epochs == 0
    assert Experiment(epochs=100, warmup=5).warmup_epochs == 5


def test_runs_go_seed_by_seed():
    experiment = Experiment(encodings=("none", "peg"), seeds=(3, 5))
    assert experiment.runs == (("none", 3), ("peg", 3), ("none", 5), ("peg", 5))


def test_the_recipe_is_all_but_which_runs():
    same = replace(Experiment(), encodings=ENCODINGS[:2], seeds=(7,))
    assert same.digest() == Experiment().digest()
    assert replace(Experiment(), epochs=26).digest() != Experiment().digest()
