"""What is measured: a task, the plain networks for it, and ours."""

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bayesbackprop._engine import Estimator
from bayesbackprop._networks import mlp
from bayesbackprop.likelihoods import Categorical, Gaussian, Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import Adam
from bayesbackprop.priors import Prior, ScaleMixture
from bayesbackprop_paper.timing import CPU

# The size of the training set, which scales the complexity cost and has no influence on time.
N = 50_000

# Somewhere in the paper's grid; no influence on time either.
MIXTURE = ScaleMixture(pi=0.25, sigma1=0.37, sigma2=0.001)

# By the name in the tables. The rate is so small that the networks stay what they are, however often they are timed.
_RATE = 1e-5
OWN = "our Adam"
OPTIMISERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=_RATE),
    "Adam": partial(torch.optim.Adam, lr=_RATE),
    "fused Adam": partial(torch.optim.Adam, lr=_RATE, fused=True),
    "foreach Adam": partial(torch.optim.Adam, lr=_RATE, foreach=True),
    OWN: partial(Adam, lr=_RATE),
}


# What of a step is timed: all of it, the gradients alone, or the optimiser's update alone.
Part = Literal["step", "gradients", "update"]


class UnsupportedError(RuntimeError):
    """What cannot be measured here; it says why, in words for a table."""


class Layers(NamedTuple):
    """What networks are built of: torch's layers, or those that another library has in their place."""

    linear: Callable[[int, int], nn.Module] = nn.Linear
    conv: Callable[..., nn.Module] = nn.Conv2d
    lstm: Callable[[int, int], nn.Module] = partial(nn.LSTM, batch_first=True)
    # Width, heads and hidden units. Without dropout, which would be noise of another kind.
    encoder: Callable[[int, int, int], nn.Module] = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)


@dataclass(frozen=True)
class Task:
    """A network, its kind of data, and the device of both.

    Args:
        name: Of the network, such as 784-400-400-10.
        build: Makes the network of given layers.
        inputs: Makes a batch of random inputs.
        classes: How many there are; 1 where the target is a real number.
        units: Of a hidden layer, where all have as many.
        device: Where network and data are.
    """

    name: str
    build: Callable[[Layers], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    units: int | None = None
    device: torch.device = CPU

    @property
    def classifies(self) -> bool:
        """Whether the targets are classes."""
        return self.classes > 1

    @property
    def weights(self) -> int:
        """The number of weights and biases."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(Layers()).parameters())

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        targets = torch.randint(self.classes, (batch,)) if self.classifies else torch.randn(batch, 1)
        return self.inputs(batch).to(self.device), targets.to(self.device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The plain loss."""
        return (nn.functional.cross_entropy if self.classifies else nn.functional.mse_loss)(outputs, targets)

    def likelihood(self) -> Likelihood:
        """The same as a likelihood."""
        return Categorical() if self.classifies else Gaussian(1.0)

    def net(self, layers: Layers | None = None) -> nn.Module:
        """The network, of torch's layers or these."""
        return self.build(layers or Layers()).to(self.device)


def fully_connected(sizes: tuple[int, ...], device: torch.device = CPU) -> Task:
    """The task of a fully connected network.

    Examples:
        >>> task = fully_connected((784, 400, 10))
        >>> task.name, task.weights
        ('784-400-10', 318010)
    """
    name = "-".join(map(str, sizes))
    return Task(name, partial(_mlp, sizes), partial(_rows, sizes[0]), sizes[-1], sizes[1], device)


def _mlp(sizes: tuple[int, ...], layers: Layers) -> nn.Module:
    return mlp(sizes, linear=layers.linear)


def _rows(features: int, batch: int) -> Tensor:
    return torch.rand(batch, features)


class Differentiable(Protocol):
    """A cost."""

    def backward(self) -> object:
        """Add its gradients to the parameters'."""


class Trainee(NamedTuple):
    """A network ready to be trained.

    ``module`` has the parameters and the mode, ``cost`` gives the cost of a minibatch, and ``forward`` is a pass with
    one draw of weights. ``optimiser`` is for those that bring their own.
    """

    module: nn.Module
    cost: Callable[[Tensor, Tensor], Differentiable]
    forward: Callable[[Tensor], Tensor]
    optimiser: torch.optim.Optimizer | None = None


class Contender(NamedTuple):
    """A row of the comparison.

    ``against`` is the row that its time is divided by, and ``repeat`` how many steps, or parts of them, are timed
    together.
    """

    name: str
    objective: str
    build: Callable[[Task], Trainee]
    optimiser: str = "SGD"
    against: str | None = None
    part: Part = "step"
    repeat: int = 1


def plain(task: Task) -> Trainee:
    """The network itself, on the plain loss."""
    net = task.net()
    return Trainee(net, lambda x, y: task.loss(net(x), y), net)


def plain_compiled(backend: str, task: Task) -> Trainee:
    """The same, through ``torch.compile``."""
    net = task.net()
    passed = compiled(net, backend)
    return Trainee(net, lambda x, y: task.loss(passed(x), y), net)


def _dropout(task: Task) -> Trainee:
    """With dropout of .2 on the inputs and .5 on hidden units, as in the paper."""
    rates = chain([0.2], repeat(0.5))
    net = task.net(Layers(lambda inputs, outputs: nn.Sequential(nn.Dropout(next(rates)), nn.Linear(inputs, outputs))))
    return Trainee(net, lambda x, y: task.loss(net(x), y), net)


def bayesian(task: Task, prior: Prior = MIXTURE, estimator: Estimator = "shared") -> Bayesian:
    """Our model of the task."""
    return Bayesian(task.net(), task.likelihood(), prior, estimator=estimator)


def ours(
    name: str,
    objective: str,
    *,
    prior: Prior = MIXTURE,
    estimator: Estimator = "shared",
    backend: str | None = None,
    energy: Mapping[str, Any] | None = None,
    **options: Any,
) -> Contender:
    """One of our rows: a model of this prior and estimator, and a ``FreeEnergy`` with these options of its own.

    Args:
        name: Of the row.
        objective: In words.
        prior: Of all weights.
        estimator: Of all weights.
        backend: Of ``torch.compile``; None for eager code.
        energy: Options of ``FreeEnergy``.
        **options: Of the :class:`Contender`.
    """
    return Contender(name, objective, partial(_ours, prior, estimator, backend, energy or {}), **options)


def _ours(prior: Prior, estimator: Estimator, backend: str | None, energy: Mapping[str, Any], task: Task) -> Trainee:
    model = bayesian(task, prior, estimator)
    free_energy = FreeEnergy(model, n=N, **energy)
    return Trainee(model, free_energy if backend is None else compiled(free_energy, backend), model)


def compiled(module: nn.Module, backend: str) -> Callable[..., Any]:
    """The module compiled; what inductor needs to do it must be there."""
    compiler = os.environ.get("CXX", "clang++" if platform.system() == "Darwin" else "g++")
    if backend == "inductor" and shutil.which(compiler) is None:
        raise UnsupportedError(f"torch.compile needs a C++ compiler, and there is no {compiler}")
    made: Callable[..., Any] = torch.compile(module, backend=backend)
    return made


SGD = Contender("sgd", "plain loss", plain)
DROPOUT = Contender("dropout", "plain loss", _dropout)
OURS = ours("bayesbackprop", "scale mixture, sampled")
# A whole step in one call.
OURS_BY_ADAM = OURS._replace(name=f"{OURS.name} its own Adam", optimiser=OWN)
