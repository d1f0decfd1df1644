"""A result is a folder, and every file in it is whole at any moment."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whereformer.adapters.writing import replaced
from whereformer.errors import InputError
from whereformer.lab.study import Study

State = dict[str, Any]  # what resume.pt holds: {"epoch", "model", "optimizer", "scaler", "best", "log", ...}


def write(path: Path, content: str | bytes) -> None:
    """Replaces the file at once: whoever reads it, even after a power cut, finds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: object) -> InputError:
    return InputError(f"{str(path)!r} is damaged ({error}): delete it, and it is made again")


class Run:
    """The folder of one run.

    | file                                 | is                                                              |
    |--------------------------------------|-----------------------------------------------------------------|
    | experiment.json                      | the experiment of this run alone                                |
    | log.jsonl                            | one line per epoch, up to the last checkpoint                   |
    | resume.pt                            | the last checkpoint; gone when the run is finished              |
    | last.safetensors, best.safetensors   | weights after the last epoch, and after the best on test images |
    | result.json                          | the result; its presence says that the run is finished          |
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes  # False in all processes but the main one

    def result(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        if not path.exists():
            return None
        result = read_json(path)
        if not isinstance(result, dict) or not isinstance(result.get("seconds"), float):
            raise damaged(path, "no result in it")
        return result

    def load(self) -> State | None:
        path = self.folder / "resume.pt"
        if not path.exists():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # of many kinds
            raise damaged(path, f"{type(error).__name__}: {error}") from None

    def start(self, experiment: Study) -> None:
        if self.writes:
            for draft in self.folder.glob(".*.draft"):  # of a process that was killed
                draft.unlink()
            write(self.folder / "experiment.json", experiment.to_json())

    def save(self, state: State) -> None:
        """A checkpoint. The log in it is the one that counts: the two files need not change together."""
        if self.writes:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write(self.folder / "resume.pt", buffer.getvalue())
            self._write_log(state["log"])

    def finish(
        self,
        result: dict[str, Any],
        log: list[dict[str, Any]],
        weights: Mapping[str, dict[str, Tensor]],
        about: dict[str, str],
    ) -> None:
        """Writes weights under their names ("last", "best"), with `about` as metadata, and then the result."""
        from safetensors.torch import save

        if self.writes:
            self._write_log(log)
            for name, tensors in weights.items():
                write(self.folder / f"{name}.safetensors", save(tensors, {"format": "pt", **about}))
            write_json(self.folder / "result.json", result)
            (self.folder / "resume.pt").unlink(missing_ok=True)

    def _write_log(self, log: list[dict[str, Any]]) -> None:
        write(self.folder / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log))

    def log(self) -> list[dict[str, Any]]:
        path = self.folder / "log.jsonl"
        try:
            return [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError as error:
            raise InputError(f"{str(path)!r} is damaged ({error}): delete its folder to repeat the run") from None


def run_folder(out: Path, encoding: str, seed: int) -> Path:
    return out / "runs" / slug(encoding) / f"seed-{seed}"


def slug(text: str) -> str:
    """A file name that is the text itself where that can be, and else tells texts apart by a digest.

    >>> slug("sincos2d"), slug("irpe(on='qkv')")
    ('sincos2d', 'irpe-on-qkv-d9b47d')
    """
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")
    return plain if plain == text else f"{plain}-{sha256(text.encode()).hexdigest()[:6]}"


@contextmanager
def claimed(out: Path, experiment: Study) -> Iterator[None]:
    """Holds the folder of a study for this process alone; refuses one that holds runs of another experiment.

    An experiment of which no run has begun, such as one with a mistake in it, makes room for the next.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "wb") as lock:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            pass
        else:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"out={str(out)!r}: another process is at work there") from None
        path = out / "experiment.json"
        if path.exists() and any(out.glob("runs/*/seed-*")):
            _check_same(out, type(experiment).from_file(path).recipe(), experiment.recipe())
        write(path, experiment.to_json())
        yield


def _check_same(out: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    changes = [f"{name}={there[name]!r}, not {asked[name]!r}" for name in asked if there[name] != asked[name]]
    if changes:
        raise InputError(
            f"out={str(out)!r} holds another experiment, with {'; '.join(changes)}: give another folder"
        )
