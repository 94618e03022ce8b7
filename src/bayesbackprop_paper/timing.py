"""Times of functions that are run in turn."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Wraps the rounds of a measurement to show how far it is: (rounds, what is measured) -> the same rounds.
Track = Callable[[Iterable[int], str], Iterable[int]]

CPU = torch.device("cpu")

# Rounds of single inputs before anything counts: the first ones fill caches and start threads.
_WARM_UP = 20


class Quartiles(NamedTuple):
    """The times of one contender over all rounds, in milliseconds.

    Half of them lie between ``lower`` and ``upper``; ``least`` is the shortest.
    """

    lower: float
    median: float
    upper: float
    least: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Those of some times."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(lower, median, upper, min(values))


def milliseconds(run: Callable[[], object], device: torch.device = CPU) -> float:
    """How long ``run`` takes, once.

    A GPU works behind the program's back, so the clock starts when it is idle and stops when it is idle again.
    """
    _wait(device)
    start = time.perf_counter_ns()
    run()
    _wait(device)
    return (time.perf_counter_ns() - start) / 1e6


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int,
    seed: int,
    track: Track,
    title: str,
    device: torch.device = CPU,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[str, Quartiles]:
    """The time of each of ``runs``, each once in every round, so that a busy machine slows all of them alike.

    The order changes from round to round, so that none always runs behind the same neighbour, on the caches it left.
    ``clock`` runs one of them and says how long it took; without one that is :func:`milliseconds`. Runs that are
    processes of their own bring their time with them.
    """
    clock = clock or partial(milliseconds, device=device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(seed).shuffle
    for number in track(range(warm_up + rounds), title):
        shuffle(order)
        for name in order:
            elapsed = clock(runs[name])
            if number >= warm_up:
                times[name].append(elapsed)
    return {name: Quartiles.of(values) for name, values in times.items()}


def single_input(nets: Mapping[str, nn.Module], x: Tensor, rounds: int = 500, seed: int = 0) -> dict[str, Quartiles]:
    """The milliseconds of each network for one row of ``x``, another one in each round, in turn with the others.

    Each input is timed by itself: over several at a time, a slow network would be interrupted by other programs within
    a measurement and a quick one not, and on a busy machine that looks like speed.
    """
    runs: dict[str, Callable[[], object]] = {name: partial(_next, net, cycle(x.split(1))) for name, net in nets.items()}
    with torch.inference_mode():
        return interleaved(runs, rounds, _WARM_UP, seed, lambda numbers, _: numbers, "latency")


def _next(net: nn.Module, rows: Iterator[Tensor]) -> object:
    return net(next(rows))


def _wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
