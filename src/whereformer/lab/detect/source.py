"""The data of an experiment: the shapes that it draws itself, or what lies in a folder."""

from pathlib import Path

from whereformer.errors import InputError
from whereformer.lab.detect.experiment import DetectionExperiment
from whereformer.lab.detect.load import Detection, load
from whereformer.lab.detect.shapes import generate
from whereformer.lab.detect.tree import Progress


def drawn(experiment: DetectionExperiment, out: Path, on_image: Progress | None = None) -> Path:
    """Where the images are: drawn into `out`/shapes first, if that is what the experiment asks for.

    One process at a time may do so; what is there is not drawn again.
    """
    if experiment.data == "shapes":
        return generate(out / "shapes", experiment.shapes, on_image)
    return Path(experiment.data)


def opened(experiment: DetectionExperiment, out: Path, on_image: Progress | None = None) -> Detection:
    """Reads the data, once it is `drawn`, and checks it.

    Raises:
        InputError: the data is of no use, or refused; there are fewer images than a batch takes, or no box.
    """
    folder = out / "shapes" if experiment.data == "shapes" else Path(experiment.data)
    data = load(folder, broken=experiment.broken, on_image=on_image)
    if len(data.train) < experiment.batch_size:
        raise InputError(
            f"batch_size={experiment.batch_size}, expected at most the {len(data.train)} images to train on"
        )
    if bool(data.train.boxes.crowd.all()):  # of none, too
        kinds = "; ".join(f"{len(found):,} x {kind}" for kind, found in data.reports[0].kinds().items())
        raise InputError(
            f"{data.reports[0].name}: none of the {len(data.train)} images to train on holds a box, crowds aside"
            + (f"; skipped or mended: {kinds}" if kinds else "")
        )
    return data
