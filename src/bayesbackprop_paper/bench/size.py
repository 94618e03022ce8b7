"""A network of fifty million weights: what it takes to make it, to train it, to predict, to save it and to load it."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from bayesbackprop.model import Bayesian
from bayesbackprop.saving import load, save
from bayesbackprop_paper.bench.apart import call_apart
from bayesbackprop_paper.bench.contenders import OURS, SGD, Task, fully_connected
from bayesbackprop_paper.bench.measuring import Config, Step, rows
from bayesbackprop_paper.bench.memory import process_peak, resident_memory
from bayesbackprop_paper.bench.report import Row
from bayesbackprop_paper.timing import interleaved, milliseconds

_CONTENDERS = {"plain": SGD, OURS.name: OURS}
_MEGABYTE = 2**20
# Of a prediction.
_DRAWS = 10


@dataclass(frozen=True)
class Sizes:
    """How large the network is, and the batch of its first step."""

    sizes: tuple[int, ...] = (784, 6700, 6700, 10)
    batch: int = 128


QUICK = Sizes((5, 4, 4, 3), 2)


class Asked(NamedTuple):
    """What a process is to do, with which of the contenders, and how it is set up."""

    phase: str
    name: str
    sizes: Sizes
    threads: int
    seed: int
    file: Path

    @property
    def task(self) -> Task:
        """The network and its data."""
        return fully_connected(self.sizes.sizes)

    def module(self) -> nn.Module:
        """What is trained and saved."""
        return _CONTENDERS[self.name].build(self.task).module


class Taken(NamedTuple):
    """What it took: time, and the most memory above that of a process that has only imported everything."""

    milliseconds: float
    peak: int | None


def size(config: Config, sizes: Sizes) -> list[Row]:
    """Time and peak memory of construction, a first step, a prediction, saving and loading, each in a fresh process."""
    task, run = fully_connected(sizes.sizes), config.run
    with tempfile.TemporaryDirectory() as folder:

        def ask(phase: str, name: str, file: str) -> Asked:
            return Asked(phase, name, sizes, run.threads, run.seed, Path(folder, file))

        for name in _CONTENDERS:
            call_apart(take, [(ask("saving", name, name),)])  # what will be loaded
        asked = {
            (phase, name): ask(phase, name, f"new {name}" if phase == "saving" else name)
            for phase in _PHASES
            for name in _CONTENDERS
        }
        peaks: dict[tuple[str, str], list[int]] = {key: [] for key in asked}

        def measure(key: tuple[str, str]) -> float:
            (taken,) = call_apart(take, [(asked[key],)])
            peaks[key] += [] if taken.peak is None else [taken.peak]
            return taken.milliseconds

        runs = {" ".join(key): partial(measure, key) for key in asked}
        times = interleaved(runs, run.rounds, 0, run.seed, config.track, task.name, clock=lambda each: each())
    made: list[Row] = []
    for phase, (_, notes) in _PHASES.items():
        extra: dict[str, dict[str, Any]] = {}
        for name in _CONTENDERS:
            found = peaks[phase, name]
            against = None if name == "plain" else "plain"
            extra[name] = {"against": against, "megabytes": median(found) / _MEGABYTE if found else None}
        of_phase = {name: times[f"{phase} {name}"] for name in _CONTENDERS}
        made += rows(run, task, sizes.batch, of_phase, notes, extra, f"{task.name}: {phase}")
    return made


def take(asked: Asked) -> Taken:
    """In a process of its own: prepare what is asked for, then do it."""
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    idle = resident_memory()
    run = _PHASES[asked.phase][0](asked)
    elapsed: list[float] = []
    peak = process_peak(lambda: elapsed.append(milliseconds(run)))
    return Taken(elapsed[0], None if idle is None or peak is None else peak - idle)


def _construction(asked: Asked) -> Callable[[], object]:
    return asked.module


def _first_step(asked: Asked) -> Callable[[], object]:
    return Step(_CONTENDERS[asked.name], asked.task, *asked.task.data(asked.sizes.batch))


def _prediction(asked: Asked) -> Callable[[], object]:
    module, (x, _) = asked.module(), asked.task.data(asked.sizes.batch)
    if isinstance(module, Bayesian):
        return lambda: module.predict(x, draws=_DRAWS)
    return torch.no_grad()(lambda: module.eval()(x))


def _saving(asked: Asked) -> Callable[[], object]:
    module = asked.module()
    if isinstance(module, Bayesian):
        return lambda: save(module, asked.file)
    return lambda: torch.save(module.state_dict(), asked.file)


def _loading(asked: Asked) -> Callable[[], object]:
    net = asked.task.net()
    if asked.name == OURS.name:
        return lambda: load(asked.file, net)
    return lambda: net.load_state_dict(torch.load(asked.file))


# What prepares each phase and returns what is measured, and a note for each contender.
_PHASES: Mapping[str, tuple[Callable[[Asked], Callable[[], object]], Mapping[str, str]]] = {
    "construction": (_construction, {"plain": "the network", OURS.name: "the network, Bayesian, FreeEnergy"}),
    "first step": (_first_step, {"plain": "plain loss, SGD", OURS.name: "scale mixture, sampled, SGD"}),
    "prediction": (_prediction, {"plain": "net(x)", OURS.name: f"model.predict(x, draws={_DRAWS})"}),
    "saving": (_saving, {"plain": "torch.save(net.state_dict(), file)", OURS.name: "save(model, file)"}),
    "loading": (_loading, {"plain": "net.load_state_dict(torch.load(file))", OURS.name: "load(file, net)"}),
}
