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

    ``milliseconds`` is the median and ``quartiles`` bound the middle half; a row that was left out has none, and its
    ``note`` says why. A ratio is one of medians; ``ratio`` is that to the row named ``against``. ``memory`` is the peak
    above what is there between two steps, in units of all weights of the network, activations included;
    ``memory_activations`` is that of a plain step, which is activations alone. ``megabytes`` is the peak of a whole
    process above an idle one. ``limit`` is the least that this machine could take, in milliseconds, at ``gigaflops`` of
    matrix products and ``gigabytes`` of memory a second. Rows with an ``axis`` are points of a curve over that field.
    """

    run: Run
    name: str
    note: str
    network: str
    units: int | None
    batch: int
    milliseconds: float | None = None
    quartiles: tuple[float, float] | None = None
    ratio_sgd: float | None = None
    ratio_dropout: float | None = None
    ratio_passes: float | None = None
    ratio_bayesbackprop: float | None = None
    ratio: float | None = None
    against: str | None = None
    table: str | None = None
    axis: str | None = None
    images: int | None = None
    draws: int | None = None
    memory: float | None = None
    memory_activations: float | None = None
    megabytes: float | None = None
    limit: float | None = None
    gigaflops: float | None = None
    gigabytes: float | None = None


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
        constraint = f"one that `bbb bench {'|'.join(_SECTIONS)} --json` wrote"
        raise invalid("file", "bbb bench report", constraint, Described(path.name))
    return rows


def _row(entry: dict[str, Any]) -> Row:
    shared = {field.name: entry.pop(field.name) for field in fields(Run)}
    quartiles = entry.pop("quartiles")
    return Row(run=Run(**shared), quartiles=None if quartiles is None else tuple(quartiles), **entry)


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
    Column("middle half", lambda row: row.quartiles and " to ".join(figure(value) or "" for value in row.quartiles)),
    Column("of SGD", lambda row: figure(row.ratio_sgd)),
    Column("of dropout", lambda row: figure(row.ratio_dropout)),
    Column("of passes", lambda row: figure(row.ratio_passes)),
    Column("of ours", lambda row: figure(row.ratio_bayesbackprop)),
    Column("ratio", lambda row: figure(row.ratio)),
    Column("to", lambda row: row.against, numbers=False),
    Column("limit, ms", lambda row: figure(row.limit)),
    Column("memory", lambda row: figure(row.memory)),
    Column("peak, MB", lambda row: figure(row.megabytes)),
)

_MEMORY = (
    "Memory is the peak of a step above what is held between steps: the parameters (mu and rho, or plain weights), "
    "their gradients and the state of the optimiser. The unit is a tensor as large as all weights. The optimiser is "
    "SGD; the row of our own Adam is measured with that. The memory of a plain step is its activations."
)
_MEGABYTES = "Peak is the most memory that a process held at any time, less that of one that only imports the library."


def _limits(rows: Sequence[Row]) -> str:
    """What the limits were computed from."""

    def extent(values: list[float]) -> str:
        lowest, highest = (figure(value) for value in (min(values), max(values)))
        return f"{lowest}" if lowest == highest else f"{lowest} to {highest}"

    products = extent([row.gigaflops for row in rows if row.gigaflops is not None])
    moved = extent([row.gigabytes for row in rows if row.gigabytes is not None])
    return (
        "Limit is the shortest time that this machine could need. It is the longer of two times: that of the "
        "operations of the matrix products, and that of reading and writing the bytes of weights, gradients and "
        f"activations. The rates are the highest measured beside the points: {products} GFLOP/s in a matrix product, "
        f"and {moved} GB/s in sums of vectors as large as the parameters and gradients. The right side of a picture "
        "shows two ratios: of the times measured, and of the two limits. The points were not measured in turn. Where "
        "one network is in two tables, its times differ because the machine did."
    )


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Those that say something about these rows."""
    return [column for column in COLUMNS if any(column.cell(row) is not None for row in rows)]


def by_table(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each table, under its title."""

    def title(row: Row) -> str:
        if row.table is not None:
            return row.table
        if row.images is None:
            return f"{row.network}, batch {row.batch}"
        inputs = "image" if row.units else "input"
        return f"{row.network}, {row.draws} draws for {row.images} {inputs}{'s' if row.images > 1 else ''}"

    for name, group in groupby(rows, key=title):
        yield name, list(group)


def terminal(rows: Sequence[Row]) -> rich.console.Group:
    """For the terminal: a table for each task, and how they came about."""
    tables: list[rich.table.Table] = []
    for title, group in by_table(rows):
        columns = _columns(group)
        table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for column in columns:
            table.add_column(column.title, justify="right" if column.numbers else "left", no_wrap=column.numbers)
        for row in group:
            style = "bold" if row.name.startswith("bayesbackprop") else None
            table.add_row(*(column.cell(row) or "" for column in columns), style=style)
        tables.append(table)
    return rich.console.Group(*tables, *_about(rows))


class Section(NamedTuple):
    """A section of the page: its title, and what was compared."""

    title: str
    text: str = ""


_SECTIONS = {
    "step": Section("A training step"),
    "small": Section("A training step of a small network"),
    "predict": Section("A prediction"),
    "paths": Section(
        "Every path of a training step",
        "One network with each optimiser, prior, estimator and way to run it. The optimiser is Adam unless the row "
        "names another. The row of four draws is divided by four single steps. Two ranks are two processes of one "
        "thread each, under DistributedDataParallel over gloo. The deep networks show the cost of many small tensors: "
        "of the whole step, of its gradients alone, and of the update alone. The update is torch's foreach Adam; our "
        "networks give it twice as many tensors.",
    ),
    "networks": Section(
        "Other networks",
        "Every step uses Adam. Ours is the library's own, called as `optimiser.backward(cost)`; the others use "
        "torch's. LeNet-5 has images of 28x28, ResNet-20 images of 32x32 in three colours. The transformer has two of "
        "torch's encoder layers, and the LSTM is torch's. Some weights have no rule for flipout or local and are drawn "
        "as for shared; the column *how* gives their share. Of the other libraries, Pyro and IVON take torch's own "
        "layers. The LSTM of bayesian-torch draws new weights at every step of the series.",
    ),
    "size": Section(
        "A large network",
        "A network of fifty million weights. Every figure comes from a fresh process. The first step is on a batch of "
        "128, with SGD. Files are written to a temporary folder and read from it: ours by `save` and `load`, the plain "
        "ones by `torch.save` and `torch.load`.",
    ),
    "growth": Section(
        "How the cost grows",
        "The time of a training step with SGD by width and by batch, and that of a prediction for one image by the "
        "number of draws.",
    ),
}


class Picture(NamedTuple):
    """A picture of the page: what it shows, and its file as the page names it."""

    caption: str
    file: str


def page(sections: Iterable[str]) -> str:
    """The page of the documentation: Markdown, with a section for each run."""
    parts = [
        "# Benchmarks",
        "`bbb bench report` writes this page from the files in `results/bench`. `make bench` measures everything again "
        "and `make bench-peers` does so beside other libraries. All rows of a table come from one run, in which they "
        "take turns. Ratios are ratios of medians. Half of the times lie in the range called *middle half*. A step is "
        "`zero_grad`, the cost of one draw, `backward` and the optimiser. The optimiser is `torch.optim.SGD` unless "
        "said otherwise. Each library has its own prior and cost, named in the column *how*. The paper has a scale "
        "mixture and the sampled cost.",
    ]
    return "\n\n".join([*parts, *sections]) + "\n"


def section(rows: Sequence[Row], pictures: Sequence[Picture]) -> str:
    """The section of the page on the rows of a run, with pictures of them."""
    about = _SECTIONS[rows[0].run.what]
    parts = [f"## {about.title}", *filter(None, [about.text]), f"`{rows[0].run.command}`", *_about(rows)]
    parts += [f"![{picture.caption}]({picture.file})" for picture in pictures]
    for title, group in by_table(rows):
        columns = _columns(group)
        cells = ([column.cell(row) or "" for column in columns] for row in group)
        parts += [f"### {title}", markdown([(column.title, column.numbers) for column in columns], cells)]
    return "\n\n".join(parts)


def markdown(columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> str:
    """A table of columns, each with its title and whether it holds numbers."""
    head = [[title for title, _ in columns], ["--:" if numbers else "---" for _, numbers in columns]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [*head, *rows])


def _about(rows: Sequence[Row]) -> list[str]:
    """How the rows came about, and what their numbers mean."""
    run = rows[0].run
    threads = f"{run.threads} thread{'s' if run.threads > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines = [f"{run.date}; {run.machine}; {threads}; medians of {run.rounds} interleaved rounds; {versions}."]
    lines += [_MEMORY] if any(row.memory is not None for row in rows) else []
    lines += [_MEGABYTES] if any(row.megabytes is not None for row in rows) else []
    lines += [_limits(rows)] if any(row.limit is not None for row in rows) else []
    return lines
