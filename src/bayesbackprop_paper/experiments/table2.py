"""Table 2: the test error of Table 1's network without weights of low signal-to-noise ratio, and what it then takes."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from bayesbackprop.export import SparseNetwork, save_sparse, sparse
from bayesbackprop.model import Bayesian
from bayesbackprop.pruning import prune, weights_left
from bayesbackprop_paper.experiments.figures import OURS, finish, panels
from bayesbackprop_paper.experiments.recipe import Examples, error_percent
from bayesbackprop_paper.experiments.records import read_rows, write_rows
from bayesbackprop_paper.timing import single_input

# What the paper printed, by the fraction that was removed.
PUBLISHED = {0.0: 1.24, 0.5: 1.24, 0.75: 1.24, 0.95: 1.29, 0.98: 1.39}

# What a picture shows beside the errors.
_COSTS = {"file": "file_bytes", "time for one image": "latency_us"}


@dataclass(frozen=True)
class Row:
    """A pruned network: the plain sparse one of the means that is left, its file, and its time for one image."""

    units: int
    seed: int
    fraction: float
    weights_left: int
    test_error: float
    file_bytes: int
    latency_us: float


def rows(model: Bayesian, units: int, seed: int, test: Examples, fractions: Sequence[float]) -> list[Row]:
    """A row for each fraction; the latencies are measured in turn."""
    pruned = {fraction: prune(model, fraction) for fraction in fractions}
    plain = {fraction: sparse(each) for fraction, each in pruned.items()}
    times = single_input({str(fraction): net for fraction, net in plain.items()}, test.inputs[:1000], seed=seed)
    found: list[Row] = []
    for fraction, net in plain.items():
        left, microseconds = weights_left(pruned[fraction]), 1e3 * times[str(fraction)].median
        found.append(Row(units, seed, fraction, left, error_percent(net, test), file_bytes(net), microseconds))
    return found


def file_bytes(net: SparseNetwork) -> int:
    """How large a network is on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        save_sparse(net, path)
        return path.stat().st_size


def write(path: Path, table: Iterable[Row]) -> None:
    """Write ``table2.csv``; of rows of the same network and fraction the last counts."""
    unique = {(row.units, row.seed, row.fraction): row for row in table}
    write_rows(path, Row, (row for _, row in sorted(unique.items())))


def read(path: Path) -> list[Row]:
    """The rows of ``table2.csv``, none if there is no file."""
    return read_rows(path, Row)


def largest(table: Iterable[Row]) -> list[Row]:
    """The rows of the largest networks, which are those to show beside the paper's."""
    rows = list(table)
    return [row for row in rows if row.units == max(each.units for each in rows)]


def means(table: Iterable[Row], column: str) -> dict[float, float]:
    """The mean of a column over the seeds, by the fraction that was removed."""
    found: dict[float, list[float]] = {}
    for row in table:
        found.setdefault(row.fraction, []).append(getattr(row, column))
    return {fraction: mean(values) for fraction, values in sorted(found.items())}


def difference(table: Sequence[Row]) -> str:
    """What pruning costs and saves, beside the paper's."""
    ours = means(table, "test_error")
    removed = " / ".join(f"{100 * fraction:g}" for fraction in ours if fraction)
    lost, theirs = (
        " / ".join(f"{errors[fraction] - errors[0.0]:.2f}" for fraction in ours if fraction)
        for errors in (ours, PUBLISHED)
    )
    most = max(ours)
    savings = ", ".join(f"{name} 1/{1 / share[most]:.1f}" for name, share in _shares(table).items())
    return (
        f"Points lost without {removed} % of the weights: {lost}; in the paper {theirs}. At {most:.0%}, of the whole "
        f"network's: {savings}. Ours begin at {ours[0.0]:.2f} %, the paper's at {PUBLISHED[0.0]:.2f} %."
    )


def draw(table: Sequence[Row], path: Path) -> None:
    """Errors over the paper's, and beside them file and time as shares of the whole network's, as PNG and SVG."""
    figure, ((errors, costs),) = panels("weights removed", "test error %", 1, 2)
    ours = means(table, "test_error")
    places = {fraction: place for place, fraction in enumerate(ours)}
    for axes in (errors, costs):
        axes.set_xticks(range(len(ours)), [f"{fraction:.0%}" for fraction in ours])
    errors.plot(range(len(ours)), list(ours.values()), color=OURS, label=f"ours, 2x{table[0].units}, mean")
    errors.plot([places[row.fraction] for row in table], [row.test_error for row in table], ".", color=OURS)
    errors.plot(range(len(ours)), [PUBLISHED[each] for each in ours], ":", color="black", label="paper, 2x1200")
    errors.legend(frameon=False, fontsize="small")
    for (name, share), style in zip(_shares(table).items(), ("o-", "s--"), strict=True):
        costs.plot(range(len(ours)), list(share.values()), style, color=OURS, label=name)
    costs.set_ylabel("share of the whole network's")
    costs.set_yscale("log")
    finish(figure, costs, path)


def _shares(table: Sequence[Row]) -> dict[str, dict[float, float]]:
    """File and time by the fraction that was removed, as shares of the whole network's."""
    found = {name: means(table, column) for name, column in _COSTS.items()}
    return {name: {key: value / by[0.0] for key, value in by.items()} for name, by in found.items()}
