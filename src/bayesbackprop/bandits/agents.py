"""Agents for contextual bandits (section 4 of the paper).

``action = agent.act(context)``; when and if the reward is known, ``agent.observe(context, action, reward)``. Everything
random is a pure function of the seed and of how often the agent has acted and observed: an agent that was saved and
loaded goes on as if it had not been.

An agent can be several: ``replicas`` independent ones of the same kind that act side by side in their own environments,
as one batch of networks, which is how the experiments run their seeds.

Threads may share an agent. What one observed is learnt in a round of updates; rounds are learnt one after the other,
and others decide between two updates.
"""

import copy
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import (
    Described,
    check_count,
    check_finite,
    check_list,
    check_positive,
    check_seed,
    invalid,
)
from bayesbackprop._files import check_counter, check_same, write
from bayesbackprop.bandits._turns import Turns
from bayesbackprop.bandits.environments import check_action
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.priors import Prior

# Seeds of decisions and observations must not meet those of neighbouring agents.
_STRIDE = 1_000_003

# What counts or is a sum of squares.
_NEVER_NEGATIVE = ("actions", "began", "count", "errors", "exp_avg_sq", "is_number", "scale", "square", "step", "tries")

# Of a reward: squares of larger ones, and of their gradients, are not finite in single precision.
_LARGEST = 1e15
# Of a number in a context, for the same reason.
_LARGEST_FEATURE = 1e6


@dataclass(eq=False, repr=False)
class Agent(ABC):
    """Chooses actions and learns from rewards.

    Args:
        features: The width of a context.
        actions: How many there are.
        replicas: How many independent agents; above 1, use :meth:`act_all` and :meth:`observe_all`.
        seed: Of everything random.
    """

    features: int
    actions: int
    _: KW_ONLY
    replicas: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        sizes = check_count(owner, features=self.features, actions=self.actions, replicas=self.replicas)
        vars(self).update({**sizes, **check_seed(owner, seed=self.seed)})
        self.acted = self.observed = 0
        self._set_turns()

    def _set_turns(self) -> None:
        # Whoever needs several takes them in this order: a save, a round of learning, an update or a decision.
        self._saves, self._rounds, self._turns = Turns(), Turns(), Turns()

    def act(self, context: Tensor | Sequence[float]) -> int:
        """The action to take in ``context``, ``[features]``."""
        self._check_alone("act")
        return self.act_all([context])[0]

    def observe(self, context: Tensor | Sequence[float], action: int, reward: float) -> None:
        """Learn that ``action`` in ``context`` gave ``reward``: at once or later, in any order; or never."""
        self._check_alone("observe")
        self.observe_all([context], [action], [reward])

    def act_all(self, contexts: Tensor | Sequence[Any]) -> list[int]:
        """The action of each replica in its context, ``[replicas, features]``."""
        xs = self._check_contexts(contexts)
        with self._turns:
            chosen = self._choose(xs)
            self.acted += 1
        return chosen

    def observe_all(
        self, contexts: Tensor | Sequence[Any], actions: Sequence[int], rewards: Sequence[float] | Tensor
    ) -> None:
        """Learn the reward of each replica."""
        xs, owner = self._check_contexts(contexts), type(self).__name__
        check_list(owner, actions=actions)
        check_list(owner, rewards=rewards)
        if len(actions) != self.replicas or len(rewards) != self.replicas:
            got = Described(f"{len(actions)} actions and {len(rewards)} rewards")
            raise invalid("actions", owner, f"one, with one reward, for each of {self.replicas}", got)
        for action in actions:
            check_action(owner, action, self.actions)
        gains = as_numbers(rewards, torch.float64)
        if gains.shape != (self.replicas,) or not bool((gains.abs() <= _LARGEST).all()):
            constraint = f"a number in [-{_LARGEST:g}, {_LARGEST:g}]; leave out what is not known"
            raise invalid("reward", owner, constraint, rewards if self.replicas > 1 else rewards[0])
        with self._rounds, self._turns:
            self._learn(xs, torch.tensor([int(action) for action in actions]), gains)
            self.observed += 1

    @abstractmethod
    def _choose(self, contexts: Tensor) -> list[int]:
        """The actions in ``contexts``, ``[replicas, features]``; what :meth:`tensors` says stays as it is."""

    @abstractmethod
    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Take in one observation of each replica; ``self._turns.give_way()`` lets other threads decide meanwhile."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """All that changes, by name: the agent's own tensors, not copies."""

    def tensors(self) -> dict[str, Tensor]:
        """All that changes, by name, to be written: copies, as of a moment between two rounds of learning."""
        return self._snapshot()[0]

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What :meth:`tensors` and :meth:`described` say, of the same moment."""
        with self._rounds:  # others may decide meanwhile, which changes no tensor
            return {name: tensor.detach().clone() for name, tensor in self._tensors().items()}, self.described()

    def described(self) -> dict[str, Any]:
        """The arguments that make an agent like this one, as far as JSON can say them, and how far it is."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {
            "arguments": {name: _described(value) for name, value in values.items()},
            "acted": self.acted,
            "observed": self.observed,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that the agent is and knows to ``path``, atomically."""
        with self._saves:  # so that of several saves to one path the newest stays
            tensors, described = self._snapshot()
            check_same(f"{type(self).__name__}.save", tensors, tensors)
            write(path, "agent", tensors, {"agent": type(self).__name__, **described})

    def restore(self, tensors: dict[str, Tensor], acted: int, observed: int) -> None:
        """Become the agent whose :meth:`tensors` these were."""
        with self._rounds, self._turns:
            self._restore(tensors, acted, observed)

    def _restore(self, tensors: dict[str, Tensor], acted: int, observed: int) -> None:
        own = self._tensors()
        check_same(type(self).__name__, tensors, own)
        for name, tensor in tensors.items():
            *_, last = name.split(".")
            if last in _NEVER_NEGATIVE and bool((tensor < 0).any()):
                raise ValueError(f"{name} is negative")
            if last == "actions" and bool((tensor >= self.actions).any()):
                raise ValueError(f"{name} that there are not")
            if last == "root":
                matrix, positive = tensors["matrix"], bool((tensor.diagonal(dim1=-2, dim2=-1) > 0).all())
                if not positive or not bool((tensor @ tensor.mT - matrix).abs().max() <= 1e-9 * matrix.abs().max()):
                    raise ValueError("a root that is not that of its matrix")
            if last == "step" and int(tensor) != float(tensor):
                raise ValueError(f"{name} {float(tensor)}")
        acted, observed = check_counter("acted", acted), check_counter("observed", observed)
        for name, value in own.items():
            value.detach().copy_(tensors[name])
        self.acted, self.observed = acted, observed

    def __getstate__(self) -> dict[str, Any]:
        """A copy of all but the locks, as of a moment between two rounds of learning."""
        with self._rounds, self._turns:  # a decision exchanges weights of the network for drawn ones
            state = {name: value for name, value in self.__dict__.items() if not isinstance(value, Turns)}
            return copy.deepcopy(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_turns()

    def _random(self, count: int) -> torch.Generator:
        """Decisions have even numbers, observations odd ones."""
        return torch.Generator().manual_seed(((self.seed + 1) * _STRIDE**2 + count) % 2**64)

    def _check_alone(self, name: str) -> None:
        if self.replicas > 1:
            raise ValueError(f"This agent is {self.replicas} replicas: use {name}_all.")

    def _check_contexts(self, contexts: Tensor | Sequence[Any]) -> Tensor:
        owner = type(self).__name__
        rows = [as_numbers(context, torch.float32) for context in check_list(owner, contexts=contexts)]
        for context, row in zip(contexts, rows, strict=True):
            if row.shape != (self.features,):
                raise invalid("context", owner, f"a vector of {self.features} numbers", context)
            check_finite("context", owner, row)
            if bool((row.abs() > _LARGEST_FEATURE).any()):
                constraint = (
                    f"of numbers in [-{_LARGEST_FEATURE:g}, {_LARGEST_FEATURE:g}]; scale the features to about 1"
                )
                raise invalid("context", owner, constraint, Described(f"one of {float(row.abs().max()):g}"))
        if len(rows) != self.replicas:
            raise invalid("contexts", owner, f"one for each of {self.replicas} replicas", len(rows))
        return torch.stack(rows)


class Uniform(Agent):
    """Acts at random and learns nothing."""

    def _choose(self, contexts: Tensor) -> list[int]:  # noqa: ARG002
        return torch.randint(self.actions, (self.replicas,), generator=self._random(2 * self.acted)).tolist()

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        pass

    def _tensors(self) -> dict[str, Tensor]:
        return {}


@dataclass(eq=False, repr=False, kw_only=True)
class LinearThompson(Agent):
    """Thompson sampling on a Bayesian linear model of each action's reward, with the exact posterior.

    Weights and noise have a normal-inverse-gamma prior: sigma^2 ~ IG(a, b), w ~ N(0, sigma^2 / precision). The
    arguments besides those of :class:`Agent`:

    Args:
        precision: Of the weights, in units of the noise's.
        a: Of the prior of the noise.
        b: Of the prior of the noise.
    """

    precision: float = 0.25
    a: float = 6.0
    b: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(check_positive("LinearThompson", precision=self.precision, a=self.a, b=self.b))
        each, size = (self.replicas, self.actions), self.features + 1  # and a constant
        # The precision matrix of w, its square root, X^T y, y^T y and how many y.
        self._matrix = (self.precision * torch.eye(size, dtype=torch.float64)).repeat(*each, 1, 1)
        self._root = torch.linalg.cholesky(self._matrix)
        self._moment = torch.zeros(*each, size, dtype=torch.float64)
        self._square = torch.zeros(each, dtype=torch.float64)
        self._count = torch.zeros_like(self._square)

    def _choose(self, contexts: Tensor) -> list[int]:
        random = self._random(2 * self.acted)
        mean = torch.cholesky_solve(self._moment[..., None], self._root)
        left = (self._moment[..., None, :] @ mean)[..., 0, 0]
        scale = self.b + 0.5 * (self._square - left).clamp(min=0)
        numbers = np.random.Generator(np.random.Philox(int(torch.randint(2**62, (), generator=random))))
        gamma = torch.from_numpy(numbers.standard_gamma(self.a + 0.5 * self._count.numpy()))
        spread = (scale / gamma).sqrt()
        noise = torch.randn(mean.shape, dtype=torch.float64, generator=random)
        # The precision is L L^T: L^-T z has its inverse as covariance.
        weights = mean + spread[..., None, None] * torch.linalg.solve_triangular(self._root.mT, noise, upper=True)
        values = (weights[..., 0] * F.pad(contexts.double(), (0, 1), value=1.0)[:, None]).sum(-1)
        return [int(action) for action in values.argmax(-1)]

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        x, rows = F.pad(contexts.double(), (0, 1), value=1.0), torch.arange(self.replicas)
        matrix = self._matrix[rows, actions] + x[:, :, None] * x[:, None, :]
        root, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed.any()):  # nothing has changed yet
            constraint = "such that the precision of the weights has a root; scale the features to about 1"
            raise invalid("context", "LinearThompson", constraint, Described(f"numbers up to {float(x.abs().max()):g}"))
        self._matrix[rows, actions], self._root[rows, actions] = matrix, root
        self._moment[rows, actions] += x * rewards[:, None]
        self._square[rows, actions] += rewards**2
        self._count[rows, actions] += 1

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, f"_{name}") for name in ("matrix", "root", "moment", "square", "count")}


def _described(value: Any) -> Any:
    """An argument as far as JSON can say it."""
    if isinstance(value, Prior):
        return priors.describe(value)
    return likelihoods.describe(value) if isinstance(value, Likelihood) else value


def as_numbers(values: Any, dtype: torch.dtype) -> Tensor:
    """Values as a tensor; an empty matrix, which nobody asks for, if they are no numbers."""
    try:
        return torch.as_tensor(values, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return torch.empty(0, 0)
