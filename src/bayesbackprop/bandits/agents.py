"""Agents for contextual bandits (section 4 of the paper).

``action = agent.act(context)``; when and if the reward is known, ``agent.observe(context, action, reward)``. Everything
random is a pure function of the seed and of how often the agent has acted and observed: an agent that was saved and
loaded goes on as if it had not been.

An agent can be several: ``replicas`` independent ones of the same kind that act side by side in their own environments,
as one batch of networks, which is how the experiments run their seeds.
"""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesbackprop import priors
from bayesbackprop._errors import (
    Described,
    check_count,
    check_positive,
    check_probability,
    invalid,
    tensor_shape,
)
from bayesbackprop._files import read, write
from bayesbackprop.bandits.environments import check_action
from bayesbackprop.bandits.network import Encoding, RewardNetwork
from bayesbackprop.likelihoods import Gaussian
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.priors import Prior, ScaleMixture

# Seeds of decisions and observations must not meet those of neighbouring agents.
_STRIDE = 1_000_003

# Of a reward: squares of larger ones, and of their gradients, are not finite in single precision.
_LARGEST = 1e15


class Agent(ABC):
    """Chooses actions and learns from rewards.

    Args:
        features: The width of a context.
        actions: How many there are.
        replicas: How many independent agents; above 1, use :meth:`act_all` and :meth:`observe_all`.
        seed: Of everything random.
    """

    def __init__(self, features: int, actions: int, *, replicas: int = 1, seed: int = 0) -> None:
        check_count(type(self).__name__, features=features, actions=actions, replicas=replicas)
        check_count(type(self).__name__, least=0, seed=seed)
        self.features, self.actions, self.replicas, self.seed = features, actions, replicas, seed
        self.acted = self.observed = 0

    # --- one agent ---------------------------------------------------------------------------------------------------

    def act(self, context: Tensor | Sequence[float]) -> int:
        """The action to take in ``context``, ``[features]``."""
        self._check_alone("act")
        return self.act_all([context])[0]

    def observe(self, context: Tensor | Sequence[float], action: int, reward: float) -> None:
        """Learn that ``action`` in ``context`` gave ``reward``: at once or later, in any order; or never."""
        self._check_alone("observe")
        self.observe_all([context], [action], [reward])

    # --- several side by side ----------------------------------------------------------------------------------------

    def act_all(self, contexts: Tensor | Sequence[Any]) -> list[int]:
        """The action of each replica in its context, ``[replicas, features]``."""
        chosen = self._choose(self._check_contexts(contexts))
        self.acted += 1
        return chosen

    def observe_all(
        self, contexts: Tensor | Sequence[Any], actions: Sequence[int], rewards: Sequence[float] | Tensor
    ) -> None:
        """Learn the reward of each replica."""
        xs = self._check_contexts(contexts)
        if len(actions) != self.replicas or len(rewards) != self.replicas:
            got = Described(f"{len(actions)} actions and {len(rewards)} rewards")
            raise invalid("actions", type(self).__name__, f"one, with one reward, for each of {self.replicas}", got)
        for action in actions:
            check_action(type(self).__name__, action, self.actions)
        gains = _numbers(rewards, torch.float64)
        if gains is None or gains.shape != (self.replicas,) or not bool((gains.abs() <= _LARGEST).all()):
            constraint = f"a number in [-{_LARGEST:g}, {_LARGEST:g}]; leave out what is not known"
            raise invalid("reward", type(self).__name__, constraint, rewards if self.replicas > 1 else rewards[0])
        self._learn(xs, torch.tensor([int(action) for action in actions]), gains)
        self.observed += 1

    @abstractmethod
    def _choose(self, contexts: Tensor) -> list[int]:
        """The actions in ``contexts``, ``[replicas, features]``."""

    @abstractmethod
    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Take in one observation of each replica."""

    # --- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that the agent is and knows to ``path``, atomically."""
        write(path, "agent", self.tensors(), {"agent": type(self).__name__, **self.described()})

    def described(self) -> dict[str, Any]:
        """The arguments that make an agent like this one, as far as JSON can say them, and how far it is."""
        arguments = {
            name: priors.describe(value) if isinstance(value, Prior) else value
            for name in inspect.signature(type(self).__init__).parameters
            if name != "self"
            for value in [getattr(self, name)]
        }
        return {"arguments": arguments, "acted": self.acted, "observed": self.observed}

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All that changes, by name, to be written."""

    def restore(self, tensors: dict[str, Tensor], acted: int, observed: int) -> None:
        """Become the agent whose :meth:`tensors` these were."""
        own = self.tensors()
        expected, found = ({name: (t.shape, t.dtype) for name, t in each.items()} for each in (own, tensors))
        if found != expected:
            raise invalid("tensors", type(self).__name__, "those of an agent like this one", Described("others"))
        check_count(type(self).__name__, least=0, acted=acted, observed=observed)
        for name, value in own.items():
            value.detach().copy_(tensors[name])
        self.acted, self.observed = acted, observed

    # --- what the kinds share ----------------------------------------------------------------------------------------

    def _random(self, count: int) -> torch.Generator:
        """Decisions have even numbers, observations odd ones."""
        return torch.Generator().manual_seed(((self.seed + 1) * _STRIDE**2 + count) % 2**64)

    def _check_alone(self, name: str) -> None:
        if self.replicas > 1:
            raise ValueError(f"This agent is {self.replicas} replicas: use {name}_all.")

    def _check_contexts(self, contexts: Tensor | Sequence[Any]) -> Tensor:
        rows: list[Tensor] = []
        for context in contexts:
            row = _numbers(context, torch.float32)
            if row is None or row.shape != (self.features,):
                got = context if row is None else tensor_shape(row)
                raise invalid("context", type(self).__name__, f"a vector of {self.features} numbers", got)
            if not bool(row.isfinite().all()):
                raise invalid("context", type(self).__name__, "finite", Described("NaN or inf in it"))
            rows.append(row)
        if len(rows) != self.replicas:
            raise invalid("contexts", type(self).__name__, f"one for each of {self.replicas} replicas", len(rows))
        return torch.stack(rows)


class Uniform(Agent):
    """Acts at random and learns nothing."""

    def _choose(self, contexts: Tensor) -> list[int]:  # noqa: ARG002
        return torch.randint(self.actions, (self.replicas,), generator=self._random(2 * self.acted)).tolist()

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        pass

    def tensors(self) -> dict[str, Tensor]:
        return {}


class LinearThompson(Agent):
    """Thompson sampling on a Bayesian linear model of each action's reward, with the exact posterior.

    Weights and noise have a normal-inverse-gamma prior: sigma^2 ~ IG(a, b), w ~ N(0, sigma^2 / precision).

    Args:
        features: The width of a context.
        actions: How many there are.
        precision: Of the weights, in units of the noise's.
        a: Of the prior of the noise.
        b: Of the prior of the noise.
        replicas: How many independent agents.
        seed: Of everything random.
    """

    def __init__(
        self,
        features: int,
        actions: int,
        *,
        precision: float = 0.25,
        a: float = 6.0,
        b: float = 6.0,
        replicas: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(features, actions, replicas=replicas, seed=seed)
        check_positive("LinearThompson", precision=precision, a=a, b=b)
        self.precision, self.a, self.b = precision, a, b
        each = (replicas, actions)
        size = features + 1  # and a constant
        # The precision matrix of w, its square root, X^T y, y^T y and how many y.
        self._matrix = (precision * torch.eye(size, dtype=torch.float64)).repeat(*each, 1, 1)
        self._root = torch.linalg.cholesky(self._matrix)
        self._moment = torch.zeros(*each, size, dtype=torch.float64)
        self._square = torch.zeros(*each, dtype=torch.float64)
        self._count = torch.zeros(*each, dtype=torch.float64)

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
        values = (weights[..., 0] * _with_one(contexts)[:, None]).sum(-1)
        return [int(action) for action in values.argmax(-1)]

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        x, rows = _with_one(contexts), torch.arange(self.replicas)
        self._matrix[rows, actions] += x[:, :, None] * x[:, None, :]
        self._root[rows, actions] = torch.linalg.cholesky(self._matrix[rows, actions])
        self._moment[rows, actions] += x * rewards[:, None]
        self._square[rows, actions] += rewards**2
        self._count[rows, actions] += 1

    def tensors(self) -> dict[str, Tensor]:
        names = ("matrix", "root", "moment", "square", "count")
        return {name: getattr(self, f"_{name}") for name in names}


class _Neural(Agent):
    """A network of expected rewards, and the memory it learns from."""

    def __init__(
        self,
        features: int,
        actions: int,
        hidden: Sequence[int],
        encoding: Encoding,
        scale: float,
        updates: int,
        batch_size: int,
        memory: int,
        learning_rate: float,
        halving: int | None,
        replicas: int,
        seed: int,
    ) -> None:
        super().__init__(features, actions, replicas=replicas, seed=seed)
        owner = type(self).__name__
        check_count(owner, updates=updates, batch_size=batch_size, memory=memory)
        if halving is not None:
            check_count(owner, halving=halving)
        check_positive(owner, scale=scale, learning_rate=learning_rate)
        if encoding not in ("input", "output"):
            raise invalid("encoding", owner, "'input' or 'output'", encoding)
        for width in hidden:
            check_count(owner, hidden=width)
        self.hidden, self.encoding, self.scale = list(hidden), encoding, scale
        self.updates, self.batch_size, self.memory, self.learning_rate = updates, batch_size, memory, learning_rate
        self.halving = halving
        self.net = RewardNetwork(features, actions, hidden, encoding, replicas, seed)
        # The last observations, the newest in place of the oldest.
        self._contexts = torch.zeros(memory, replicas, features)
        self._actions = torch.zeros(memory, replicas, dtype=torch.int64)
        self._rewards = torch.zeros(memory, replicas)
        self._every_action = torch.arange(actions)[:, None].expand(actions, replicas)
        self._optimiser: torch.optim.Optimizer

    @abstractmethod
    def _cost(self, contexts: Tensor, actions: Tensor, rewards: Tensor, remembered: int) -> Any:
        """What an update minimises, with ``backward()``, on a minibatch of all that is remembered."""

    @abstractmethod
    def _rates(self) -> list[float]:
        """The learning rates of the optimiser's groups at the start."""

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        place = self.observed % self.memory
        self._contexts[place], self._actions[place] = contexts, actions
        self._rewards[place] = rewards / self.scale
        remembered = min(self.observed + 1, self.memory)
        size = (self.updates, min(self.batch_size, remembered), self.replicas)
        chosen = torch.randint(remembered, size, generator=self._random(2 * self.observed + 1))
        replica = torch.arange(self.replicas)
        for group, rate in zip(self._optimiser.param_groups, self._rates(), strict=True):
            group["lr"] = rate if self.halving is None else rate / (1 + self.observed / self.halving)
        # All minibatches are picked at once, which is quicker than one by one.
        picked = (part[chosen, replica] for part in (self._contexts, self._actions, self._rewards))
        for some_contexts, some_actions, some_rewards in zip(*picked, strict=True):
            self._optimiser.zero_grad()
            self._cost(some_contexts, some_actions, some_rewards, remembered).backward()
            self._optimiser.step()

    def _values(self, network: Callable[[Tensor, Tensor], Tensor], contexts: Tensor) -> Tensor:
        """The expected reward of every action, ``[actions, replicas]``."""
        return network(contexts.expand(self.actions, -1, -1), self._every_action)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"contexts": self._contexts, "actions": self._actions, "rewards": self._rewards}
        parameters = [p for group in self._optimiser.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            tensors[f"parameter.{number}"] = parameter.detach()
            slots = self._optimiser.state[parameter]
            if not slots:  # as Adam itself would begin
                slots["step"] = torch.zeros(())
                slots["exp_avg"], slots["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            tensors |= {f"optimiser.{number}.{name}": value for name, value in slots.items()}
        return tensors


class ThompsonSampling(_Neural):
    """Thompson sampling on a Bayes by Backprop network of the expected reward.

    Each decision draws networks from the posterior and takes the action that is best on their average.

    Args:
        features: The width of a context.
        actions: How many there are.
        prior: On the weights.
        sigma: Initial standard deviation of the weights.
        noise: The standard deviation of a reward around its expectation, in units of ``scale``.
        draws: Networks to average at a decision: the more, the less it explores.
        temperature: A factor on the complexity cost; 1 is Bayes.
        hidden: The widths of the hidden layers.
        encoding: Whether the action is part of the ``"input"``, as in the paper, or there is one ``"output"`` for each.
        scale: The size of a large reward: the network learns reward / scale.
        updates: Minibatches to learn from after each observation.
        batch_size: Observations of a minibatch.
        memory: How many observations are kept; the complexity cost is shared among those there are.
        learning_rate: Of Adam, at the start.
        halving: After so many observations the learning rate is a half, after twice as many a third, and so on: so that
            what was learnt from observations that have left the memory is not lost to newer ones. None: it stays.
        rho_rate: The learning rate of rho, as a multiple of that of mu.
        replicas: How many independent agents.
        seed: Of everything random.

    Examples:
        >>> agent = ThompsonSampling(features=3, actions=2, updates=4)
        >>> action = agent.act([0.0, 1.0, 0.0])
        >>> agent.observe([0.0, 1.0, 0.0], action, reward=1.0)
    """

    def __init__(
        self,
        features: int,
        actions: int,
        *,
        prior: Prior | None = None,
        sigma: float = 0.02,
        noise: float = 0.5,
        draws: int = 1,
        temperature: float = 1.0,
        hidden: Sequence[int] = (100, 100),
        encoding: Encoding = "input",
        scale: float = 1.0,
        updates: int = 64,
        batch_size: int = 64,
        memory: int = 4096,
        learning_rate: float = 1e-3,
        halving: int | None = None,
        rho_rate: float = 1.0,
        replicas: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            features,
            actions,
            hidden,
            encoding,
            scale,
            updates,
            batch_size,
            memory,
            learning_rate,
            halving,
            replicas,
            seed,
        )
        check_count("ThompsonSampling", draws=draws)
        check_positive("ThompsonSampling", noise=noise, rho_rate=rho_rate)
        self.prior, self.sigma, self.noise, self.draws = prior or ScaleMixture(), sigma, noise, draws
        self.temperature, self.rho_rate = temperature, rho_rate
        self.model = Bayesian(self.net, Gaussian(noise), self.prior, sigma=sigma, seed=seed)
        self._objective = FreeEnergy(self.model, n=memory, temperature=temperature)
        groups = [{"params": list(part.parameters())} for part in (self.net, self.model.rho)]
        self._optimiser = torch.optim.Adam(groups, fused=True)

    def _rates(self) -> list[float]:
        return [self.learning_rate, self.learning_rate * self.rho_rate]

    def _choose(self, contexts: Tensor) -> list[int]:
        with torch.no_grad():
            first = self.acted * self.draws
            drawn = [self._values(self.model.draw(0, first + k), contexts) for k in range(self.draws)]
            return torch.stack(drawn).mean(0).argmax(0).tolist()

    def _cost(self, contexts: Tensor, actions: Tensor, rewards: Tensor, remembered: int) -> Any:
        return self._objective((contexts, actions), rewards, n=remembered)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "step": self._objective.step}


class EpsilonGreedy(_Neural):
    """Acts at random now and then, else as is best on a plain network that is trained on the squared error.

    Args:
        features: The width of a context.
        actions: How many there are.
        epsilon: How often to act at random; one number, or one for each replica.
        hidden: The widths of the hidden layers.
        encoding: Whether the action is part of the ``"input"``, as in the paper, or there is one ``"output"`` for each.
        scale: The size of a large reward: the network learns reward / scale.
        updates: Minibatches to learn from after each observation.
        batch_size: Observations of a minibatch.
        memory: How many observations are kept.
        learning_rate: Of Adam, at the start.
        halving: After so many observations the learning rate is a half, after twice as many a third, and so on: so that
            what was learnt from observations that have left the memory is not lost to newer ones. None: it stays.
        replicas: How many independent agents.
        seed: Of everything random.
    """

    def __init__(
        self,
        features: int,
        actions: int,
        *,
        epsilon: float | Sequence[float] = 0.05,
        hidden: Sequence[int] = (100, 100),
        encoding: Encoding = "input",
        scale: float = 1.0,
        updates: int = 64,
        batch_size: int = 64,
        memory: int = 4096,
        learning_rate: float = 1e-3,
        halving: int | None = None,
        replicas: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            features,
            actions,
            hidden,
            encoding,
            scale,
            updates,
            batch_size,
            memory,
            learning_rate,
            halving,
            replicas,
            seed,
        )
        self.epsilon = [epsilon] * replicas if isinstance(epsilon, (int, float)) else list(epsilon)
        for each in self.epsilon:
            check_probability("EpsilonGreedy", epsilon=each)
        if len(self.epsilon) != replicas:
            raise invalid("epsilon", "EpsilonGreedy", f"one number, or {replicas}", epsilon)
        self._optimiser = torch.optim.Adam(self.net.parameters(), fused=True)

    def _rates(self) -> list[float]:
        return [self.learning_rate]

    def _choose(self, contexts: Tensor) -> list[int]:
        random = self._random(2 * self.acted)
        explores = torch.rand(self.replicas, generator=random) < torch.tensor(self.epsilon)
        anything = torch.randint(self.actions, (self.replicas,), generator=random)
        with torch.no_grad():
            return torch.where(explores, anything, self._values(self.net, contexts).argmax(0)).tolist()

    def _cost(self, contexts: Tensor, actions: Tensor, rewards: Tensor, remembered: int) -> Any:  # noqa: ARG002
        return (self.net(contexts, actions) - rewards).square().sum(1).mean()


AGENTS: dict[str, type[Agent]] = {
    kind.__name__: kind for kind in (Uniform, LinearThompson, ThompsonSampling, EpsilonGreedy)
}


def load(path: str | os.PathLike[str], *, prior: Prior | None = None) -> Agent:
    """The agent in a file that ``agent.save`` wrote; with its ``prior``, if that is of the user's own."""
    file = read(path, "agent", "bandits.load")
    with file.understanding():
        kind, arguments = AGENTS[file.contents["agent"]], dict(file.contents["arguments"])
        if "prior" in arguments:
            arguments["prior"] = prior or priors.from_description(arguments["prior"])
    if "prior" in arguments and arguments["prior"] is None:
        raise invalid("prior", "bandits.load", "given, since the file has one of your own", None)
    with file.understanding():
        agent = kind(**arguments)
        agent.restore(file.tensors, file.contents["acted"], file.contents["observed"])
    return agent


def _numbers(values: Any, dtype: torch.dtype) -> Tensor | None:
    """Values as a tensor; None if they are no numbers."""
    try:
        return torch.as_tensor(values, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError):
        return None


def _with_one(contexts: Tensor) -> Tensor:
    return torch.cat([contexts.double(), torch.ones(len(contexts), 1, dtype=torch.float64)], dim=1)
