"""Table 1: test errors on MNIST, cell by cell. A cell that was not run is missing, never guessed."""

import json
import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from bayesbackprop._errors import invalid
from bayesbackprop.callbacks import Callback
from bayesbackprop_paper.data import Images
from bayesbackprop_paper.experiments.figures import OURS, finish, panels
from bayesbackprop_paper.experiments.mnist import RESULT, Config, Result, configuration, run, write_result
from bayesbackprop_paper.experiments.recipe import CHECKPOINT, Schedule, read_metrics
from bayesbackprop_paper.experiments.records import arithmetic, as_written, locked, read_rows, remember, write_rows

# What the paper printed, by method and units.
PUBLISHED: dict[str, dict[int, float]] = {
    "sgd": {400: 1.83, 800: 1.84, 1200: 1.88},
    "dropout": {400: 1.51, 800: 1.33, 1200: 1.36},
    "bbb-gaussian": {400: 1.82, 800: 1.99, 1200: 2.04},
    "bbb-mixture": {400: 1.36, 800: 1.34, 1200: 1.32},
}

# The test error whose time is measured, in %.
TARGET = 1.4

# In tables and pictures.
NAMES = {
    "sgd": "SGD",
    "dropout": "Dropout",
    "dropconnect": "DropConnect",
    "map-gaussian": "MAP, Gaussian prior",
    "map-laplace": "MAP, Laplace prior",
    "bbb-gaussian": "Bayes by Backprop, Gaussian",
    "bbb-mixture": "Bayes by Backprop, scale mixture",
    "bbb-mixture-from-dropout": "Bayes by Backprop, scale mixture, from dropout's weights",
}

# A constant rate and the average over the last thousands of steps: while the rate is high the network keeps moving
# about, and the average is at the centre.
_STEADY = Schedule(epochs=40, decay="constant", averaging=0.9998)

# The recipes, chosen on the validation set; docs/decisions/mnist.md has what was tried.
RECIPES: dict[str, Config] = {
    # Noise that starts strong and changes slowly; the complexity in closed form, since near the spike a sampled one is
    # mostly noise. A wide slab hardly pulls at the means; an epsilon of this size leaves unused ones to the spike.
    "bbb-mixture": Config(
        "bbb-mixture",
        schedule=Schedule(60, rho_rate=0.1, epsilon=1e-5, decay="constant", averaging=0.9999, settling=2 / 3),
        complexity="closed",
        pi=0.75,
        sigma1=1.0,
        sigma2=math.exp(-9),
        sigma=0.035,
        hidden_sigma=0.7,
        prediction="draws",
    ),
    "bbb-gaussian": Config("bbb-gaussian", schedule=Schedule(epochs=40, rho_rate=0.1), sigma=0.02, prior_sigma=1.0),
    "sgd": Config("sgd", schedule=Schedule(epochs=40, optimiser="sgd", learning_rate=0.1, decay="constant")),
    "dropout": Config("dropout", schedule=replace(_STEADY, epochs=80), dropout=0.3),  # whose error falls slowly
    "dropconnect": Config("dropconnect", schedule=_STEADY),
    "map-gaussian": Config("map-gaussian", schedule=_STEADY),
    "map-laplace": Config("map-laplace", schedule=_STEADY, prior_sigma=0.05),
}

# Beside those of the paper: from the weights of a network that was trained with dropout.
_WARM = Schedule(epochs=16, learning_rate=1e-4, decay="constant", averaging=0.9998)
RECIPES["bbb-mixture-from-dropout"] = Config("bbb-mixture", schedule=_WARM, sigma=0.02, start=RECIPES["dropout"])

_PAPERS = "#e67e22"  # its colour in the picture


def cells(
    methods: Iterable[str],
    units: Iterable[int],
    seeds: Iterable[int],
    temperatures: Sequence[float] = (1.0,),
    epochs: int | None = None,
) -> list[Config]:
    """The experiments of a table, the seeds last, so that every cell has one run before any has two."""
    chosen: list[Config] = []
    for seed in seeds:
        for method in methods:
            for temperature in temperatures if RECIPES[method].is_bayesian else (1.0,):
                recipe = replace(RECIPES[method], temperature=temperature)
                chosen += [sized(recipe, number, seed, epochs) for number in units]
    return chosen


def sized(recipe: Config, units: int, seed: int, epochs: int | None = None) -> Config:
    """A recipe for a network of so many units, and for what it starts from, which has its share of the epochs."""
    total = epochs or recipe.epochs
    if recipe.start is not None and total < 2:
        raise invalid("epochs", recipe.row, "at least 2, for what it starts from and for itself", total)
    own = max(1, round(total * recipe.schedule.epochs / recipe.epochs))
    start = None if recipe.start is None else sized(recipe.start, units, seed, total - own)
    schedule = replace(recipe.schedule, seed=seed, epochs=own)
    return replace(recipe, units=units, seed=seed, schedule=schedule, start=start)


def reproduce(
    configs: Sequence[Config],
    images: Images,
    runs: Path,
    results: Path,
    command: str,
    progress: Callable[[str], Callback],
) -> list[Result]:
    """Run what has not been run, and write ``table1.csv`` anew after each cell; ``table1.json`` says how each was.

    Of the largest networks the test error is recorded by epoch, for figure 2.
    """
    table = results / "table1.csv"
    largest = max(config.units for config in configs)
    for config in configs:
        was = finished(config, images, runs, command, progress, curve=config.units == largest)
        with locked(results):
            write(table, [*read(table), Result(**was["result"])])
            made = {**was["made"], **arithmetic(), "seconds_to_target": seconds_to(TARGET, config, runs)}
            remember(results / "table1.json", name_of(config), made)
    return read(table)


def finished(
    config: Config, images: Images, runs: Path, command: str, progress: Callable[[str], Callback], *, curve: bool
) -> dict[str, Any]:
    """What a run gave and how it was made, after running it, and what it starts from, if that has not been done."""
    folder = runs / name_of(config)
    done = folder / RESULT
    with locked(folder):  # another process with the same run waits, and finds it done
        if not done.exists():
            start, before = None, 0.0
            if config.start is not None:
                before = finished(config.start, images, runs, command, progress, curve=curve)["result"]["seconds"]
                start = runs / name_of(config.start)
            result = run(config, images, folder, progress(name_of(config)), curve=curve, start=start)
            result = replace(result, seconds=before + result.seconds)
            write_result(config, folder, result, command)
            (folder / CHECKPOINT).unlink()  # it served to resume
    was: dict[str, Any] = json.loads(done.read_text())
    if configuration(was["made"]) != config:
        raise ValueError(f"The run in {folder} was made by another recipe: remove it or choose other --runs.")
    return was


class Verified(NamedTuple):
    """What a run gave when its row was written and what it gives now; a pair is a value then and one now."""

    was: Result
    now: Result
    arithmetic: dict[str, tuple[Any, Any]]  # what of it differs

    def differing(self) -> dict[str, tuple[Any, Any]]:
        """In what they differ, as far as the table shows it: all but their time, and what it did not show then."""
        shown = {name for name in asdict(self.was) if name != "seconds"}
        pairs = {name: tuple(as_written(getattr(row, name)) for row in self[:2]) for name in sorted(shown)}
        return {name: (before, after) for name, (before, after) in pairs.items() if before not in (after, "nan")}


def verify(
    name: str,
    images: Images,
    runs: Path,
    results: Path,
    command: str,
    progress: Callable[[str], Callback],
) -> Verified:
    """Train the run of a row again, as ``table1.json`` says it was made.

    A verification that was stopped goes on; one that has ended begins anew.
    """
    entries = json.loads((results / "table1.json").read_text()) if (results / "table1.json").exists() else {}
    if name not in entries:
        raise invalid("name", "verify", f"a row of {results / 'table1.json'}: {', '.join(sorted(entries))}", name)
    config = configuration(entries[name])
    was = next(row for row in read(results / "table1.csv") if _key(row) == _key(config))
    torch.set_num_threads(entries[name].get("threads", 1))  # sums in another order round in another way
    again = runs / "verify"
    now = finished(config, images, again, command, progress, curve=False)["result"]
    shutil.rmtree(again / name)
    rounding = {each: (entries[name].get(each, "unknown"), after) for each, after in arithmetic().items()}
    return Verified(was, Result(**now), {each: pair for each, pair in rounding.items() if pair[0] != pair[1]})


def seconds_to(error: float, config: Config, runs: Path) -> float | None:
    """How long a run was trained until its test error was as low, the time of its start included; None if never."""
    start = [] if config.start is None else read_metrics(runs / name_of(config.start))
    seconds = sum(record["seconds"] for record in start)
    for record in read_metrics(runs / name_of(config)):
        seconds += record["seconds"]
        if record.get("test_error", math.inf) <= error:
            return seconds
    return None


def name_of(config: Config) -> str:
    """The name of a run's folder."""
    temperature = "" if config.temperature == 1 else f"-t{config.temperature:g}"
    return f"{config.row}-{config.units}{temperature}-{config.epochs}epochs-seed{config.seed}"


def _key(row: Result | Config) -> tuple[Any, ...]:
    """What no two rows have in common."""
    method = row.row if isinstance(row, Config) else row.method
    return method, row.units, row.temperature, row.seed, row.epochs


def read(path: Path) -> list[Result]:
    """The rows of a table, none if there is no file."""
    return read_rows(path, Result)


def write(path: Path, rows: Iterable[Result]) -> None:
    """Write a table; of rows with the same cell and seed the last counts."""
    unique = {_key(row): row for row in rows}
    write_rows(path, Result, (row for _, row in sorted(unique.items())))


def summary(
    rows: Iterable[Result], column: str = "test_error"
) -> dict[tuple[str, float, int, int], tuple[float, float, int]]:
    """Mean and spread of a column over the seeds, and their number, by (method, temperature, units, epochs)."""
    cells: dict[tuple[str, float, int, int], list[float]] = {}
    for row in rows:
        if not math.isnan(value := getattr(row, column)):  # which older rows may not have
            cells.setdefault((row.method, row.temperature, row.units, row.epochs), []).append(value)
    return {
        key: (mean(errors), stdev(errors) if len(errors) > 1 else math.nan, len(errors))
        for key, errors in sorted(cells.items())
    }


def units_of(rows: Iterable[Result]) -> list[int]:
    """The columns of the table: the paper's and what else was run."""
    return sorted({*PUBLISHED["sgd"], *(row.units for row in rows)})


def line_of(method: str, temperature: float) -> str:
    """The name of a row."""
    return NAMES[method] + ("" if temperature == 1 else f", temperature {temperature:g}")


def published(method: str, units: int) -> float | None:
    """What the paper printed beside a row, also beside ours that start elsewhere."""
    return PUBLISHED.get(method.split("-from-")[0], {}).get(units)


def difference(rows: Iterable[Result]) -> str:
    """How much our errors differ from the paper's, and why."""
    said: dict[str, list[str]] = {}
    for (method, temperature, units, epochs), (error, _, _) in summary(rows).items():
        if (paper := published(method, units)) is not None:
            name = f"{line_of(method, temperature)} ({epochs} epochs)"
            said.setdefault(name, []).append(f"{error - paper:+.2f} at 2x{units}")
    listed = "; ".join(f"{name} {', '.join(each)}" for name, each in said.items()) or "none of its sizes"
    why = "Ours have optimisers, rates and numbers of epochs of their own; the paper's had plain SGD and 600 epochs."
    return f"Test error, ours minus the paper's, in points: {listed}. {why}"


def draw(rows: Iterable[Result], path: Path) -> None:
    """A picture of the table, ours over the paper's, as PNG and SVG."""
    cells = summary(rows)
    lines = sorted({(method, temperature, epochs) for method, temperature, _, epochs in cells}, reverse=True)
    columns = sorted({units for _, _, units, _ in cells})
    papers = {(place, units): published(lines[place][0], units) for place in range(len(lines)) for units in columns}
    shown = [error for error, _, _ in cells.values()] + [paper for paper in papers.values() if paper is not None]
    margin = max(0.15, 0.1 * (max(shown) - min(shown)))
    figure, every = panels("", "", len(columns), 1)  # one below the other: labels stay readable on a phone
    figure.set_size_inches(6.4, 0.7 + len(columns) * (0.6 + 0.36 * len(lines)))
    names = [f"{line_of(method, temperature)}, {epochs} epochs" for method, temperature, epochs in lines]
    for axes, units in zip(every.flat, columns, strict=True):
        axes.set_title(f"2x{units}", fontsize="medium")
        axes.set_xlim(min(shown) - margin, max(shown) + margin)
        axes.set_ylim(-0.6, len(lines) - 0.4)
        axes.set_yticks(range(len(lines)), [textwrap.fill(name, 30) for name in names], fontsize="small")
        for place, (method, temperature, epochs) in enumerate(lines):
            error, spread, _ = cells.get((method, temperature, units, epochs), (math.nan, math.nan, 0))
            axes.errorbar(error, place, xerr=spread, fmt="o", color=OURS, capsize=3)
            axes.plot(papers[place, units] or math.nan, place, "D", color=_PAPERS, fillstyle="none")
    last = every.flat[-1]
    last.set_xlabel("test error %")
    last.plot([], [], "o", color=OURS, label="ours, mean and spread")
    if any(papers.values()):
        last.plot([], [], "D", color=_PAPERS, fillstyle="none", label="paper, 600 epochs")
    finish(figure, figure, path, loc="outside lower right", ncols=2)
