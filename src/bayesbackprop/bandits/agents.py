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
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop import priors
from bayesbackprop._errors import (
    Described,
    check_choice,
    check_count,
    check_finite,
    check_list,
    check_not_negative,
    check_positive,
    check_probability,
    check_seed,
    check_type,
    invalid,
)
from bayesbackprop._files import check_counter, check_same, read, write
from bayesbackprop._gradients import check_gradients
from bayesbackprop.bandits._turns import Turns
from bayesbackprop.bandits.environments import check_action
from bayesbackprop.bandits.network import Encoding, RewardNetwork
from bayesbackprop.likelihoods import Gaussian
from bayesbackprop.model import Bayesian
from bayesbackprop.noise import WORDS
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.priors import Prior, ScaleMixture

# Seeds of decisions and observations must not meet those of neighbouring agents.
_STRIDE = 1_000_003

# What counts or is a sum of squares.
_NEVER_NEGATIVE = ("actions", "count", "exp_avg_sq", "square", "step")

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
        gains = _numbers(rewards, torch.float64)
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
        arguments = {name: priors.describe(v) if isinstance(v, Prior) else v for name, v in values.items()}
        return {"arguments": arguments, "acted": self.acted, "observed": self.observed}

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
        rows = [_numbers(context, torch.float32) for context in check_list(owner, contexts=contexts)]
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


@dataclass(eq=False, repr=False, kw_only=True)
class NeuralAgent(Agent):
    """A network of expected rewards, and the memory it learns from: what the neural agents share.

    The arguments besides those of :class:`Agent`:

    Args:
        hidden: The widths of the hidden layers.
        encoding: Whether the action is part of the ``"input"``, as in the paper, or there is one ``"output"`` for each.
        scale: The size of a large reward: the network learns reward / scale.
        updates: Minibatches to learn from after each observation.
        batch_size: Observations of a minibatch.
        memory: How many observations are kept; the complexity cost, if any, is shared among those there are.
        learning_rate: Of Adam, at the start.
        halving: After so many observations the learning rate is a half, after twice as many a third, and so on: so that
            what was learnt from observations that have left the memory is not lost to newer ones. None: it stays.
    """

    hidden: Sequence[int] = (100, 100)
    encoding: Encoding = "input"
    scale: float = 1.0
    updates: int = 64
    batch_size: int = 64
    memory: int = 4096
    learning_rate: float = 1e-3
    halving: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        counts = check_count(owner, updates=self.updates, batch_size=self.batch_size, memory=self.memory)
        halving = {} if self.halving is None else check_count(owner, halving=self.halving)
        numbers = check_positive(owner, scale=self.scale, learning_rate=self.learning_rate)
        vars(self).update({**counts, **halving, **numbers})
        check_choice(owner, ("input", "output"), encoding=self.encoding)
        self.hidden = [check_count(owner, hidden=width)["hidden"] for width in check_list(owner, hidden=self.hidden)]
        self.net = RewardNetwork(self.features, self.actions, self.hidden, self.encoding, self.replicas, self.seed)
        # The last observations, the newest in place of the oldest.
        self._contexts = torch.zeros(self.memory, self.replicas, self.features)
        self._actions = torch.zeros(self.memory, self.replicas, dtype=torch.int64)
        self._rewards = torch.zeros(self.memory, self.replicas)
        self._every_action = torch.arange(self.actions)[:, None].expand(-1, self.replicas)
        self._optimiser: torch.optim.Optimizer

    @abstractmethod
    def _cost(self, contexts: Tensor, actions: Tensor, rewards: Tensor, remembered: int) -> Any:
        """What an update minimises, with ``backward()``, on a minibatch of all that is remembered."""

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        place = self.observed % self.memory
        self._contexts[place], self._actions[place] = contexts, actions
        self._rewards[place] = rewards / self.scale
        remembered = min(self.observed + 1, self.memory)
        size = (self.updates, min(self.batch_size, remembered), self.replicas)
        chosen = torch.randint(remembered, size, generator=self._random(2 * self.observed + 1))
        for group in self._optimiser.param_groups:
            group["lr"] = group["initial_lr"] / (1 + self.observed / (self.halving or math.inf))
        # All minibatches are picked at once, which is quicker than one by one.
        picked = (part[chosen, torch.arange(self.replicas)] for part in (self._contexts, self._actions, self._rewards))
        for some_contexts, some_actions, some_rewards in zip(*picked, strict=True):
            self._turns.give_way()
            self._optimiser.zero_grad()
            self._cost(some_contexts, some_actions, some_rewards, remembered).backward()
            check_gradients(getattr(self, "_objective", self.net), self._optimiser)
            self._optimiser.step()

    def _values(self, network: Callable[[Tensor, Tensor], Tensor], contexts: Tensor) -> Tensor:
        """The expected reward of every action, ``[actions, replicas]``."""
        return network(contexts.expand(self.actions, -1, -1), self._every_action)

    def _tensors(self) -> dict[str, Tensor]:
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


@dataclass(eq=False, repr=False, kw_only=True)
class ThompsonSampling(NeuralAgent):
    """Thompson sampling on a Bayes by Backprop network of the expected reward.

    Each decision draws networks from the posterior and takes the action that is best on their average. The arguments
    besides those of :class:`NeuralAgent`:

    Args:
        prior: On the weights; None for the paper's scale mixture.
        sigma: Initial standard deviation of the weights.
        noise: The standard deviation of a reward around its expectation, in units of ``scale``.
        draws: Networks to average at a decision: the more, the less it explores.
        temperature: A factor on the complexity cost; 1 is Bayes.
        rho_rate: The learning rate of rho, as a multiple of that of mu.

    Examples:
        >>> agent = ThompsonSampling(features=3, actions=2, updates=4)
        >>> action = agent.act([0.0, 1.0, 0.0])
        >>> agent.observe([0.0, 1.0, 0.0], action, reward=1.0)
    """

    prior: Prior | None = None
    sigma: float = 0.02
    noise: float = 0.5
    draws: int = 1
    temperature: float = 1.0
    rho_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = "ThompsonSampling"
        vars(self).update(check_count(owner, below=WORDS, draws=self.draws))
        vars(self).update(check_positive(owner, noise=self.noise, rho_rate=self.rho_rate, sigma=self.sigma))
        vars(self).update(check_not_negative(owner, temperature=self.temperature))
        self.prior = ScaleMixture() if self.prior is None else self.prior
        check_type(owner, Prior, "None, or a Prior such as ScaleMixture()", prior=self.prior)
        self.model = Bayesian(self.net, Gaussian(self.noise), self.prior, sigma=self.sigma, seed=self.seed)
        # An agent learns alone, whatever other processes do.
        self._objective = FreeEnergy(self.model, n=self.memory, temperature=self.temperature, own_averaging=True)
        rate_of_rho = self.learning_rate * self.rho_rate
        self._optimiser = _adam((self.net, self.learning_rate), (self.model.rho, rate_of_rho))

    def _choose(self, contexts: Tensor) -> list[int]:
        with torch.no_grad():
            first = self.acted * self.draws
            drawn = [self._values(self.model.draw(0, first + k), contexts) for k in range(self.draws)]
            return torch.stack(drawn).mean(0).argmax(0).tolist()

    def _cost(self, contexts: Tensor, actions: Tensor, rewards: Tensor, remembered: int) -> Any:
        return self._objective((contexts, actions), rewards, n=remembered)

    def _tensors(self) -> dict[str, Tensor]:
        return {**super()._tensors(), "step": self._objective.step}


@dataclass(eq=False, repr=False, kw_only=True)
class EpsilonGreedy(NeuralAgent):
    """Acts at random now and then, else as is best on a plain network that is trained on the squared error.

    The argument besides those of :class:`NeuralAgent`:

    Args:
        epsilon: How often to act at random; one number, or one for each replica.
    """

    epsilon: float | Sequence[float] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        one = isinstance(self.epsilon, Real)
        given = [self.epsilon] * self.replicas if one else check_list("EpsilonGreedy", epsilon=self.epsilon)
        each = [check_probability("EpsilonGreedy", epsilon=epsilon)["epsilon"] for epsilon in given]
        if len(each) != self.replicas:
            raise invalid("epsilon", "EpsilonGreedy", f"one number, or {self.replicas}", self.epsilon)
        self.epsilon = each
        self._optimiser = _adam((self.net, self.learning_rate))

    def _choose(self, contexts: Tensor) -> list[int]:
        random = self._random(2 * self.acted)
        explores = torch.rand(self.replicas, generator=random) < torch.tensor(self.epsilon)
        anything = torch.randint(self.actions, (self.replicas,), generator=random)
        with torch.no_grad():
            return torch.where(explores, anything, self._values(self.net, contexts).argmax(0)).tolist()

    def _cost(self, contexts: Tensor, actions: Tensor, rewards: Tensor, remembered: int) -> Any:  # noqa: ARG002
        return (self.net(contexts, actions) - rewards).square().sum(1).mean()


_KINDS: dict[str, type[Agent]] = {
    kind.__name__: kind for kind in (Uniform, LinearThompson, ThompsonSampling, EpsilonGreedy)
}


def load(path: str | os.PathLike[str], *, prior: Prior | None = None) -> Agent:
    """The agent in a file that ``agent.save`` wrote; with its ``prior``, if that is of the user's own."""
    check_type("bandits.load", Prior | None, "None, or the Prior of the agent", prior=prior)
    file = read(path, "agent", "bandits.load")
    with file.understanding():
        kind, arguments = _KINDS[file.contents["agent"]], dict(file.contents["arguments"])
        if arguments.keys() != inspect.signature(kind).parameters.keys():
            raise ValueError(f"arguments {sorted(arguments)}")
        if "prior" in arguments:
            arguments["prior"] = prior or priors.from_description(arguments["prior"])
        _check_sizes(kind, arguments, file.tensors)
    if "prior" in arguments and arguments["prior"] is None:
        raise invalid("prior", "bandits.load", "given, since the file has one of your own", None)
    with file.understanding():
        agent = kind(**arguments)
        agent.restore(file.tensors, file.contents["acted"], file.contents["observed"])
    return agent


def _check_sizes(kind: type[Agent], arguments: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse sizes that the tensors of a file do not have, before such an agent is made, and absurd numbers."""
    for name, value in arguments.items():
        most = 2**53 if isinstance(value, int) else 1e30
        if name != "seed" and isinstance(value, int | float) and value and not 1e-30 < abs(value) < most:
            raise ValueError(f"{name} {value!r:.80}")
    each = [arguments[name] for name in ("features", "actions", "replicas")]
    claimed, (features, actions, replicas) = list(each), each
    expected: dict[str, list[int]] = {}
    if kind is LinearThompson:
        expected["matrix"] = [replicas, actions, features + 1, features + 1]
    if issubclass(kind, NeuralAgent):
        hidden, memory = list(arguments["hidden"]), arguments["memory"]
        claimed += [*hidden, memory]
        is_input = arguments["encoding"] == "input"
        sizes = [features + actions if is_input else features, *hidden, 1 if is_input else actions]
        expected = {f"parameter.{2 * n}": [replicas, *reversed(pair)] for n, pair in enumerate(pairwise(sizes))}
        expected["contexts"] = [memory, replicas, features]
    if any(type(number) is not int or number < 1 for number in claimed):
        raise ValueError(f"sizes {claimed!r:.80}")
    if any(list(tensors[name].shape) != shape for name, shape in expected.items()):
        raise ValueError(f"sizes {claimed!r:.80} that its tensors do not have")


def _adam(*parts: tuple[nn.Module, float]) -> torch.optim.Adam:
    """The optimiser of modules with their learning rates at the start."""
    return torch.optim.Adam([{"params": list(m.parameters()), "initial_lr": rate} for m, rate in parts], fused=True)


def _numbers(values: Any, dtype: torch.dtype) -> Tensor:
    """Values as a tensor; an empty matrix, which nobody asks for, if they are no numbers."""
    try:
        return torch.as_tensor(values, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return torch.empty(0, 0)
