"""The small regression sets of the UCI repository: our estimator at its defaults beside other methods.

The protocol is the usual one: 90 % of the rows to learn from, chosen at random, one hidden layer of 50 units (100 for
protein), inputs and targets standardised as the training rows say, figures in the units of the target. All methods have
the same network. The others are those of :func:`bayesbackprop.comparison.compare`. Of 40, 100 and 200 epochs and of the
learning rates .001, .003 and .01 they have what was best for deep ensembles on splits that are not reported. Nothing of
ours was chosen on the splits that are reported (0, 1, ...) either.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from bayesbackprop import Batches, Gaussian
from bayesbackprop._networks import mlp
from bayesbackprop.comparison import compare
from bayesbackprop.sklearn import BayesianMLPRegressor
from bayesbackprop.verdict import Verdict, evaluate
from bayesbackprop_paper import data
from bayesbackprop_paper.data import fetching
from bayesbackprop_paper.experiments.truth import Figures, Run

# Data sets, and on how many splits each method is measured: fewer where a run is long and the test set large.
SPLITS: Mapping[str, int] = {
    "boston": 10,
    "concrete": 10,
    "energy": 10,
    "power": 5,
    "protein": 3,
    "wine": 10,
    "yacht": 10,
}

_EPOCHS, _BATCH, _RATE = 100, 100, 0.01


class Split(NamedTuple):
    """Standardised rows to learn from and to test on, and the standard deviation of the targets in their units."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    unit: float
    hidden: int


def split(task: str, number: int) -> Split:
    """A random tenth of the rows to test on, by its number."""
    features, targets = data.regression(task)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(number))
    train, test = order[: round(0.9 * len(order))], order[round(0.9 * len(order)) :]
    x, y = features.double(), targets.double()[:, None]
    (x_mean, x_unit), (y_mean, y_unit) = ((all_[train].mean(0), all_[train].std(0, correction=0)) for all_ in (x, y))
    x = ((x - x_mean) / torch.where(x_unit > 0, x_unit, 1.0)).float()
    y = ((y - y_mean) / y_unit).float()
    return Split(x[train], y[train], x[test], y[test], float(y_unit), 100 if task == "protein" else 50)


class _Fitted:
    """An estimator as what predicts tensors."""

    def __init__(self, estimator: BayesianMLPRegressor) -> None:
        self._estimator = estimator

    def predict(self, *args: Tensor, draws: int = 100, seed: int | None = None, **_: Any) -> Any:  # noqa: ARG002
        (x,) = args
        return self._estimator.set_params(draws=draws).predictive(x.numpy())


def _ours(**parameters: Any) -> Callable[[Split, int], Verdict]:
    def verdict(given: Split, seed: int) -> Verdict:
        estimator = BayesianMLPRegressor((given.hidden,), random_state=seed, **parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            estimator.fit(given.x.numpy(), given.y.numpy())
        return evaluate(_Fitted(estimator), (given.test_x, given.test_y))

    return verdict


def _other(method: str, noise: Any) -> Callable[[Split, int], Verdict]:
    def verdict(given: Split, seed: int) -> Verdict:
        sizes = [given.x.shape[1], given.hidden, 2 if noise == "per-input" else 1]
        found = compare(
            lambda: mlp(sizes),
            Batches(given.x, given.y, _BATCH, seed),
            (given.test_x, given.test_y),
            epochs=_EPOCHS,
            likelihood=Gaussian(noise),
            methods=[method],
            lr=_RATE,
            seed=seed,
            progress=False,
        )
        if method not in found.verdicts:
            raise RuntimeError(f"{method}: {found.notes[method]}")
        return found.verdicts[method]

    return verdict


METHODS: Mapping[str, Callable[[Split, int], Verdict]] = {
    "ours, defaults": _ours(),
    "ours, one noise": _ours(noise="learnt"),
    "deep ensemble": _other("deep ensemble", "per-input"),
    "deep ensemble, one noise": _other("deep ensemble", "learnt"),
    "MC dropout": _other("MC dropout", "per-input"),
    "plain": _other("plain", "per-input"),
    "Laplace, one noise": _other("Laplace", "learnt"),
    "IVON": _other("IVON", "per-input"),
}


def measure(run: Run) -> Figures:
    """NLL and RMSE in the units of the target, and the part of the test targets in central intervals."""
    given = split(run.task, run.seed)
    scores = METHODS[run.method](given, run.seed).scores._asdict()
    return {
        "NLL": scores["nll"] + math.log(given.unit),
        "RMSE": scores["rmse"] * given.unit,
        "in 50 %": scores["coverage_50"],
        "in 90 %": scores["coverage_90"],
    }


def available() -> list[str]:
    """The data sets that are here or can be fetched."""
    found = []
    for task in SPLITS:
        try:
            fetching.fetch(task)
        except fetching.FetchError as error:
            warnings.warn(f"{task} is left out: {error}", UserWarning, stacklevel=2)
        else:
            found.append(task)
    return found


def verdicts(found: Mapping[str, Any]) -> str:
    """On how many sets the mean NLL of our defaults is at or below that of each ensemble, and the coverage of ours."""

    def means(method: str, figure: str) -> dict[str, float]:
        own: dict[str, list[float]] = {}
        for entry in found.values():
            if entry["method"] == method:
                own.setdefault(entry["task"], []).append(entry["figures"][figure])
        return {task: sum(values) / len(values) for task, values in own.items()}

    ours, lines = means("ours, defaults", "NLL"), []
    for other in ("deep ensemble", "deep ensemble, one noise"):
        theirs = means(other, "NLL")
        both = [task for task in SPLITS if task in ours and task in theirs]
        good = [task for task in both if ours[task] <= theirs[task]]
        lines.append(
            f"NLL at or below that of {other} on {len(good)} of {len(both)} sets: {', '.join(good) or 'none'}."
        )
    for figure in ("in 50 %", "in 90 %"):
        held = means("ours, defaults", figure).values()
        if held:
            ends = f"{min(held):.3f} to {max(held):.3f}"
            lines.append(f"Test targets {figure} intervals of ours: {sum(held) / len(held):.3f} ({ends}).")
    return "\n".join(lines) + "\n"
