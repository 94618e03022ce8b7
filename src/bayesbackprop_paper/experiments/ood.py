"""What a digit classifier says of clothes: MNIST 784-400-400-10, judged on its test set and against Fashion-MNIST.

All choices were made on the validation set and on outside data made of it (docs/decisions/ood.md). Fashion-MNIST is
only looked at to report.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Normal, evaluate
from bayesbackprop._engine import evaluating
from bayesbackprop.optim import Adam
from bayesbackprop.training import Batches
from bayesbackprop.verdict import ClassScores, Predictor
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Split
from bayesbackprop_paper.experiments.mnist import Config, network
from bayesbackprop_paper.experiments.recipe import Outputs, PointEstimate, train_falling
from bayesbackprop_paper.experiments.truth import Figures, Run

TASK = "MNIST to Fashion-MNIST"

# Plain networks of an ensemble.
_MEMBERS = 5

# The temperature, and the prior. What a pixel that is always black would do is not in the data: the
# weights of such pixels keep the prior, and as it is wide, drawn networks disagree where such a pixel is not black.
_TEMPERATURE = 0.03
_PRIOR = {"0.weight": Normal(1.0), "*.weight": Normal(0.2), "*.bias": Normal(1.0)}


class Size(NamedTuple):
    """How long to train each, in epochs, and the networks to average; tests have a smaller one."""

    plain: int = 10
    dropout: int = 40
    ours: int = 8
    batch_size: int = 128
    draws: int = 100


def _train(
    objective: FreeEnergy | PointEstimate,
    images: Split,
    epochs: int,
    size: Size,
    seed: int,
    lr: float,
    rho_rate: float = 1.0,
) -> None:
    """Adam with a rate that falls to 0."""
    optimiser = Adam(objective.param_groups(lr, rho_lr=rho_rate * lr))
    train_falling(objective, optimiser, Batches(*images, size.batch_size, seed), epochs, seed)


@functools.lru_cache(maxsize=1)
def _dropout_net(seed: int, size: Size) -> nn.Sequential:
    """A network that forgets 30 % of the units of each layer, the inputs among them. Two methods have it."""
    net = network(Config("dropout", seed=seed))
    images = data.mnist().train
    _train(PointEstimate(net, Categorical(), len(images.labels)), images, size.dropout, size, seed, 1e-3)
    return net


def ensemble(seed: int, size: Size) -> Predictor:
    """Plain networks of other initial weights and orders."""
    images = data.mnist().train
    members = []
    for number in range(_MEMBERS):
        own = 100 * (seed + 1) + number  # no two seeds share a member
        net = network(Config("sgd", seed=own))
        _train(PointEstimate(net, Categorical(), len(images.labels)), images, size.plain, size, own, 1e-3)
        members.append(net)
    return Outputs(lambda inputs, draws: [member(inputs) for member in members])  # noqa: ARG005


def mc_dropout(seed: int, size: Size) -> Predictor:
    """Dropout that stays on."""
    net = _dropout_net(seed, size)  # in training mode, as fit leaves it
    return Outputs(lambda inputs, draws: [net(inputs) for _ in range(draws)])


def dropout(seed: int, size: Size) -> Predictor:
    """The same network with its dropout off: one plain network."""
    net = _dropout_net(seed, size)

    def outputs(inputs: Tensor, draws: int) -> list[Tensor]:  # noqa: ARG001
        with evaluating(net):
            return [net(inputs)]

    return Outputs(outputs)


def ours_from_dropout(seed: int, size: Size) -> Predictor:
    """Bayes by Backprop from the weights of dropout."""
    start, net = _dropout_net(seed, size), network(Config("sgd", seed=seed))
    with torch.no_grad():
        for own, theirs in zip(net.parameters(), start.parameters(), strict=True):
            own.copy_(theirs)
    return bayesian(net, seed, size)


def bayesian(net: nn.Module, seed: int, size: Size) -> Bayesian:
    """A posterior around the weights of ``net``; rho has 25 times the rate of the means."""
    images = data.mnist().train
    model = Bayesian(net, Categorical(), _PRIOR, sigma=0.02, seed=seed)
    objective = FreeEnergy(model, len(images.labels), complexity="closed", temperature=_TEMPERATURE)
    _train(objective, images, size.ours, size, seed, 2e-4, 25.0)
    return model


# Those that share a network stand beside each other.
METHODS: dict[str, Callable[[int, Size], Predictor]] = {
    "dropout, one network": dropout,
    "MC dropout": mc_dropout,
    "ours, from dropout": ours_from_dropout,
    "ensemble of 5": ensemble,
}


def measure(run: Run, size: Size = Size()) -> Figures:  # noqa: B008 (it cannot be changed)
    """The scores on the digits in per cent, and by each measure of uncertainty how well it finds the clothes."""
    outside = data.fashion_mnist().test.images  # first: without it nothing is trained
    model = METHODS[run.method](run.seed, size)
    verdict = evaluate(model, data.mnist().test, outside=outside, draws=size.draws, seed=run.seed)
    scores = verdict.scores
    assert isinstance(scores, ClassScores), "digits are classes"
    figures = {"error %": 100 * (1 - scores.accuracy), "NLL": scores.nll, "ECE %": 100 * scores.ece}
    figures["error % at 95 %"] = 100 * scores.error_at_95
    for by, found in verdict.outside["outside"].items():
        figures |= {f"AUROC {by}": found.auroc, f"FPR95 {by}": found.fpr95}
    return figures
