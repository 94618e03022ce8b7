"""The three comparisons: a training step, a step of a small network, and a prediction."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesbackprop_paper.bench.contenders import DROPOUT, OURS, SGD, Contender, Task, bayesian
from bayesbackprop_paper.bench.memory import peak_memory
from bayesbackprop_paper.bench.report import Row, Run
from bayesbackprop_paper.timing import CPU, Quartiles, Track, interleaved

# Ours, with the ensemble drawn once and used again.
KEPT = f"{OURS.name} kept"

# More fields of a row, by the name of its contender.
Extra = Mapping[str, Mapping[str, Any]]

_FLOAT_BYTES = 4
_BASES = ("sgd", "dropout", "passes", OURS.name)


@dataclass(frozen=True)
class Config:
    """How to measure: what every row says of the run, the other libraries, what shows the progress, and where."""

    run: Run
    peers: Sequence[Contender] = ()
    optimiser: bool = True
    track: Track = lambda rounds, _: rounds
    device: torch.device = CPU


def step(config: Config, units: Sequence[int]) -> list[Row]:
    """784-U-U-10 on batches of 128, for each U of ``units``, and its peak memory."""
    batch, tasks = 128, [Task((784, number, number, 10), config.device) for number in units]
    rows: list[Row] = []
    with _settings(config):
        memory = [_memory(config, task, batch) for task in tasks]
        for task, extra in zip(tasks, memory, strict=True):
            rows += _training(config, task, batch, warm_up=5, extra=extra)
    return rows


def small(config: Config) -> list[Row]:
    """119-100-100-1 on batches of 64, the network of the paper's bandits, where all is overhead."""
    with _settings(config):
        return _training(config, Task((119, 100, 100, 1), config.device), batch=64, warm_up=50, extra={})


def predict(config: Config, units: int, images: Sequence[int], draws: int) -> list[Row]:
    """The probabilities of ``draws`` networks 784-U-U-10 for some images, beside as many plain passes."""
    task = Task((784, units, units, 10), config.device)
    notes = {"passes": "one plain network", OURS.name: "predict(x)", KEPT: "ensemble().predict(x)"}
    notes |= {contender.name: "a loop over draws" for contender in config.peers}
    rows: list[Row] = []
    with _settings(config), torch.no_grad():
        model = bayesian(task)
        ensemble = model.ensemble(draws)
        peers = {contender.name: contender.build(task) for contender in config.peers}
        for number in images:
            x, _ = task.data(number)
            runs: dict[str, Callable[[], object]] = {
                "passes": partial(_passes, model.net, x, draws),
                OURS.name: partial(model.predict, x, draws=draws),
                KEPT: partial(ensemble.predict, x),
            }
            runs |= {name: partial(_average, trainee.forward, x, draws) for name, trainee in peers.items()}
            title = f"{task.name}, {draws} draws for {number}"
            times = interleaved(runs, config.run.rounds, 1, config.run.seed, config.track, title, config.device)
            shared = {"images": number, "draws": draws}
            rows += _rows(config.run, task, number, times, notes, dict.fromkeys(times, shared))
    return rows


@contextmanager
def _settings(config: Config) -> Iterator[None]:
    """The run's threads and seed, and afterwards those from before."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.run.threads)
    try:
        with torch.random.fork_rng(devices=[config.device] if config.device.type == "cuda" else []):
            torch.manual_seed(config.run.seed)
            yield
    finally:
        torch.set_num_threads(before)


def _training(config: Config, task: Task, batch: int, warm_up: int, extra: Extra) -> list[Row]:
    contenders = _contenders(config)
    x, y = task.data(batch)
    steps = {each.name: _step(each, task, x, y, config.optimiser) for each in contenders}
    title = f"{task.name}, steps"
    times = interleaved(steps, config.run.rounds, warm_up, config.run.seed, config.track, title, config.device)
    return _rows(config.run, task, batch, times, {each.name: each.objective for each in contenders}, extra)


def _memory(config: Config, task: Task, batch: int) -> Extra:
    """The peak of a step above parameters and gradients, in units of all weights."""
    x, y = task.data(batch)
    weights = _FLOAT_BYTES * task.weights
    above: dict[str, float] = {}
    contenders = _contenders(config)
    for _, each in zip(config.track(range(len(contenders)), f"{task.name}, memory"), contenders, strict=True):
        peak = peak_memory(partial(_step, each, task, x, y, config.optimiser), config.device)
        above[each.name] = peak / weights - 2 * each.tensors  # as many gradients as parameters
    return {name: {"memory": value, "memory_activations": above[SGD.name]} for name, value in above.items()}


def _contenders(config: Config) -> list[Contender]:
    return [SGD, DROPOUT, OURS, *config.peers]


def _step(contender: Contender, task: Task, x: Tensor, y: Tensor, with_optimiser: bool) -> Callable[[], None]:
    trainee = contender.build(task)
    optimiser = torch.optim.SGD(trainee.parameters, lr=1e-5)

    def run() -> None:
        optimiser.zero_grad()
        trainee.cost(x, y).backward()
        if with_optimiser:
            optimiser.step()

    return run


def _passes(forward: Callable[[Tensor], Tensor], x: Tensor, draws: int) -> list[Tensor]:
    return [forward(x) for _ in range(draws)]


def _average(forward: Callable[[Tensor], Tensor], x: Tensor, draws: int) -> Tensor:
    """The mean probabilities, by a loop: the layers of other libraries draw one set of weights a call."""
    return torch.stack(_passes(forward, x, draws)).softmax(-1).mean(0)


def _rows(
    run: Run,
    task: Task,
    batch: int,
    times: Mapping[str, Quartiles],
    notes: Mapping[str, str],
    extra: Extra,
) -> list[Row]:
    def ratios(time: Quartiles) -> dict[str, Any]:
        return {f"ratio_{base}": time.median / times[base].median for base in _BASES if base in times}

    return [
        Row(
            run=run,
            name=name,
            note=notes[name],
            network=task.name,
            units=task.sizes[1],
            batch=batch,
            milliseconds=time.median,
            quartiles=(time.lower, time.upper),
            **ratios(time),
            **extra.get(name, {}),
        )
        for name, time in times.items()
    ]
