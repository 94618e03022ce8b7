"""How small LeNet-5 gets on MNIST: its error by how many times fewer weights are left.

The network is Caffe's LeNet-5, as in the literature. Weights go by their signal-to-noise ratio, all layers together.
The error is that of the network at the posterior mean, which is what would be shipped. The levels are fixed, so nothing
is chosen by the test set.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from bayesbackprop import Adam, Batches, Bayesian, Categorical, FreeEnergy, Normal, prune
from bayesbackprop_paper import data
from bayesbackprop_paper.architectures import lenet5_caffe
from bayesbackprop_paper.data import Split
from bayesbackprop_paper.experiments.recipe import Examples, error_percent, seeded, train_falling
from bayesbackprop_paper.experiments.truth import Figures, Run

# Error in per cent and how many times fewer weights, as Molchanov et al. (2017) list them.
PUBLISHED: Mapping[str, tuple[float, int]] = {
    "Han et al. (2015)": (0.77, 12),
    "Guo et al. (2016)": (0.91, 111),
    "Ullrich et al. (2017)": (0.97, 200),
    "Molchanov et al. (2017)": (0.75, 280),
}

_PRIOR, _SIGMA, _RHO_RATE = Normal(0.1), 0.02, 5.0

# The full complexity cost takes weights that the data do not need to the prior, where their signal-to-noise ratio is
# low. Those that are left are needed: on them it would only weigh.
_TEMPERATURE, _TEMPERATURE_AFTER = 1.0, 0.1


class Plan(NamedTuple):
    """How the network is trained, and how many times smaller it gets, level by level; tests have a smaller one."""

    make_net: Callable[[], nn.Module] = lenet5_caffe
    epochs: int = 10
    epochs_after: int = 2  # each level
    levels: tuple[int, ...] = (10, 30, 63, 100, 150, 200, 280)
    rate: float = 2e-3
    batch_size: int = 128
    examples: int | None = None  # to train on; None for all

    @property
    def task(self) -> str:
        """Under which rows are kept: training of another length is another task."""
        part = "" if self.examples is None else f" of {self.examples:,} images"
        return f"MNIST, LeNet-5 of Caffe, epochs: {self.epochs}, then {self.epochs_after} at each level{part}"


QUICK = Plan(epochs=1, epochs_after=1, levels=(10, 100), examples=2000)


def _images(split: Split) -> Examples:
    return Examples(split.images.view(-1, 1, 28, 28), split.labels)


def _train(model: Bayesian, plan: Plan, epochs: int, temperature: float, seed: int) -> None:
    training = _images(Split(*(part[: plan.examples] for part in data.mnist().train)))
    objective = FreeEnergy(model, len(training.targets), complexity="closed", temperature=temperature)
    optimiser = Adam(objective.param_groups(plan.rate, rho_lr=_RHO_RATE * plan.rate))
    train_falling(objective, optimiser, Batches(*training, plan.batch_size, seed), epochs, seed)


@functools.lru_cache(maxsize=1)
def _trained(plan: Plan, seed: int) -> Bayesian:
    """The network with all of its weights. Both methods start from it."""
    with seeded(seed):
        net = plan.make_net()
    model = Bayesian(net, Categorical(), _PRIOR, sigma=_SIGMA, seed=seed)
    _train(model, plan, plan.epochs, _TEMPERATURE, seed)
    return model


def _at_once(plan: Plan, seed: int) -> Iterator[tuple[int, Bayesian]]:
    """Each level from the trained network, as it is then."""
    model = _trained(plan, seed)
    return ((level, prune(model, 1 - 1 / level)) for level in plan.levels)


def _step_by_step(plan: Plan, seed: int) -> Iterator[tuple[int, Bayesian]]:
    """Each level from the one before, with what is left trained on."""
    model = _trained(plan, seed)
    for level in plan.levels:
        model = prune(model, 1 - 1 / level)
        _train(model, plan, plan.epochs_after, _TEMPERATURE_AFTER, seed)
        yield level, model


METHODS: Mapping[str, Callable[[Plan, int], Iterable[tuple[int, Bayesian]]]] = {
    "pruned": _at_once,
    "pruned and trained on": _step_by_step,
}


def measure(plan: Plan, run: Run) -> Figures:
    """The test error in per cent of all weights, and at each level."""
    test = _images(data.mnist().test)
    levels = [(1, _trained(plan, run.seed)), *METHODS[run.method](plan, run.seed)]
    return {f"error % at {level}x": error_percent(model.net, test) for level, model in levels}


def verdicts(found: Mapping[str, Any]) -> str:
    """The most that each method compresses with an error of 1 % or less for every seed, and what was published."""
    lines = []
    for task, method in dict.fromkeys((entry["task"], entry["method"]) for entry in found.values()):
        rows = [entry["figures"] for entry in found.values() if (entry["task"], entry["method"]) == (task, method)]
        good = [figure for figure in rows[0] if all(row.get(figure, 100.0) <= 1.0 for row in rows)]
        most = good[-1].removeprefix("error % at ") if good else "none"
        lines.append(f"{task}, {method}, the smallest network with 1 % error or less: {most}.")
    published = ", ".join(f"{name} {times}x at {error} %" for name, (error, times) in PUBLISHED.items())
    return "\n".join([*lines, f"Published: {published}."]) + "\n"
