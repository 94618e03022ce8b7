"""What was measured, as JSON, as a table for the terminal and as a page of the documentation."""

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.table
import torch

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop._version import __version__
from bayesbackprop_paper.timing import CPU


@dataclass(frozen=True)
class Run:
    """What all rows of a run share."""

    what: str
    command: str
    threads: int
    rounds: int
    seed: int
    date: str
    machine: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Row:
    """One contender on one task.

    ``milliseconds`` is the median and ``quartiles`` bound the middle half. A ratio is one of medians. ``memory`` is the
    peak above the parameters and gradients, in units of all weights of the network, activations included;
    ``memory_activations`` is that of a plain step, which is activations alone.
    """

    run: Run
    name: str
    note: str
    network: str
    units: int
    batch: int
    milliseconds: float
    quartiles: tuple[float, float]
    ratio_sgd: float | None = None
    ratio_dropout: float | None = None
    ratio_passes: float | None = None
    ratio_bayesbackprop: float | None = None
    images: int | None = None
    draws: int | None = None
    memory: float | None = None
    memory_activations: float | None = None


def this_run(
    what: str,
    command: str,
    threads: int,
    rounds: int,
    seed: int,
    distributions: Iterable[str] = (),
    device: torch.device = CPU,
) -> Run:
    """A run here and now, on ``device``, with these other distributions."""
    versions = {"bayesbackprop": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in distributions}
    return Run(what, command, threads, rounds, seed, date.today().isoformat(), _machine(device), versions)


def _machine(device: torch.device) -> str:
    """The kind of machine, never which one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return f"{gpu}{model}, {cores} cores, {platform.system()}"


# --- JSON ------------------------------------------------------------------------------------------------------------


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write ``rows`` to ``path``, whole or not at all: a list of flat objects."""
    entries = []
    for row in rows:
        entry = asdict(row)
        shared = entry.pop("run")
        entries.append({**entry, **shared})
    write_atomically(path, (json.dumps(entries, indent=1) + "\n").encode())


def read_json(path: Path) -> list[Row]:
    """The rows of a file that ``write_json`` wrote."""
    try:
        rows = [_row(entry) for entry in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError, AttributeError):
        rows = []
    if not rows:
        constraint = "one that `bbb bench step|small|predict --json` wrote"
        raise invalid("file", "bbb bench report", constraint, Described(path.name))
    return rows


def _row(entry: dict[str, Any]) -> Row:
    shared = {field.name: entry.pop(field.name) for field in fields(Run)}
    return Row(run=Run(**shared), quartiles=tuple(entry.pop("quartiles")), **entry)


# --- tables ----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column: its title, its cell for a row or None, and whether it holds numbers."""

    title: str
    cell: Callable[[Row], str | None]
    numbers: bool = True


def figure(value: float | None) -> str | None:
    """Three digits or more.

    Examples:
        >>> figure(1.2345), figure(12.345), figure(1234.5)
        ('1.23', '12.3', '1234')
    """
    return None if value is None else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


COLUMNS = (
    Column("what", lambda row: row.name, numbers=False),
    Column("how", lambda row: row.note, numbers=False),
    Column("ms", lambda row: figure(row.milliseconds)),
    Column("middle half", lambda row: " to ".join(figure(value) or "" for value in row.quartiles)),
    Column("of SGD", lambda row: figure(row.ratio_sgd)),
    Column("of dropout", lambda row: figure(row.ratio_dropout)),
    Column("of passes", lambda row: figure(row.ratio_passes)),
    Column("of ours", lambda row: figure(row.ratio_bayesbackprop)),
    Column("memory", lambda row: figure(row.memory)),
)

_MEMORY = (
    "Memory: the peak of a step above the parameters and their gradients (mu and rho, or plain weights), where 1 is a "
    "tensor as large as all weights. Activations count: a plain step's row is nothing else."
)


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Those that say something about these rows."""
    return [column for column in COLUMNS if any(column.cell(row) is not None for row in rows)]


def _by_task(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each task, under its title."""

    def title(row: Row) -> str:
        if row.images is None:
            return f"{row.network}, batch {row.batch}"
        return f"{row.network}, {row.draws} draws for {row.images} image{'s' if row.images > 1 else ''}"

    for name, group in groupby(rows, key=title):
        yield name, list(group)


def terminal(rows: Sequence[Row]) -> rich.console.Group:
    """For the terminal: a table for each task, and how they came about."""
    columns = _columns(rows)
    tables: list[rich.table.Table] = []
    for title, group in _by_task(rows):
        table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for column in columns:
            table.add_column(column.title, justify="right" if column.numbers else "left", no_wrap=column.numbers)
        for row in group:
            style = "bold" if row.name.startswith("bayesbackprop") else None
            table.add_row(*(column.cell(row) or "" for column in columns), style=style)
        tables.append(table)
    return rich.console.Group(*tables, *_about(rows))


_TITLES = {
    "step": "A training step",
    "small": "A training step of a small network",
    "predict": "A prediction",
}


def page(runs: Iterable[Sequence[Row]]) -> str:
    """The page of the documentation: Markdown, made from the files of some runs."""
    parts = [
        "# Benchmarks",
        "Written by `bbb bench report` from the files in `results/bench`; `make bench` measures anew, "
        "`make bench-peers` with other libraries. All rows of a table come from one run, interleaved. Ratios are of "
        "medians; half of the times lie within the middle half. A step is `zero_grad`, the cost of one draw, "
        "`backward` and `torch.optim.SGD`. Each library has its own prior and cost, in the column *how*; the paper's "
        "are a scale mixture and the sampled cost.",
    ]
    return "\n\n".join([*parts, *map(_section, runs)]) + "\n"


def _section(rows: Sequence[Row]) -> str:
    columns = _columns(rows)
    head = [[column.title for column in columns], ["--:" if column.numbers else "---" for column in columns]]
    parts = [f"## {_TITLES[rows[0].run.what]}", f"`{rows[0].run.command}`", *_about(rows)]
    for title, group in _by_task(rows):
        lines = [*head, *([column.cell(row) or "" for column in columns] for row in group)]
        parts += [f"### {title}", "\n".join("| " + " | ".join(line) + " |" for line in lines)]
    return "\n\n".join(parts)


def _about(rows: Sequence[Row]) -> list[str]:
    """How the rows came about, and what their numbers mean."""
    run = rows[0].run
    threads = f"{run.threads} thread{'s' if run.threads > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines = [f"{run.date}; {run.machine}; {threads}; medians of {run.rounds} interleaved rounds; {versions}."]
    return [*lines, _MEMORY] if any(row.memory is not None for row in rows) else lines
