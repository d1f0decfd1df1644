"""Runs on the cores of a CPU: worker processes with one torch thread each."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from whereformer.errors import InputError
from whereformer.lab.record import Run, run_folder
from whereformer.lab.study import Study

Task = tuple[str, int]  # encoding, seed
OnEpoch = Callable[[float], None]  # told how many epochs are done, with a part of the one at work
Do = Callable[[str, int, Run, OnEpoch], dict[str, Any]]
"""From the encoding, the seed, the run's folder and who hears how many epochs are done, to the result."""
Ready = Callable[[Any, Path], Do]
"""From the study and its folder to what does one run of it: loads the data, once for all runs of a process."""


def run_in_pool(
    study: Study,
    out: Path,
    tasks: Sequence[Task],
    workers: int,
    ready: Ready,
    on_epoch: Callable[[Task, float], None],
    on_result: Callable[[Task, dict[str, Any]], None],
) -> None:
    """Runs all tasks, `workers` at a time. The first error ends all workers: what they had written is whole."""
    context = get_context("spawn")
    todo = deque(tasks)
    processes: dict[Connection, Any] = {}
    busy: dict[Connection, Task] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(study, out, ready, there))
            process.start()
            there.close()
            processes[here] = process
            busy[here] = todo.popleft()
            here.send(busy[here])
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                task = busy[pipe]
                message = _receive(pipe, processes[pipe], task)
                if isinstance(message, int | float):
                    on_epoch(task, message)
                    continue
                on_result(task, message)
                if todo:
                    busy[pipe] = todo.popleft()
                    pipe.send(busy[pipe])
                else:
                    del busy[pipe]
                    pipe.send(None)
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for process in processes.values():
            process.join()


def _receive(pipe: Connection, process: Any, task: Task) -> float | dict[str, Any]:
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        encoding, seed = task
        raise RuntimeError(f"the worker ended with code {process.exitcode} in {encoding!r}, seed {seed}") from None
    if isinstance(message, Exception):
        raise message
    return message


def _work(study: Study, out: Path, ready: Ready, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    threading.Thread(target=_follow_parent, daemon=True).start()

    import torch

    torch.set_num_threads(1)
    try:
        do = ready(study, out)
        while (task := pipe.recv()) is not None:
            encoding, seed = task
            pipe.send(do(encoding, seed, Run(run_folder(out, encoding, seed)), pipe.send))
    except (InputError, OSError) as error:
        pipe.send(error)


def _follow_parent() -> None:
    """Ends this process with its parent, however that ended: nobody else may find it at work in the folder."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
