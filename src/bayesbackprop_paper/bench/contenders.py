"""What is measured: a task, the plain networks for it, and ours."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bayesbackprop._networks import mlp
from bayesbackprop.likelihoods import Categorical, Gaussian
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.priors import ScaleMixture
from bayesbackprop_paper.timing import CPU

# The size of the training set, which scales the complexity cost and has no influence on time.
N = 50_000

# Somewhere in the paper's grid; no influence on time either.
MIXTURE = ScaleMixture(pi=0.25, sigma1=0.37, sigma2=0.001)


class Task(NamedTuple):
    """A fully connected network, its kind of data (classes, or one real number), and the device of both."""

    sizes: tuple[int, ...]
    device: torch.device = CPU

    @property
    def name(self) -> str:
        """Such as 784-400-400-10."""
        return "-".join(map(str, self.sizes))

    @property
    def classifies(self) -> bool:
        """Whether the targets are classes."""
        return self.sizes[-1] > 1

    @property
    def weights(self) -> int:
        """The number of weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.sizes))

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        targets = torch.randint(self.sizes[-1], (batch,)) if self.classifies else torch.randn(batch, 1)
        return torch.rand(batch, self.sizes[0]).to(self.device), targets.to(self.device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The plain loss."""
        return (nn.functional.cross_entropy if self.classifies else nn.functional.mse_loss)(outputs, targets)

    def layers(self, linear: Callable[[int, int], nn.Module] = nn.Linear, dropout: bool = False) -> nn.Sequential:
        """The network, of any library's linear layers; dropout is .2 on the inputs and .5 on hidden units."""
        rates = [0.2] + [0.5] * (len(self.sizes) - 2) if dropout else None
        return mlp(self.sizes, linear=linear, dropout=rates).to(self.device)


class Differentiable(Protocol):
    """A cost."""

    def backward(self) -> object:
        """Add its gradients to the parameters'."""


class Trainee(NamedTuple):
    """A network ready to be trained: its parameters, the cost of a minibatch, and a pass with one draw of weights."""

    parameters: Iterable[nn.Parameter]
    cost: Callable[[Tensor, Tensor], Differentiable]
    forward: Callable[[Tensor], Tensor]


class Contender(NamedTuple):
    """A row of the comparison: its name, its objective in words, and how it is built."""

    name: str
    objective: str
    build: Callable[[Task], Trainee]
    tensors: int = 2  # weight-sized tensors of parameters: mu and rho


def _plain(task: Task) -> Trainee:
    net = task.layers()
    return Trainee(net.parameters(), lambda x, y: task.loss(net(x), y), net)


def _dropout(task: Task) -> Trainee:
    net = task.layers(dropout=True)
    return Trainee(net.parameters(), lambda x, y: task.loss(net(x), y), net)


def bayesian(task: Task) -> Bayesian:
    """Our model of the task."""
    return Bayesian(task.layers(), Categorical() if task.classifies else Gaussian(1.0), MIXTURE)


def _ours(task: Task) -> Trainee:
    model = bayesian(task)
    return Trainee(model.parameters(), FreeEnergy(model, n=N), model)


SGD = Contender("sgd", "plain loss", _plain, tensors=1)
DROPOUT = Contender("dropout", "plain loss", _dropout, tensors=1)
OURS = Contender("bayesbackprop", "scale mixture, sampled", _ours)
