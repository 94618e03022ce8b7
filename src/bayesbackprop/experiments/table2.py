"""Table 2: the test error of a network without its weights of low signal-to-noise ratio, and what it then takes."""

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bayesbackprop.bayesian import Bayesian
from bayesbackprop.bench.latency import single_input
from bayesbackprop.experiments.mnist import Config
from bayesbackprop.experiments.records import write_rows
from bayesbackprop.pruning import prune, weights_left
from bayesbackprop.shipping import SparseNetwork, save_sparse, sparse
from bayesbackprop.train import Examples, Schedule, error_of

# What the paper printed, by the fraction that was removed.
PUBLISHED = {0.0: 1.24, 0.5: 1.24, 0.75: 1.24, 0.95: 1.29, 0.98: 1.39}


# Chosen on the validation set (docs/decisions/mnist.md). Most of this prior's mass is its slab, so weights that are not
# needed become wide instead of narrow, and stand out by their signal-to-noise ratio.
RECIPE = Config(
    "bbb-mixture",
    schedule=Schedule(epochs=40, decay="constant", averaging=0.9998),
    temperature=0.1,
    pi=0.75,
    sigma1=math.exp(-2),
    sigma2=math.exp(-6),
    sigma=0.02,
    pruned=0.98,
)


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
        found.append(Row(units, seed, fraction, left, error_of(net, test), file_bytes(net), microseconds))
    return found


def file_bytes(net: SparseNetwork) -> int:
    """How large a network is on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        save_sparse(net, path)
        return path.stat().st_size


def write(path: Path, table: Iterable[Row]) -> None:
    """Write ``table2.csv``."""
    write_rows(path, Row, table)
