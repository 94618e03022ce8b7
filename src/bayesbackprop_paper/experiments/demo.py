"""The demonstration: what the library is for, small, on one page, in minutes. Stopped, it goes on where it was."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bayesbackprop.callbacks import Callback
from bayesbackprop.export import save_sparse, sparse
from bayesbackprop.pruning import prune
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import bandit, figures, mnist, regression, report, table1
from bayesbackprop_paper.experiments.mnist import Result
from bayesbackprop_paper.experiments.recipe import Examples, error_percent

PAGE = "index.html"

# Small and short enough for two cores and a few minutes.
_UNITS, _EPOCHS = 400, 24
_FRACTION = 0.95
_CURVE_STEPS = 3000
_BANDIT_STEPS, _UPDATES, _RUNS = 2000, 4, 2


def network(folder: Path, images: data.Images, seed: int, progress: Callback) -> Result:
    """Train a network on MNIST with the paper's cost, as ``bbb train`` does."""
    (config,) = table1.cells(["bbb-mixture"], [_UNITS], [seed], epochs=_EPOCHS)
    return mnist.run(config, images, folder / "network", progress)


class Pruned(NamedTuple):
    """What is left of the network: of its weights, its test error in %, and the size of its file."""

    removed: float
    error: float
    file_bytes: int


def pruned(folder: Path, images: data.Images) -> Pruned:
    """Remove most weights of the network, as ``bbb prune`` does, and write the plain sparse one that is left."""
    net = sparse(prune(figures.bayesian_in(folder / "network"), _FRACTION))
    path = folder / "network" / "sparse.safetensors"
    save_sparse(net, path)
    return Pruned(_FRACTION, error_percent(net, Examples(*images.test)), path.stat().st_size)


Tracked = Callable[[Sequence[regression.Config]], Iterable[regression.Config]]


def curves(folder: Path, seed: int, tracked: Tracked) -> None:
    """Fit the regression curve by Bayes by Backprop and by a standard network, what is not yet there."""
    path = folder / "curves" / report.CURVES
    wanted = [regression.Config(method, steps=_CURVE_STEPS, seed=seed) for method in regression.METHODS]
    there = regression.read_curves(path)
    found = {config: there[config] for config in wanted if config in there}
    for config in tracked([config for config in wanted if config not in there]):
        found[config] = regression.fit(config)
        regression.write_curves(path, found)


def jobs(seed: int) -> list[bandit.Job]:
    """Thompson sampling and the epsilon-greedy agents on mushrooms."""
    seeds = tuple(range(seed, seed + _RUNS))
    return bandit.jobs_of("mushroom", bandit.GROUPS, seeds, _BANDIT_STEPS, _UPDATES)


def page(folder: Path, results: Path, images: data.Images) -> Path:
    """Write the page on all of it."""
    runs = [folder / name for name in ("network", "curves", "bandit")]
    report.write(runs, results, folder / PAGE, images.test)
    return folder / PAGE
