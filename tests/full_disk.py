"""A disk that is full while a file is written: the old file stays, nothing is left over, and the error names the file.

The disk is full in two ways: the file may grow to a random size only, or it cannot be brought onto the disk in the end.
"""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import nn

from bandit_worlds import KINDS, PLACES
from bayesbackprop import Batches, Bayesian, Categorical, callbacks, fit, prune, save, save_sparse, sparse
from bayesbackprop._files import write_checkpoint
from bayesbackprop.bandits import simulate
from bayesbackprop.evaluation import calibration
from bayesbackprop.sklearn import BayesianMLPRegressor
from bayesbackprop_paper.experiments import records
from bayesbackprop_paper.experiments.diagrams import reliability

# Writes the file at a path: a first time (0) and a second time (1), with other contents.
Write = Callable[[Path, int], Any]
WAYS = ("size", "sync")


class Said(NamedTuple):
    """What came of one attempt."""

    outcome: Literal["refused clearly", "equal", "accepted wrong", "crashed"]
    detail: str = ""


@dataclass(frozen=True)
class _Row:
    number: int
    text: str


def writers() -> dict[str, Write]:
    """Every kind of file that the library writes."""
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2

    def model(number: int) -> Bayesian:
        torch.manual_seed(number)
        return Bayesian(nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2)), Categorical(), seed=number)

    def pruned(number: int) -> Bayesian:
        made = model(number)
        prune(made, 0.5)
        return made

    def train(path: Path, number: int) -> None:
        fit(model(0), Batches(x, y, 20), epochs=1 + number, callbacks=[callbacks.Checkpoint(path)], seed=0)

    def simulation(path: Path, number: int) -> None:
        simulate([PLACES["rows"](1)], KINDS["linear"](seed=1), 5 + 5 * number, path)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they have not converged
        few = [BayesianMLPRegressor((4,), max_iter=1 + number, random_state=0) for number in (0, 1)]
        estimators = [each.fit(x, x[:, 0]) for each in few]
    agents = [KINDS["linear"](seed=number) for number in (0, 1)]
    curves = [calibration(torch.rand(50, 2).softmax(1), torch.arange(50) % 2) for _ in (0, 1)]
    return {
        "model": lambda path, number: save(model(number), path),
        "sparse network": lambda path, number: save_sparse(sparse(pruned(number)), path),
        "checkpoint": lambda path, number: write_checkpoint(path, {"w": torch.full((500,), float(number))}, {}),
        "training": train,
        "simulation": simulation,
        "agent": lambda path, number: agents[number].save(path),
        "estimator": lambda path, number: estimators[number].save(path),
        "table": lambda path, number: records.write_rows(path, _Row, [_Row(number, "x" * 500)]),
        "diagram": lambda path, number: reliability({str(number): curves[number]}, path.with_suffix(".png")),
    }


class Whole(NamedTuple):
    """A folder as it is before the attempt, and as it should be after it."""

    old: dict[str, bytes]
    new: dict[str, bytes]


def prepare(write: Write, folder: Path) -> Whole:
    """What the folder holds after the first write, and after the second, on a disk with room."""
    folder.mkdir(parents=True)
    write(folder / "file", 0)
    old = _contents(folder)
    write(folder / "file", 1)
    return Whole(old, _contents(folder))


def attempt(write: Write, folder: Path, whole: Whole, way: str, chance: random.Random) -> Said:
    """The second write, on a full disk."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in whole.old.items():
        (folder / name).write_bytes(content)
    (name,) = whole.old
    smallest = min(len(whole.old[name]), len(whole.new[name]))
    disk = _limited(chance.randrange(smallest)) if way == "size" else _unsynced()
    try:
        with disk:
            write(folder / "file", 1)
    except OSError as error:
        if _contents(folder) != whole.old:
            return Said("accepted wrong", f"the folder is not as it was: {sorted(_contents(folder))} ({error})")
        if str(folder / name) not in str(error):
            return Said("crashed", f"an error that names no file: {error}")
        return Said("refused clearly")
    except Exception as error:
        return Said("crashed", f"{type(error).__name__}: {error}")
    if way == "sync" and _contents(folder) == whole.new:
        return Said("equal")  # what is not synced cannot fail there
    return Said("accepted wrong", "no error")


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@contextlib.contextmanager
def _limited(size: int) -> Iterator[None]:
    """No file may grow beyond this size."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def _unsynced() -> Any:
    """Some file systems say only when a file is synced that there is no room for it."""
    return mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def main() -> None:
    """Fill the disk once for each kind of file and way, and print what came of it."""
    from attack import disk  # which needs this module

    for attempt in disk.run(seed=1, seconds=0.0):
        print(json.dumps(attempt))
