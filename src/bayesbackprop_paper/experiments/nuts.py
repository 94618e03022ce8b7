"""Distances from exact posterior predictives, by NUTS, of two small networks (``nuts_posteriors/README.md``)."""

import csv
import io
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bayesbackprop import (
    Batches,
    Bayesian,
    Categorical,
    Conditional,
    FreeEnergy,
    FullCovariance,
    Gaussian,
    Likelihood,
    LowRank,
    Mixture,
    Normal,
    fit,
    refine,
)
from bayesbackprop._specification import per_parameter
from bayesbackprop.prediction import Predictive, predictive
from bayesbackprop_paper.experiments.recipe import seeded
from bayesbackprop_paper.experiments.truth import Figures, Run

# Networks whose predictions are averaged, and a step whose noise no training has seen.
_DRAWS, _FRESH = 2000, 10**6

# The known noise of the regression.
NOISE = 0.1

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

    def sigma(self, name: str) -> float:
        """The standard deviation of the prior of a parameter."""
        each: dict[str, Normal] = per_parameter(self.prior, [*dict(self.net(0).named_parameters())], "prior")
        return each[name].sigma

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
    return Problem((1, 50, 1), prior, Gaussian(NOISE), data["x"][:, None], data["y"][:, None], place, exact, region)


def moons() -> Problem:
    """2-20-20-2 on 150 points of two classes."""
    data, _ = _table("moons_train")
    grid, region = _table("nuts_moons")
    prior = {"0.weight": Normal(2 / math.sqrt(2)), "*.weight": Normal(2 / math.sqrt(20)), "*.bias": Normal(1.0)}
    inputs, place = (torch.stack([table["x1"], table["x2"]], 1) for table in (data, grid))
    return Problem((2, 20, 20, 2), prior, Categorical(), inputs, data["y"].long(), place, {"p1": grid["p1"]}, region)


PROBLEMS: dict[str, Callable[[], Problem]] = {"regression": regression, "moons": moons}


# --- the methods -----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Predictions on the grid, as the columns of the reference, and what else there is to say."""

    predicted: Mapping[str, Tensor]
    besides: Mapping[str, float] = {}


Method = Callable[[Problem, int], Found]


def _adam(parameters: Iterable[Any], steps: int, lr: float) -> tuple[torch.optim.Optimizer, Any]:
    """Adam whose rate is constant for the first half, then falls linearly to 0."""
    optimiser = torch.optim.Adam(parameters, lr, betas=(0.9, 0.99))
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, 2 - 2 * step / steps))


def _trained(problem: Problem, model: Bayesian, steps: int, lr: float, **settings: Any) -> Bayesian:
    """``model`` after ``steps`` of Adam on all examples."""
    objective = FreeEnergy(model, len(problem.inputs), **settings)
    optimiser, rate = _adam(model.parameters(), steps, lr)
    fit(objective, [(problem.inputs, problem.targets)] * steps, epochs=1, optimiser=optimiser, scheduler=rate)
    return model


def _drawn(problem: Problem, model: Bayesian) -> Found:
    """The average of drawn networks, and the free energy in nats."""
    n = len(problem.inputs)
    with torch.no_grad():
        cost = FreeEnergy(model, n, draws=_DRAWS)(problem.inputs, problem.targets, step=_FRESH)
    return Found(problem.columns(model.predict(problem.grid, draws=_DRAWS)), {"F": n * float(cost)})


def readme(problem: Problem, seed: int) -> Found:
    """The loop of the README."""
    model = Bayesian(problem.net(seed), problem.likelihood, problem.prior, seed=seed)
    free_energy = FreeEnergy(model, n=len(problem.inputs))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1000):
        optimiser.zero_grad()
        free_energy(problem.inputs, problem.targets).backward()
        optimiser.step()
    return _drawn(problem, model)


def fitted(problem: Problem, seed: int) -> Found:
    """A diagonal posterior by ``fit`` as it is, until it stops by itself."""
    model = Bayesian(problem.net(seed), problem.likelihood, problem.prior, seed=seed)
    fit(model, Batches(problem.inputs, problem.targets, len(problem.inputs)))
    return _drawn(problem, model)


def variational(steps: int, lr: float, draws: int, complexity: str = "closed", **settings: Any) -> Method:
    """A family, trained until it hardly changes. One that takes inputs starts from those of the training set."""

    def method(problem: Problem, seed: int) -> Found:
        given: dict[str, Any] = {"sigma": 0.1, **settings}
        if given.get("family") is Conditional:
            given["family"] = Conditional(problem.inputs)
        model = Bayesian(problem.net(seed), problem.likelihood, problem.prior, seed=seed, **given)
        return _drawn(problem, _trained(problem, model, steps, lr, draws=draws, complexity=complexity))

    return method


def refined(problem: Problem, seed: int) -> Found:
    """Chains of Hamiltonian Monte Carlo that start at draws of the conditional family: MCMC, not variational."""
    family = Conditional(problem.inputs)
    model = Bayesian(problem.net(seed), problem.likelihood, problem.prior, family=family, seed=seed)
    _trained(problem, model, 300, 0.1, draws=16, complexity="closed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # R-hat is in the table
        chains = refine(model, (problem.inputs, problem.targets), draws=500, iterations=40, leapfrogs=50)
    said = {"acceptance": chains.acceptance, "R-hat": chains.r_hat}
    return Found(problem.columns(chains.predict(problem.grid)), said)


def laplace(problem: Problem, seed: int) -> Found:
    """laplace-torch at the maximum of the posterior: the full Hessian (GGN) of all weights, predictions linearised."""
    net = problem.net(seed)
    optimiser, rate = _adam(net.parameters(), 3000, 0.02)
    for _ in range(3000):
        optimiser.zero_grad()
        cost = -problem.likelihood.log_prob(net(problem.inputs), problem.targets).sum()
        for name, w in net.named_parameters():
            cost = cost + 0.5 * (w / problem.sigma(name)).square().sum()
        cost.backward()
        optimiser.step()
        rate.step()
    precision = torch.cat([torch.full((w.numel(),), problem.sigma(name) ** -2) for name, w in net.named_parameters()])
    kind = "classification" if "p1" in problem.exact else "regression"
    noise = {} if kind == "classification" else {"sigma_noise": NOISE}
    make = import_module("laplace").Laplace  # of the extra 'peers'
    found = make(net, kind, subset_of_weights="all", hessian_structure="full", prior_precision=precision, **noise)
    found.fit(DataLoader(TensorDataset(problem.inputs, problem.targets), 50))
    if kind == "classification":
        return Found({"p1": found(problem.grid, link_approx="probit")[:, 1].detach()})
    mean, variance = (part.detach() for part in found(problem.grid))
    return Found({"mean": mean[:, 0], "sd": (variance[:, 0, 0] + NOISE**2).sqrt()})


def ivon(problem: Problem, seed: int) -> Found:
    """ivon-opt, a diagonal posterior by natural gradients; the setting that was best of six on moons with seed 0.

    Tried were rates .02 and .1 and ``hess_init`` .1, .5, 1 and 10; on the regression none of those tried converged.
    """
    net, n, steps = problem.net(seed), len(problem.inputs), 2000
    groups = [{"params": [w], "weight_decay": problem.sigma(name) ** -2 / n} for name, w in net.named_parameters()]
    optimiser = import_module("ivon").IVON(groups, lr=0.1, ess=n, hess_init=10.0)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        with optimiser.sampled_params(train=True):
            optimiser.zero_grad()
            problem.likelihood.cost(net(problem.inputs), problem.targets).backward()
        optimiser.step()
        rate.step()
    outputs = []
    for _ in range(_DRAWS):
        with optimiser.sampled_params(), torch.no_grad():
            outputs.append(net(problem.grid))
    return Found(problem.columns(predictive(problem.likelihood, torch.stack(outputs), _DRAWS)))


METHODS: dict[str, Method] = {
    "README loop": readme,
    "fit, without epochs": fitted,
    "diagonal": variational(2000, 0.1, 4, estimator="local"),
    "low rank": variational(2000, 0.03, 16, family=LowRank(10)),
    "full covariance": variational(4000, 0.003, 16, family=FullCovariance(), sigma=0.02),
    "mixture of 5": variational(2000, 0.03, 20, "sampled", family=Mixture(5)),
    "conditional": variational(600, 0.1, 32, family=Conditional),
    "refine (MCMC)": refined,
}
if find_spec("laplace") is not None:
    METHODS["Laplace (laplace-torch)"] = laplace
if find_spec("ivon") is not None:
    METHODS["IVON (ivon-opt)"] = ivon


def measure(run: Run) -> Figures:
    """How far the predictions of a method are from the exact ones."""
    problem = PROBLEMS[run.task]()
    with seeded(run.seed):
        found = METHODS[run.method](problem, run.seed)
    return {**problem.distances(found.predicted), **found.besides}
