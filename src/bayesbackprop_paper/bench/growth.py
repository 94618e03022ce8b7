"""How the cost of a step grows with the width and the batch, and that of a prediction with the draws."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from bayesbackprop_paper.bench.contenders import OURS, SGD, Task, bayesian, fully_connected
from bayesbackprop_paper.bench.limits import Machine, Work, draws_work, passes_work, step_work
from bayesbackprop_paper.bench.measuring import Config, Step, passes, rows, settings
from bayesbackprop_paper.bench.report import Row
from bayesbackprop_paper.timing import Quartiles, interleaved

_PLAIN = "plain"
_IMAGES = 1


@dataclass(frozen=True)
class Sizes:
    """The points of the curves. Over widths the batch is ``batch``, and over batches and draws the width ``units``."""

    widths: tuple[int, ...] = (100, 200, 400, 800, 1200, 2400, 4800)
    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 1024)
    draws: tuple[int, ...] = (1, 3, 10, 30, 100, 300, 1000)
    units: int = 1200
    batch: int = 128
    warm_up: int = 3


QUICK = Sizes((2, 4), (1, 3), (1, 5), units=4, batch=2, warm_up=1)


def growth(config: Config, sizes: Sizes) -> list[Row]:
    """Points of three curves, each of a plain network and ours, with the least time that this machine could take."""
    points = [
        *(_step(units, sizes.batch, "units") for units in sizes.widths),
        *(_step(sizes.units, batch, "batch") for batch in sizes.batches),
        *(_prediction(sizes.units, draws) for draws in sizes.draws),
    ]
    machine = Machine()
    with settings(config):
        times = [_measure(config, point, machine, sizes.warm_up) for point in points]
    return [row for point, each in zip(points, times, strict=True) for row in _rows(config, point, each, machine)]


class Point(NamedTuple):
    """A point of a curve: its place on the axis, what is run there, and the work of each."""

    axis: str
    note: str
    table: str
    task: Task
    batch: int
    build: Callable[[], dict[str, Callable[[], object]]]
    works: dict[str, Work]
    draws: int | None = None


def _sizes(units: int) -> tuple[int, ...]:
    return 784, units, units, 10


def _step(units: int, batch: int, axis: str) -> Point:
    task, sizes = fully_connected(_sizes(units)), _sizes(units)
    works = {_PLAIN: step_work(sizes, batch, 1), OURS.name: step_work(sizes, batch, 2)}

    def build() -> dict[str, Callable[[], object]]:
        x, y = task.data(batch)
        return {_PLAIN: Step(SGD, task, x, y), OURS.name: Step(OURS, task, x, y)}

    if axis == "units":
        return Point(axis, f"U = {units}", f"A step of 784-U-U-10, batch {batch}", task, batch, build, works)
    return Point(axis, f"B = {batch}", f"A step of {task.name}, batch B", task, batch, build, works)


def _prediction(units: int, draws: int) -> Point:
    task, sizes = fully_connected(_sizes(units)), _sizes(units)
    works = {_PLAIN: passes_work(sizes, _IMAGES, draws), OURS.name: draws_work(sizes, _IMAGES, draws)}

    def build() -> dict[str, Callable[[], object]]:
        model, (x, _) = bayesian(task), task.data(_IMAGES)
        plain = torch.no_grad()(partial(passes, model.net, x, draws))
        return {_PLAIN: plain, OURS.name: partial(model.predict, x, draws=draws)}

    table = f"D draws of {task.name} for one image, or D plain passes"
    return Point("draws", f"D = {draws}", table, task, _IMAGES, build, works, draws)


def _measure(config: Config, point: Point, machine: Machine, warm_up: int) -> dict[str, Quartiles]:
    """The times of a point, and what is learnt of the machine beside it."""
    runs, works = point.build(), list(point.works.values())
    title, run = f"{point.table}: {point.note}", config.run
    times = interleaved({**runs, **machine.runs(works)}, run.rounds, warm_up, run.seed, config.track, title)
    machine.learn(works, times)
    return {name: times[name] for name in runs}


def _rows(config: Config, point: Point, times: Mapping[str, Quartiles], machine: Machine) -> list[Row]:
    extra: dict[str, dict[str, Any]] = {}
    for name, work in point.works.items():
        limit, against = machine.limit(work), None if name == _PLAIN else _PLAIN
        extra[name] = {"against": against, "axis": point.axis, "draws": point.draws, "limit": limit.milliseconds}
        extra[name] |= {"gigaflops": limit.gigaflops, "gigabytes": limit.gigabytes}
    notes = dict.fromkeys(times, point.note)
    return rows(config.run, point.task, point.batch, times, notes, extra, point.table)
