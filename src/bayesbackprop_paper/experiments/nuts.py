"""Distances from exact posterior predictives, by NUTS, of two small networks (``nuts_posteriors/README.md``)."""

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Categorical,
    FreeEnergy,
    FullCovariance,
    Gaussian,
    Likelihood,
    LowRank,
    Normal,
    fit,
)
from bayesbackprop.prediction import Predictive
from bayesbackprop_paper.experiments.recipe import seeded
from bayesbackprop_paper.experiments.truth import Figures, Run

# Networks whose predictions are averaged.
_DRAWS = 2000

# What is compared, by column of the reference, and where: the mean absolute difference. Of the probability of one of
# two classes it is the total variation.
_COMPARED = {
    "mean": ("mean", ("on", "gap", "out")),
    "sd": ("sd", ("on", "gap", "out")),
    "p1": ("TV", ("near", "far")),
}


@dataclass(frozen=True)
class Problem:
    """A network, its prior and likelihood, training data, and the exact predictions on a grid.

    Args:
        sizes: Of the layers of a tanh network.
        prior: The standard deviation of each parameter.
        likelihood: Of the targets.
        inputs: Of the training set.
        targets: Of the training set.
        grid: Where the exact predictions are.
        exact: The columns of these predictions.
        region: Of each point of the grid.
    """

    sizes: tuple[int, ...]
    prior: Mapping[str, Normal]
    likelihood: Likelihood
    inputs: Tensor
    targets: Tensor
    grid: Tensor
    exact: Mapping[str, Tensor]
    region: NDArray[np.str_]

    def net(self, seed: int) -> nn.Sequential:
        """A new network."""
        with seeded(seed):
            layers = [nn.Linear(a, b) for a, b in zip(self.sizes, self.sizes[1:], strict=False)]
        pairs = [each for layer in layers for each in (layer, nn.Tanh())]
        return nn.Sequential(*pairs[:-1])

    def distances(self, predicted: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean absolute differences of predictions from the exact ones, by region."""
        found: dict[str, float] = {}
        for column, exact in self.exact.items():
            difference = (predicted[column].double() - exact).abs().numpy()
            name, regions = _COMPARED[column]
            found |= {f"{name} {region}": float(difference[self.region == region].mean()) for region in regions}
        return found

    def columns(self, predicted: Predictive) -> dict[str, Tensor]:
        """A predictive distribution as the columns of the reference."""
        if "p1" in self.exact:
            return {"p1": predicted.mean[:, 1]}
        return {"mean": predicted.mean[:, 0], "sd": predicted.stddev[:, 0]}


def _table(name: str) -> tuple[dict[str, Tensor], NDArray[np.str_]]:
    """The numbers of a reference file by column, and the region of each of its points where it says so."""
    text = (files("bayesbackprop_paper.experiments") / "nuts_posteriors" / f"{name}.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    numbers = {column: torch.tensor([float(row[column]) for row in rows]) for column in rows[0] if column != "region"}
    return numbers, np.array([row.get("region", "") for row in rows])


def regression() -> Problem:
    """1-50-1 on 50 points of a curve with a gap."""
    data, _ = _table("regression_train")
    grid, region = _table("nuts_regression")
    prior = {"0.*": Normal(2.0), "2.weight": Normal(2 / math.sqrt(50)), "2.bias": Normal(1.0)}
    exact = {"mean": grid["mean"], "sd": grid["sd"]}
    place = grid["x"][:, None]
    return Problem((1, 50, 1), prior, Gaussian(0.1), data["x"][:, None], data["y"][:, None], place, exact, region)


def moons() -> Problem:
    """2-20-20-2 on 150 points of two classes."""
    data, _ = _table("moons_train")
    grid, region = _table("nuts_moons")
    prior = {"0.weight": Normal(2 / math.sqrt(2)), "*.weight": Normal(2 / math.sqrt(20)), "*.bias": Normal(1.0)}
    inputs, place = (torch.stack([table["x1"], table["x2"]], 1) for table in (data, grid))
    return Problem((2, 20, 20, 2), prior, Categorical(), inputs, data["y"].long(), place, {"p1": grid["p1"]}, region)


PROBLEMS: dict[str, Callable[[], Problem]] = {"regression": regression, "moons": moons}


# --- the methods -----------------------------------------------------------------------------------------------------


def _trained(problem: Problem, model: Bayesian, steps: int, lr: float, **settings: Any) -> Bayesian:
    """``model`` after ``steps`` of Adam on all examples: the rate constant for the first half, then linear to 0."""
    objective = FreeEnergy(model, len(problem.inputs), **settings)
    optimiser = torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.99))
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, 2 - 2 * step / steps))
    fit(objective, [(problem.inputs, problem.targets)] * steps, epochs=1, optimiser=optimiser, scheduler=rate)
    return model


def _drawn(problem: Problem, model: Bayesian) -> dict[str, Tensor]:
    return problem.columns(model.predict(problem.grid, draws=_DRAWS))


def readme(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The loop of the README."""
    model = Bayesian(problem.net(seed), problem.likelihood, problem.prior, seed=seed)
    free_energy = FreeEnergy(model, n=len(problem.inputs))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1000):
        optimiser.zero_grad()
        free_energy(problem.inputs, problem.targets).backward()
        optimiser.step()
    return _drawn(problem, model)


def diagonal(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The diagonal posterior, trained until it no longer changes."""
    model = Bayesian(problem.net(seed), problem.likelihood, problem.prior, sigma=0.1, estimator="local", seed=seed)
    return _drawn(problem, _trained(problem, model, 2000, 0.1, draws=4, complexity="closed"))


def low_rank(problem: Problem, seed: int) -> dict[str, Tensor]:
    """A diagonal and 10 directions."""
    model = Bayesian(problem.net(seed), problem.likelihood, problem.prior, sigma=0.1, family=LowRank(10), seed=seed)
    return _drawn(problem, _trained(problem, model, 2000, 0.03, draws=16, complexity="closed"))


def full_covariance(problem: Problem, seed: int) -> dict[str, Tensor]:
    """Any covariance."""
    model = Bayesian(
        problem.net(seed), problem.likelihood, problem.prior, sigma=0.1, family=FullCovariance(), seed=seed
    )
    return _drawn(problem, _trained(problem, model, 2000, 0.01, draws=16, complexity="closed"))


METHODS: dict[str, Callable[[Problem, int], dict[str, Tensor]]] = {
    "README loop": readme,
    "diagonal": diagonal,
    "low rank": low_rank,
    "full covariance": full_covariance,
}


def measure(run: Run) -> Figures:
    """How far the predictions of a method are from the exact ones."""
    problem = PROBLEMS[run.task]()
    with seeded(run.seed):
        return problem.distances(METHODS[run.method](problem, run.seed))
