"""A linear regression beside a network: what it expects, how little it has seen of the like, how far to trust it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The numbers of the matrices of a replica, beyond which there is no regression: 32 MB.
_LARGEST = 2**22

# The least x^T A^-1 x, so that it can be divided by: that of more observations than anybody makes.
_LEAST = 1e-12

# An action is neglected in contexts in which it was tried so many times less than actions were on average.
_NEGLECTED = 5.0

# The share is judged by so many rewards, or by this part of all if that is more: what says which of the two is right is
# rare, and the rarer the more was learnt. For so many of them an even share stands at the start.
_LONG, _PART, _EVEN = 500, 0.25, 1.0


class Expected(NamedTuple):
    """What a regression says of each action: the mean, its standard error, and how far it is to be trusted, up to 1."""

    mean: Tensor
    error: Tensor
    trust: Tensor


class Regression:
    """Ridge regression of the rewards of each action on its inputs, for each of ``replicas``.

    Its expectation is x^T A^-1 b with A = 1 + sum x x^T and b = sum x r over what was observed of an action, and
    n = 1 / x^T A^-1 x counts the observations like x. Together with that of a network it is trusted by a share w: that
    with the least squared error of w * linear + (1 - w) * network over recent rewards, each predicted before it was
    learnt, which is sum (r - network) (linear - network) / sum (linear - network)^2.

    An action can be neglected in contexts like x: n is below a fifth of m, its mean over all actions. Then nothing says
    that it is as bad there as a line goes on to say, and so it would be left there for good. So the share is multiplied
    by min(1, n max(1, 5 / m)), and the standard error by sqrt(1 + log max(1, m / 5 n)).

    Args:
        replicas: How many agents, each with its own.
        actions: How many there are.
        features: The width of a context.
        numbers: How many numbers describe an action: then one regression is that of all, on the products of these and
            those of the context. 0: each action has its own.
    """

    def __init__(self, replicas: int, actions: int, features: int, numbers: int) -> None:
        self._features, self._actions, self._numbers = features, actions, numbers
        models, size = shape_of(features, actions, numbers)
        self.inverse = torch.zeros(replicas, models, size, size, dtype=torch.float64)
        self.moment = torch.zeros(replicas, models, size, dtype=torch.float64)
        # How many rewards and the sum of their squares; above and below the fraction bar of the share.
        self.count = torch.zeros(replicas, dtype=torch.float64)
        self.square, self.above, self.below = (torch.zeros_like(self.count) for _ in range(3))
        self.forget(torch.ones(replicas, dtype=torch.bool))

    def forget(self, changed: Tensor) -> None:
        """Begin anew for some replicas."""
        self.inverse[changed] = torch.eye(self.inverse.shape[-1], dtype=torch.float64)
        for tensor in (self.moment, self.count, self.square, self.above, self.below):
            tensor[changed] = 0

    def expect(self, contexts: Tensor, codes: Tensor | None) -> Expected:
        """The expected reward of each action, its standard error and its trust, ``[replicas, B, actions]``.

        The error is in units of the rewards: the root of their mean square stands for the noise.

        Args:
            contexts: ``[replicas, B, features]``.
            codes: The numbers of the actions, ``[replicas, B, actions, numbers]``, where there are any.
        """
        if codes is None:
            inputs = _with_constant(contexts)[:, None]  # [replicas, 1, B, size], the same for all regressions
        else:
            inputs = _products(contexts[:, :, None], codes).flatten(1, 2)[:, None]
        found = inputs @ self.inverse
        mean, like = (found @ self.moment[..., None])[..., 0], (found * inputs).sum(-1)
        size = (self.square / self.count.clamp(min=1)).sqrt().where(self.count > 0, 1.0)
        if codes is None:  # [replicas, actions, B]
            mean, like = mean.mT, like.mT
        else:
            mean, like = mean.reshape(codes.shape[:3]), like.reshape(codes.shape[:3])
        n = like.clamp(min=_LEAST).reciprocal()
        average = n.mean(-1, keepdim=True)
        trust = (n * (_NEGLECTED / average).clamp(min=1)).clamp(max=1)
        doubt = (1 + (average / (_NEGLECTED * n)).clamp(min=1).log()).sqrt()
        return Expected(mean, size[:, None, None] * doubt / n.sqrt(), trust)

    def share(self, errors: Tensor) -> Tensor:
        """How far it is trusted: that which fits best, and so many ``errors`` of its own more, ``[replicas]`` or alike.

        Where the two agree on what is chosen, nothing says which is right about the rest: unless the share varies, what
        one of them is wrong about may never be tried.
        """
        below = self.below + _EVEN
        return ((self.above + 0.5 * _EVEN) / below + errors / below.sqrt()).clamp(0, 1)

    def compare(self, observed: Tensor, actions: Tensor, rewards: Tensor, other: Tensor) -> None:
        """Judge by rewards that are not learnt yet, ``[replicas]``, of which the network expected ``other``."""
        size = ((self.square + rewards.square()) / (self.count + 1)).sqrt()
        size = size.where(size > 0, 1.0)
        place, x = self._place(observed, actions)
        own = ((self.inverse[place] @ x[..., None])[..., 0] * self.moment[place]).sum(-1)
        kept = 1 - 1 / (_PART * self.count).clamp(min=_LONG)
        self.above.mul_(kept).add_((rewards - other) / size * ((own - other) / size))
        self.below.mul_(kept).add_(((own - other) / size).square())

    def learn(self, observed: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Take in the reward of each replica.

        Args:
            observed: The contexts, with the numbers of the actions taken where there are any, ``[replicas, width]``.
            actions: ``[replicas]``.
            rewards: ``[replicas]``.
        """
        place, x = self._place(observed, actions)
        inverse = self.inverse[place]
        found = (inverse @ x[..., None])[..., 0]
        like = (found * x).sum(-1).clamp(min=0)
        # (A + x x^T)^-1 by Sherman and Morrison.
        self.inverse[place] = inverse - found[:, :, None] * (found / (1 + like)[:, None])[:, None, :]
        self.moment[place] += x * rewards[:, None]
        self.square += rewards.square()
        self.count += 1

    def learn_many(self, observed: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Take in rewards of an agent alone, ``[n]``."""
        (_, models), x = self._place(observed, actions)
        for model in models.unique():
            some = models == model
            matrix = torch.linalg.inv(self.inverse[0, model]) + x[some].t() @ x[some]
            inverse = torch.linalg.inv(matrix)
            self.inverse[0, model] = (inverse + inverse.t()) / 2
            self.moment[0, model] += x[some].t() @ rewards[some]
        self.square += rewards.square().sum()
        self.count += len(rewards)

    def tensors(self) -> dict[str, Tensor]:
        """All that changes, by name."""
        names = ("inverse", "moment", "count", "square", "above", "below")
        return {f"regression.{name}": getattr(self, name) for name in names}

    def _place(self, observed: Tensor, actions: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The replica and the regression of each observation, and its input ``[n, size]``."""
        replicas = torch.arange(len(self.inverse)).expand(len(actions))
        if not self._numbers:
            return (replicas, actions), _with_constant(observed)
        contexts, codes = observed.split([self._features, self._numbers], -1)
        return (replicas, torch.zeros_like(actions)), _products(contexts, codes)


def _with_constant(x: Tensor) -> Tensor:
    return F.pad(x.double(), (0, 1), value=1.0)


def _products(contexts: Tensor, codes: Tensor) -> Tensor:
    """Of the numbers of contexts and of actions, and a constant beside each."""
    return (_with_constant(contexts)[..., :, None] * _with_constant(codes)[..., None, :]).flatten(-2)


def shape_of(features: int, actions: int, numbers: int) -> tuple[int, int]:
    """How many regressions there are, and the numbers of an input, where some ``numbers`` describe an action, or 0."""
    return (1, (features + 1) * (numbers + 1)) if numbers else (actions, features + 1)


def fits(features: int, actions: int, numbers: int) -> bool:
    """Whether the matrices are not too large."""
    models, size = shape_of(features, actions, numbers)
    return models * size**2 <= _LARGEST
