"""The networks of the neural agents, and the likelihood of the one reward that an agent sees."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop._networks import mlp
from bayesbackprop.likelihoods import Bernoulli, Form, Gaussian, Likelihood, NegativeBinomial, Poisson

Encoding = Literal["input", "output"]

# The least noise of a number, in units of the scale: exact rewards must not outweigh all others.
_LEAST_NOISE = 0.1


class Parallel(nn.Module):
    """``replicas`` linear layers of the same size side by side: each has its own weights, input and output."""

    def __init__(self, random: torch.Generator, replicas: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_initial(random, replicas, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(replicas, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """``[replicas, B, inputs]`` to ``[replicas, B, outputs]``."""
        return torch.baddbmm(self.bias, x, self.weight.mT)


class Replicas(nn.Module):
    """Fully connected networks side by side, ``[B, replicas, inputs]`` to ``[B, replicas, outputs]``.

    A row of a batch holds one example of each replica. Together they are one example, whose likelihood is the product
    of theirs: so the cost of a minibatch is the sum of the costs of the replicas.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x.transpose(0, 1))
        return outputs.transpose(0, 1)


def reward_network(sizes: Sequence[int], replicas: int, seed: int) -> nn.Module:
    """Fully connected, with rectified linear units, for each of ``replicas``.

    One alone is made of ``nn.Linear``, ``[B, inputs]`` to ``[B, outputs]``, for which the engine has a quick way.
    """
    random = torch.Generator().manual_seed(seed)
    if replicas == 1:
        return mlp(sizes, linear=partial(_linear, random))
    return Replicas(mlp(sizes, linear=partial(Parallel, random, replicas)))


def _initial(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random).mul_(math.sqrt(2 / shape[-1]))  # He et al.


def _linear(random: torch.Generator, inputs: int, outputs: int) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(_initial(random, outputs, inputs))
        layer.bias.zero_()
    return layer


# The likelihoods of a reward, and the expected reward by the first number of the output.
EXPECTED: dict[type[Likelihood], Callable[[Tensor], Tensor]] = {
    Gaussian: lambda output: output,
    Bernoulli: torch.sigmoid,
    Poisson: torch.exp,
    NegativeBinomial: torch.exp,
}


class Unknown(Likelihood):
    """Rewards of which nothing is said: yes or no while all were 0 or 1, and numbers from the first other one on.

    The first number of the output is the logit of a yes, or the mean of a Gaussian whose noise the second one says.

    Args:
        replicas: How many agents see rewards, each its own.
    """

    has_slope = True

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.bernoulli, self.gaussian = Bernoulli(), Gaussian("per-input", least=_LEAST_NOISE)
        self.is_number = nn.Buffer(torch.zeros(replicas, dtype=torch.int64))

    def see(self, rewards: Tensor) -> None:
        """Take note of the reward of each replica."""
        if not self.is_number.numpy().all():
            self.is_number.logical_or_((rewards != 0) & (rewards != 1))

    def expected(self, first: Tensor) -> Tensor:
        """The expected rewards ``[replicas, actions]`` from the first number of each action."""
        if self.is_number.numpy().all():
            return first
        return torch.where(self._numbers, first, first.sigmoid())

    @property
    def _numbers(self) -> Tensor:
        """Whether rewards are numbers, ``[replicas, 1]``."""
        return self.is_number.bool()[:, None]

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        numbers = int(self.is_number.sum())
        if numbers == len(self.is_number):
            return self.gaussian.log_prob(output, target)
        yes_or_no = F.binary_cross_entropy_with_logits(output.chunk(2, -1)[0], target, reduction="none")
        each = (
            -yes_or_no if not numbers else torch.where(self._numbers, self._log_densities(output, target), -yes_or_no)
        )
        return each.flatten(1).sum(1)

    def _log_densities(self, output: Tensor, target: Tensor) -> Tensor:
        """log P of each number by the Gaussian."""
        flat = self.gaussian.log_prob(output.reshape(-1, 2), target.reshape(-1, 1))
        return flat.reshape(target.shape)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        numbers = int(self.is_number.sum())
        if numbers == len(self.is_number):
            return self.gaussian.slope(output, target)
        slope = torch.zeros_like(output)
        torch.sub(output.chunk(2, -1)[0].sigmoid(), target, out=slope[..., :1]).div_(len(target))
        return slope if not numbers else torch.where(self._numbers, self.gaussian.slope(output, target), slope)

    def form(self) -> Form | None:
        if len(self.is_number) > 1:
            return None
        form = (self.gaussian if self.is_number.item() else self.bernoulli).form()
        return form if form is None else form._replace(numbers=2)

    def distribution(self, output: Any) -> Any:
        raise NotImplementedError("An agent has the expected rewards alone.")


def numbers_of(likelihood: Likelihood | None) -> int:
    """How many numbers of the output a reward is judged by; 2 where nothing is said."""
    is_fixed = isinstance(likelihood, Gaussian) and likelihood.noise != "per-input"
    return 1 if is_fixed or isinstance(likelihood, Bernoulli | Poisson | NegativeBinomial) else 2


class OfAction(Likelihood):
    """The likelihood of the reward of the action that was taken.

    The output ``[..., numbers * actions]`` says something of each action: first the first number of each, then the
    second. The target ``[..., 2]`` is the action and its reward; actions that were not taken cost nothing.

    Args:
        likelihood: Of a reward, from the output of its action.
        actions: How many the output is about.
    """

    def __init__(self, likelihood: Likelihood, actions: int) -> None:
        super().__init__()
        self.likelihood, self.actions = likelihood, actions
        self.numbers = numbers_of(likelihood)
        self.has_slope = likelihood.has_slope
        # The last output and target with what was taken from them: the cost is followed by its slope.
        self._last: tuple[Tensor | None, Tensor | None, Tensor, Tensor] = (None, None, torch.empty(0), torch.empty(0))

    def expected(self, first: Tensor) -> Tensor:
        """The expected rewards, from the first number of each action."""
        likelihood = self.likelihood
        return likelihood.expected(first) if isinstance(likelihood, Unknown) else EXPECTED[type(likelihood)](first)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return self.likelihood.log_prob(self._taken(output, target), target[..., 1:])

    def costs(self, output: Tensor, target: Tensor) -> Tensor:
        return self.likelihood.costs(self._taken(output, target), target[..., 1:])

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return self.likelihood.cost(self._taken(output, target), target[..., 1:])

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        taken, places = self._find(output, target)
        slope = self.likelihood.slope(taken, target[..., 1:])
        return slope if self.actions == 1 else torch.zeros_like(output).scatter_(-1, places, slope)

    def form(self) -> Form | None:
        form = self.likelihood.form()
        return form if form is None else form._replace(actions=self.actions)

    def distribution(self, output: Any) -> Any:
        raise NotImplementedError("An agent has the expected rewards alone.")

    def _taken(self, output: Tensor, target: Tensor) -> Tensor:
        return self._find(output, target)[0]

    def _find(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of the actions that were taken, and where in the output they are."""
        if self.actions == 1:
            return output, target
        *last, taken, places = self._last
        if last[0] is output and last[1] is target:
            return taken, places
        first = target[..., :1].long()
        places = first if self.numbers == 1 else torch.cat([first, first + self.actions], -1)
        taken = output.gather(-1, places)
        if not output.requires_grad:
            self._last = output, target, taken, places
        return taken, places


class LikelihoodCost(nn.Module):
    """What a plain network learns from: the likelihood cost of a minibatch."""

    def __init__(self, net: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.net, self.likelihood = net, likelihood

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.cost(self.net(inputs), targets)
