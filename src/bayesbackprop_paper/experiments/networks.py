"""LeNet-5 and ResNet-20 on MNIST and Fashion-MNIST: every method for as many epochs, judged alike.

The recipes were chosen in trials with seed 10 and LeNet-5, on the validation set, the last 10,000 training images
(docs/decisions/networks.md). All methods have the same batches and a learning rate that falls to 0 as a cosine. The
test set, and the other data set as outside data, are only looked at to report, on seeds 0, 1, ...
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesbackprop import IVON, Adam, Batches, Bayesian, Categorical, FreeEnergy, LowRank, Normal, evaluate
from bayesbackprop._engine import evaluating
from bayesbackprop.verdict import ClassScores, Predictor
from bayesbackprop_paper import data
from bayesbackprop_paper.architectures import ResNet, lenet5
from bayesbackprop_paper.data import Images, Split
from bayesbackprop_paper.experiments.recipe import Outputs, PointEstimate, seeded, train_falling
from bayesbackprop_paper.experiments.truth import Figures, Run

# Data sets by what reads them, and which is the outside data of each.
DATA: Mapping[str, Callable[[], Images]] = {"MNIST": data.mnist, "Fashion-MNIST": data.fashion_mnist}
_OUTSIDE: Mapping[str, str] = {"MNIST": "Fashion-MNIST", "Fashion-MNIST": "MNIST"}

# What makes each network, given how likely dropout is to forget an input of its fully connected layers.
NETWORKS: Mapping[str, Callable[[float], nn.Module]] = {
    "LeNet-5": lambda dropout: lenet5(dropout=dropout),
    # Channels last: a fifth faster on a CPU.
    "ResNet-20": lambda dropout: ResNet(3, 1, dropout=dropout).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}

_BATCH = 128
_MEMBERS = 5
_ENSEMBLE = f"ensemble of {_MEMBERS}"
_RATE = 4e-3
_DROPOUT = 0.2

# Of ours.
_TEMPERATURE, _PRIOR, _SIGMA = 0.2, Normal(0.2), 0.01
_RANK = 4

# Of IVON.
_IVON: Mapping[str, Any] = {"lr": 0.5, "hess_init": 0.5}
_IVON_PRIOR = Normal(1.0)


class Extent(NamedTuple):
    """How long to train, and on how much of a data set.

    Args:
        epochs: Of each network.
        examples: Training images; None for all 50,000.
        draws: Networks to average, of the methods that draw.
        judged: Test images, and as many outside ones; None for all 10,000.
    """

    epochs: int
    examples: int | None
    draws: int
    judged: int | None


# ResNet-20 takes about forty times as long as LeNet-5 for an image, so it gets less of everything.
EXTENTS: Mapping[str, Extent] = {
    "LeNet-5": Extent(10, None, 20, None),
    "ResNet-20": Extent(4, 25_000, 8, 5_000),
}
QUICK = Extent(1, 500, 2, 200)


class Task(NamedTuple):
    """A network to be trained on a data set."""

    data: str
    network: str
    extent: Extent

    @property
    def name(self) -> str:
        """Under which rows are kept: training of another length is another task."""
        part = "" if self.extent.examples is None else f" of {self.extent.examples:,} images"
        return f"{self.data}, {self.network}, epochs: {self.extent.epochs}{part}"

    def training_set(self) -> Split:
        """Images as a network takes them, and their labels."""
        return _some(images(self.data).train, self.extent.examples)

    def test_set(self) -> Split:
        """What to judge by."""
        return _some(images(self.data).test, self.extent.judged)

    def outside_set(self) -> Tensor:
        """Images of the other data set."""
        return _some(images(_OUTSIDE[self.data]).test, self.extent.judged).images


@functools.lru_cache
def images(name: str) -> Images:
    """A data set, read once."""
    return DATA[name]()


def _some(split: Split, count: int | None) -> Split:
    return Split(split.images[:count].view(-1, 1, 28, 28), split.labels[:count])


class Trained(NamedTuple):
    """What predicts, and how many seconds its training took."""

    model: Predictor
    seconds: float


class _PlainNetwork(NamedTuple):
    net: nn.Module
    seconds: float


def _train(objective: FreeEnergy | PointEstimate, optimiser: Optimizer, task: Task, seed: int) -> float:
    """Train on the images of a task; how many seconds it took."""
    batches = Batches(*task.training_set(), _BATCH, seed)
    began = time.perf_counter()
    train_falling(objective, optimiser, batches, task.extent.epochs, seed)
    return time.perf_counter() - began


def _network(task: Task, seed: int, dropout: float = 0.0) -> nn.Module:
    with seeded(seed):
        return NETWORKS[task.network](dropout)


@functools.lru_cache(maxsize=_MEMBERS + 1)
def _plain_network(task: Task, seed: int, dropout: float = 0.0) -> _PlainNetwork:
    """A trained network without a posterior. Several methods share one: it is trained once."""
    net = _network(task, seed, dropout)
    objective = PointEstimate(net, Categorical(), len(task.training_set().labels))
    return _PlainNetwork(net, _train(objective, Adam(objective.param_groups(_RATE)), task, seed))


def _member_seed(seed: int, number: int) -> int:
    return 100 * (seed + 1) + number  # no two seeds share a member


def _average(networks: list[_PlainNetwork]) -> Trained:
    def outputs(inputs: Tensor, draws: int) -> list[Tensor]:  # noqa: ARG001
        found = []
        for each in networks:
            with evaluating(each.net):
                found.append(each.net(inputs))
        return found

    return Trained(Outputs(outputs), sum(each.seconds for each in networks))


def _plain(task: Task, seed: int) -> Trained:
    return _average([_plain_network(task, _member_seed(seed, 0))])


def _ensemble(task: Task, seed: int) -> Trained:
    return _average([_plain_network(task, _member_seed(seed, number)) for number in range(_MEMBERS)])


def _dropout(task: Task, seed: int) -> Trained:
    return _average([_plain_network(task, seed, _DROPOUT)])


def _mc_dropout(task: Task, seed: int) -> Trained:
    net, seconds = _plain_network(task, seed, _DROPOUT)

    def outputs(inputs: Tensor, draws: int) -> list[Tensor]:
        with _dropping(net):
            return [net(inputs) for _ in range(draws)]

    return Trained(Outputs(outputs), seconds)


@contextmanager
def _dropping(net: nn.Module) -> Iterator[None]:
    """Evaluation mode, but for dropout, which stays on."""
    with evaluating(net):
        dropouts = [module for module in net.modules() if isinstance(module, nn.Dropout)]
        for module in dropouts:
            module.train()
        try:
            yield
        finally:
            for module in dropouts:
                module.eval()


def _ours(task: Task, seed: int, *, last_layer: bool = False, **options: Any) -> Trained:
    """Bayes by Backprop from random weights; ``options`` are those of :class:`Bayesian`."""
    net = _network(task, seed)
    if last_layer:
        last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
        options["select"] = lambda _, module: module is last
    model = Bayesian(net, Categorical(), _PRIOR, sigma=_SIGMA, seed=seed, **options)
    objective = _free_energy(model, task, _TEMPERATURE)
    return Trained(model, _train(objective, Adam(objective.param_groups(_RATE)), task, seed))


def _ivon(task: Task, seed: int) -> Trained:
    # One draw for a minibatch, as its authors have it.
    model = Bayesian(_network(task, seed), Categorical(), _IVON_PRIOR, estimator="shared", seed=seed)
    objective = _free_energy(model, task, 1.0)
    return Trained(model, _train(objective, IVON(objective, **_IVON), task, seed))


def _free_energy(model: Bayesian, task: Task, temperature: float) -> FreeEnergy:
    return FreeEnergy(model, len(task.training_set().labels), complexity="closed", temperature=temperature)


# Those that share a network stand beside each other; the longest come last.
METHODS: Mapping[str, Callable[[Task, int], Trained]] = {
    "plain": _plain,
    "dropout, off in prediction": _dropout,
    "MC dropout": _mc_dropout,
    "ours, diagonal": functools.partial(_ours, estimator="flipout"),
    "ours, last layer": functools.partial(_ours, estimator="flipout", last_layer=True),
    "IVON": _ivon,
    "ours, low rank": functools.partial(_ours, family=LowRank(_RANK)),
    _ENSEMBLE: _ensemble,
}


def measure(task: Task, run: Run) -> Figures:
    """The scores on the test set in per cent, the AUROC of the other data set, and the seconds of the training."""
    outside = task.outside_set()  # first: without it nothing is trained
    trained = METHODS[run.method](task, run.seed)
    verdict = evaluate(trained.model, task.test_set(), outside=outside, draws=task.extent.draws, seed=run.seed)
    scores = verdict.scores
    assert isinstance(scores, ClassScores), "images have classes"
    return {
        "error %": 100 * (1 - scores.accuracy),
        "NLL": scores.nll,
        "ECE %": 100 * scores.ece,
        "AUROC entropy": verdict.outside["outside"]["entropy"].auroc,
        "seconds of training": trained.seconds,
    }


def verdicts(found: Mapping[str, Any]) -> str:
    """Which single network has the lowest NLL and ECE in each task, and how far the best error of ours is from it."""
    lines = []
    for task in dict.fromkeys(entry["task"] for entry in found.values()):
        rows = [entry for entry in found.values() if entry["task"] == task and entry["method"] != _ENSEMBLE]
        means = {figure: _means(rows, figure) for figure in ("NLL", "ECE %", "error %")}
        ours = [error for method, error in means["error %"].items() if method.startswith("ours")]
        if not ours or len(means["error %"]) == len(ours):
            continue  # there is nothing to compare yet
        nll, ece = (min(means[figure], key=means[figure].__getitem__) for figure in ("NLL", "ECE %"))
        behind = min(ours) - min(means["error %"].values())
        lines.append(
            f"{task}: of the single networks, {nll} has the lowest NLL and {ece} the lowest ECE; "
            f"the lowest error of ours is {behind:.2f} above the lowest of these."
        )
    return "\n".join(lines) + "\n"


def _means(rows: list[Any], figure: str) -> dict[str, float]:
    methods = dict.fromkeys(row["method"] for row in rows)
    return {each: fmean(row["figures"][figure] for row in rows if row["method"] == each) for each in methods}
