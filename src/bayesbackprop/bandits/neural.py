"""The neural agents: a network of rewards, the memory it learns from, and two ways to choose by it."""

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from bayesbackprop._errors import (
    INT64,
    Described,
    check_choice,
    check_count,
    check_finite,
    check_list,
    check_not_negative,
    check_positive,
    check_probability,
    check_type,
    invalid,
)
from bayesbackprop.bandits._changes import RECENT, Changes
from bayesbackprop.bandits._rates import falling, learns, rate
from bayesbackprop.bandits._regression import Regression, fits
from bayesbackprop.bandits._requests import LARGEST_REWARD, as_numbers
from bayesbackprop.bandits.agents import Agent
from bayesbackprop.bandits.decisions import Beliefs, Numbers, Requests, by_draws, frequencies
from bayesbackprop.bandits.network import EXPECTED, Encoding, LikelihoodCost, OfAction, Unknown, reward_network
from bayesbackprop.likelihoods import Bernoulli, Gaussian, Likelihood, NegativeBinomial, Poisson
from bayesbackprop.model import Bayesian
from bayesbackprop.noise import WORDS
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import Adam
from bayesbackprop.priors import Normal, Prior

# After so many rewards the scale that is found from them no longer falls: the better an agent, the more alike its
# rewards, and what was learnt in other units would have to be learnt again and again.
_SETTLED = 100

# A reward of so many times their size is more likely an error than news.
_WILD = 1000.0

# Of a log: how often each observation is learnt, and the fewest updates, since Adam goes by its rate at each. After a
# thousand observations at random, one after the other, decisions lost 0.131 on ten digits and 0.222 on a random
# network; after so many in one call 0.114 and 0.216, after half as many updates 0.128 and 0.345.
_PASSES, _FEWEST = 40, 2000
# Minibatches of it that are picked at a time.
_AT_A_TIME = 64


class _Whole(NamedTuple):
    """Rewards that are whole numbers from 0 on: the largest, and in words."""

    most: float
    text: str


_REWARDS: dict[type[Any], _Whole] = {
    Bernoulli: _Whole(1, "0 or 1"),
    Poisson: _Whole(math.inf, "a whole number from 0 on"),
    NegativeBinomial: _Whole(math.inf, "a whole number from 0 on"),
}


@dataclass(eq=False, repr=False, kw_only=True)
class NeuralAgent(Agent):
    """A network of rewards, and the memory it learns from: what the neural agents share.

    The arguments besides those of :class:`Agent`:

    Args:
        hidden: The widths of the hidden layers.
        encoding: Whether there is one ``"output"`` for each action, or the action is part of the ``"input"``, as in the
            paper.
        action_features: Numbers that say what each action is, ``[actions, numbers]``. With the encoding ``"input"``
            they stand for it beside the context: what was learnt of one action is known of those like it. None for one
            of as many as there are actions.
        likelihood: Of a reward in units of ``scale``: a ``Gaussian`` whose noise is fixed, learnt or per input, a
            ``Bernoulli`` for rewards of 0 and 1, a ``Poisson`` or a ``NegativeBinomial`` for counts. None: found from
            the rewards; a Bernoulli while all of them are 0 or 1, else a Gaussian with noise per input.
        scale: The size of a large reward: the network learns reward / scale. None: found from the rewards, where they
            are numbers: the root of their mean square.
        updates: Minibatches to learn from after each observation.
        batch_size: Observations of a minibatch.
        memory: How many observations are kept; the complexity cost, if any, is shared among those there are.
        learning_rate: Of Adam, at the start.
        halving: After so many observations the learning rate is a half, after twice as many a third, and so on: so that
            what was learnt from observations that have left the memory is not lost to newer ones. From a tenth on it
            stays, and updates follow fewer and fewer observations, as if it fell. None: it stays as at the start.
        alarm: When recent rewards are predicted worse than those before by so many standard errors, the world has
            changed: the agent forgets what it remembers, and learns and explores as at the start. None: never.
    """

    hidden: Sequence[int] = (100, 100)
    encoding: Encoding = "output"
    action_features: Sequence[Sequence[float]] | None = None
    likelihood: Likelihood | None = None
    scale: float | None = None
    updates: int = 4
    batch_size: int = 64
    memory: int = 65536
    learning_rate: float = 1e-3
    halving: int | None = None
    alarm: float | None = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        counts = check_count(owner, updates=self.updates, batch_size=self.batch_size, memory=self.memory)
        halving = {} if self.halving is None else check_count(owner, halving=self.halving)
        numbers = check_positive(owner, learning_rate=self.learning_rate)
        scale = {} if self.scale is None else check_positive(owner, scale=self.scale)
        alarm = {} if self.alarm is None else check_positive(owner, alarm=self.alarm)
        vars(self).update({**counts, **halving, **numbers, **scale, **alarm})
        check_choice(owner, ("input", "output"), encoding=self.encoding)
        self.hidden = [check_count(owner, hidden=width)["hidden"] for width in check_list(owner, hidden=self.hidden)]
        self._check_likelihood(owner)
        self._codes = self._checked_codes(owner)  # of the actions in an input
        # It learns for this agent alone.
        likelihood = Unknown(self.replicas) if self.likelihood is None else copy.deepcopy(self.likelihood)
        self._likelihood = OfAction(likelihood, 1 if self.encoding == "input" else self.actions)
        self.net = reward_network(self._sizes(), self.replicas, self.seed)
        # The last observations, the newest in place of the oldest; rewards in units of a scale that is given.
        self._contexts = torch.zeros(self.memory, self.replicas, self.features + (self._numbers or 0))
        self._actions = torch.zeros(self.memory, self.replicas, dtype=torch.int64)
        self._rewards = torch.zeros(self.memory, self.replicas)
        # The sum of the squares of all rewards, and the scale that is found from it.
        self._finds_scale = self.scale is None and isinstance(likelihood, Gaussian | Unknown)
        self._square = torch.zeros(self.replicas, dtype=torch.float64)
        self._found_scale = torch.ones(self.replicas)
        # What was observed when the world last changed, and the test for that.
        self._began = torch.zeros(self.replicas, dtype=torch.int64)
        self._changes = None if self.alarm is None else Changes(self.replicas, self.alarm)
        self._every_action = torch.arange(self.actions)[:, None].expand(-1, self.replicas)
        self._optimiser: Adam

    def _check_likelihood(self, owner: str) -> None:
        given = self.likelihood
        if given is None:
            return
        if type(given) not in EXPECTED:
            known = ", ".join(kind.__name__ for kind in EXPECTED)
            raise invalid("likelihood", owner, f"None, or one of {known}", given)
        if self.replicas > 1 and any(True for _ in given.parameters()):
            constraint = "one without numbers that are learnt, which replicas would share"
            raise invalid("likelihood", owner, constraint, given)

    def _checked_codes(self, owner: str) -> Tensor:
        given = self.action_features
        if given is None:
            return torch.eye(self.actions)
        codes = as_numbers(given, torch.float32)
        if codes.dim() != 2 or len(codes) != self.actions or not codes.shape[1]:
            raise invalid("action_features", owner, f"None, or numbers for each of {self.actions} actions", given)
        if self.encoding != "input":
            constraint = "None, unless with encoding='input' the action is part of the input"
            raise invalid("action_features", owner, constraint, Described(f"encoding={self.encoding!r}"))
        check_finite("action_features", owner, codes)
        self.action_features = codes.tolist()
        return codes

    def _sizes(self) -> list[int]:
        """The widths of the network, from its inputs to its outputs."""
        inputs = self.features + (self._codes.shape[1] if self.encoding == "input" else 0)
        return [inputs, *self.hidden, self._likelihood.numbers * self._likelihood.actions]

    @abstractmethod
    def _minimise(self, inputs: Tensor, targets: Tensor, remembered: int) -> Tensor:
        """Learn from a minibatch of all that is remembered; gives what it cost."""

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        self._remember(contexts, actions, rewards)
        rates = self._rates()
        if not max(rates):
            return
        parts = self._set_rates(rates)
        remembered, random = min(self.observed + 1, self.memory), self._random(2 * self.observed + 1)
        for inputs, targets in self._minibatches(self.updates, self.observed, random):
            self._give_way()
            self._update(inputs, targets, remembered, parts)

    def _minibatches(self, count: int, newest: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of ``count`` minibatches of what is remembered up to the observation ``newest``."""
        # Counted back from the newest, as far as the world is the present one.
        reach = (newest + 1 - self._began).clamp(max=self.memory)
        size = (count, min(self.batch_size, newest + 1, self.memory), self.replicas)
        back = torch.rand(size, dtype=torch.float64, generator=random).mul_(reach).long()
        chosen = (newest - back) % self.memory * self.replicas + torch.arange(self.replicas)
        # All minibatches are picked at once, and as rows of one matrix, which is quicker than one by one.
        contexts = self._contexts.flatten(0, 1).index_select(0, chosen.flatten()).unflatten(0, chosen.shape)
        picked = self._actions.take(chosen)
        inputs = self._inputs(contexts, picked)
        targets = self._targets(picked, self._rewards.take(chosen) / self._found_scale)
        return zip(inputs, targets, strict=True)

    def _learn_many(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Remember all, then learn as long as is worth it.

        One by one each observation would be followed by ``updates`` minibatches, and the first be learnt hundreds of
        times. Here the minibatches hold each of those remembered _PASSES times, or are _FEWEST if that is more; never
        more than one by one. The rate falls evenly from that of now to that after as many observations.
        """
        count, newest = len(actions), self.observed + len(actions) - 1
        self._remember_many(contexts, actions, rewards)
        remembered, random = min(newest + 1, self.memory), self._random(2 * self.observed + 1)
        passes = math.ceil(_PASSES * min(count, self.memory) / self.batch_size)
        steps = min(self.updates * count, max(_FEWEST, passes))
        first, last = (falling(float(n - self._began), self.halving) for n in (self.observed, newest))
        for start in range(0, steps, _AT_A_TIME):
            some = min(_AT_A_TIME, steps - start)
            for number, (inputs, targets) in enumerate(self._minibatches(some, newest, random), start):
                for group in self._optimiser.param_groups:
                    group["lr"] = group["initial_lr"] * (first + (last - first) * number / steps)
                self._give_way()
                self._update(inputs, targets, remembered, None)

    def _rates(self) -> list[float]:
        """The learning rate of each replica after this observation, as a part of the first; 0: it does not learn."""
        seen = [self.observed - began for began in self._began.tolist()]
        return [rate(n, self.halving) if learns(n, self.halving) else 0.0 for n in seen]

    def _set_rates(self, rates: Sequence[float]) -> Tensor | None:
        """Set the learning rate to the highest of these; gives each as a part of that, if not all are 1."""
        highest = max(rates)
        for group in self._optimiser.param_groups:
            group["lr"] = group["initial_lr"] * highest
        return None if min(rates) == highest else torch.tensor(rates, dtype=torch.float64) / highest

    def _update(self, inputs: Tensor, targets: Tensor, remembered: int, rates: Tensor | None) -> None:
        """Learn from a minibatch. A step of Adam is proportional to its rate: so each replica can have its own."""
        if rates is None:
            self._minimise(inputs, targets, remembered)
            return
        parameters = [p for group in self._optimiser.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        self._minimise(inputs, targets, remembered)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old.lerp(parameter, rates[:, None, None].to(old.dtype)))

    def _begin_anew(self, changed: Tensor) -> None:
        """The world has changed for some replicas: what they saw before they noticed is all that they know of it."""
        self._began[changed] = max(0, self.observed - RECENT)

    def _judges(self) -> bool:
        """Whether the newest reward is compared with what was expected."""
        return self._changes is not None

    def _judge(self, contexts: Tensor, actions: Tensor, expected: Tensor) -> None:  # noqa: ARG002
        """Find out whether the world has changed, from what the network expected before the newest was learnt."""
        if self._changes is None:
            return
        newest = self._rewards[self.observed % self.memory] / self._found_scale
        changed = self._changes.see((newest - expected).abs())
        if bool(changed.any()):
            self._begin_anew(changed)

    def _check_rewards(self, owner: str, rewards: Tensor) -> None:
        """Refuse, before anything has changed, rewards that the likelihood does not have."""
        constraint, units = _REWARDS.get(type(self.likelihood)), rewards / (self.scale or 1.0)
        if constraint is not None:
            possible = (units >= 0) & (units <= constraint.most) & (units % 1 == 0)
            if not bool(possible.all()):
                raise invalid("reward", owner, f"{constraint.text}, by its likelihood", rewards[~possible][0].item())
        if self._finds_scale and self.observed >= _SETTLED:
            usual, largest = float(self._found_scale.max()), float(rewards.abs().max())
            if largest > _WILD * usual:
                warnings.warn(
                    f"{owner}: a reward of {largest:g} is {largest / usual:.0f} times the size of those before, and "
                    "what was learnt of them is lost beside it. If it is an error, load the agent as saved before.",
                    stacklevel=4,
                )

    def _remember(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        place = self.observed % self.memory
        self._contexts[place], self._actions[place] = contexts, actions
        units = rewards / (self.scale or 1.0)
        self._rewards[place] = units
        unknown = self._likelihood.likelihood
        if isinstance(unknown, Unknown):
            unknown.see(units)
        if self._finds_scale:
            self._find_scale(rewards.square(), 1)
        if self._judges():
            with torch.no_grad():
                expected = self._likelihood.expected(self._outputs(self.net, contexts))
            self._judge(contexts, actions, expected.gather(-1, actions[:, None])[:, 0])

    def _remember_many(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Observations of an agent alone, the oldest first; none of them can tell whether the world has changed."""
        units = rewards / (self.scale or 1.0)
        kept = slice(-self.memory, None)
        places = torch.arange(self.observed, self.observed + len(actions))[kept] % self.memory
        self._contexts[places, 0], self._actions[places, 0] = contexts[kept], actions[kept]
        self._rewards[places, 0] = units[kept].float()
        if isinstance(self._likelihood.likelihood, Unknown):
            for each in units[(units != 0) & (units != 1)][:1]:
                self._likelihood.likelihood.see(each[None])
        if self._finds_scale:
            self._find_scale(rewards.square().sum()[None], len(actions))

    def _find_scale(self, squares: Tensor, count: int) -> None:
        """The scale after ``count`` more rewards, whose sum of squares this is."""
        self._square += squares
        size = (self._square / (self.observed + count)).sqrt().float()
        grown = size.maximum(self._found_scale) if self.observed >= _SETTLED else size
        unknown = self._likelihood.likelihood
        known = grown > 0 if not isinstance(unknown, Unknown) else (grown > 0) & (unknown.is_number > 0)
        self._found_scale.copy_(grown.where(known, 1.0))

    def _inputs(self, contexts: Tensor, actions: Tensor) -> Tensor:
        """What the network takes, of contexts ``[..., replicas, features]`` and actions ``[..., replicas]``.

        Contexts that are remembered with the numbers of their actions are complete.
        """
        if self.encoding == "input" and contexts.shape[-1] == self.features:
            contexts = torch.cat([contexts, self._codes[actions]], dim=-1)
        return contexts if self.replicas > 1 else contexts.squeeze(-2)

    def _targets(self, actions: Tensor, rewards: Tensor) -> Tensor:
        """What the likelihood takes."""
        chosen = actions if self.encoding == "output" else torch.zeros_like(actions)
        targets = torch.stack([chosen.to(rewards.dtype), rewards], dim=-1)
        return targets if self.replicas > 1 else targets.squeeze(-2)

    def _outputs(self, network: Callable[[Tensor], Tensor], contexts: Tensor) -> Tensor:
        """What ``network`` says of every action, ``[replicas, actions]``: the number its expected reward grows with."""
        if self.encoding == "output":
            return network(self._inputs(contexts[None], self._every_action)).reshape(self.replicas, -1)[
                :, : self.actions
            ]
        outputs = network(self._inputs(contexts.expand(self.actions, -1, -1), self._every_action))
        return outputs.reshape(self.actions, self.replicas, -1)[..., 0].t()

    @property
    def _action_codes(self) -> Tensor | None:
        return None if self.action_features is None else self._codes

    def _make_twin(self) -> Self:
        twin = type(self)(**{**self._arguments(), "memory": 1})
        twin.net.eval()  # as each decision would, and back
        own, its = self._tensors(), twin._tensors()
        names = [
            name
            for name in its
            if name.startswith(("parameter.", "regression.")) or name in ("is_number", "scale", "tries")
        ]
        self._published = [own[name] for name in names], [its[name] for name in names]
        torch._foreach_copy_(self._published[1], self._published[0])
        twin.observed, twin.retired, twin._joined = self.observed, self.retired, self._joined
        return twin

    def _more_codes(self, owner: str, count: int, features: Any) -> dict[str, Any]:
        if self.action_features is None:
            return super()._more_codes(owner, count, features)
        codes = as_numbers(features, torch.float32)
        if codes.shape != (count, self._codes.shape[1]):
            raise invalid("features", owner, f"{self._codes.shape[1]} numbers for each of {count} actions", features)
        check_finite("features", owner, codes)
        return {"action_features": [*self.action_features, *codes.tolist()]}

    def _blocks(self, name: str) -> int:
        is_output = self.encoding == "output" and name.startswith(("parameter.", "optimiser."))
        return self._likelihood.numbers if is_output else 1

    def _with_codes(self, contexts: Tensor, actions: Tensor | list[int], codes: Tensor | None) -> Tensor:
        if self.action_features is None:
            return contexts
        return torch.cat([contexts, self._codes[actions] if codes is None else codes], -1)

    def _rows(self, requests: Requests) -> Tensor:
        """What the network of an agent alone takes: a row for each request or, as input, for each of its actions."""
        contexts = requests.contexts
        if self.encoding == "output":
            return contexts
        count = len(contexts)
        codes = self._codes.expand(count, -1, -1) if requests.codes is None else requests.codes
        return torch.cat([contexts[:, None].expand(-1, self.actions, -1), codes], -1).flatten(0, 1)

    def _firsts(self, outputs: Tensor) -> Tensor:
        """Of the outputs for :meth:`_rows` the number that each action's expected reward grows with."""
        if self.encoding == "output":
            return outputs[..., : self.actions]
        return outputs[..., 0].reshape(*outputs.shape[:-2], -1, self.actions)

    def _in_rewards(self, firsts: Tensor) -> Numbers:
        """The expected rewards of an agent alone, in their own units."""
        expected = self._likelihood.expected(firsts).numpy() * np.float64(
            (self.scale or 1.0) * self._found_scale.item()
        )
        return expected.clip(-LARGEST_REWARD, LARGEST_REWARD)  # as rewards are; an exponential may overflow

    def _possible(self, means: Numbers) -> Numbers:
        """Means within what rewards can be, of an agent alone."""
        likelihood = self._likelihood.likelihood
        if isinstance(likelihood, Unknown) and not likelihood.is_number.item():
            likelihood = likelihood.bernoulli
        whole = _REWARDS.get(type(likelihood))
        return means if whole is None else means.clip(0, whole.most * (self.scale or 1.0))

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"contexts": self._contexts, "actions": self._actions, "rewards": self._rewards}
        if isinstance(self._likelihood.likelihood, Unknown):
            tensors["is_number"] = self._likelihood.likelihood.is_number
        if self._changes is not None:
            tensors |= {"began": self._began, "errors": self._changes.state}
        if self._finds_scale:
            tensors |= {"square": self._square, "scale": self._found_scale}
        parameters = [p for group in self._optimiser.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            slots = self._optimiser.state[parameter]
            if not slots:  # as Adam itself would begin
                slots["step"] = torch.zeros(())
                slots["exp_avg"], slots["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            tensors[f"parameter.{number}"] = self._by_replica(parameter.detach())
            tensors |= {f"optimiser.{number}.{name}": self._by_replica(value) for name, value in slots.items()}
        return tensors

    def _by_replica(self, tensor: Tensor) -> Tensor:
        """A tensor of a network alone as that of one of several, ``[1, outputs, inputs]`` or ``[1, 1, outputs]``."""
        return tensor if self.replicas > 1 or not tensor.dim() else tensor.reshape(1, -1, tensor.shape[-1])


@dataclass(eq=False, repr=False, kw_only=True)
class ThompsonSampling(NeuralAgent):
    """Thompson sampling on a Bayes by Backprop network of the reward.

    Each decision draws a network from the posterior and takes the action that is best by it. Draws for an action that
    was tried n times are nearer to the mean of all or farther from it than the posterior says. Their width is that of a
    mean of n, and wider for actions that are neglected: with r = (1 + t) / (1 + n) after t tries of all K actions,

    value = mean + (drawn - mean) * exploration * sqrt(settling / (1 + n) * (1 + log r) * max(1, r / K))

    A Gaussian on each weight knows little about how often an action was tried. Without the factor an agent stays away
    for good from an action that was bad luck at first, and goes on to try what it knows well.

    Beside the network a linear regression learns the rewards exactly, and so from few. The value of an action is

    w * linear + (1 - w) * network + exploration * optimism * error

    where the share w is that which predicted recent rewards best, give or take exploration * optimism of its own
    standard errors, at random, and the error is the regression's, which says how little was seen of actions in contexts
    like this one. Where an action was tried much less than others, the error is larger and the share is smaller: how
    bad it is there is what the regression has not seen. The arguments besides those of :class:`NeuralAgent`:

    Args:
        prior: On the weights; None for ``Normal(1)``.
        sigma: Initial standard deviation of the weights.
        exploration: How far draws are from their mean, as a multiple of what the posterior says.
        settling: How often an action is tried until its draws are as near to their mean as the posterior says. None:
            they always are, with ``exploration=1``. (The paper's agent differs in more: docs/bandits.md has it.)
        optimism: How many standard errors of a linear regression an action is given the benefit of. None: there is no
            regression beside the network; nor is there one whose matrices of (features + 1)^2 numbers for each action
            would have more than 4 million.
        draws: Networks to average at a decision: the more, the less it explores.
        temperature: A factor on the complexity cost; 1 is Bayes.
        rho_rate: The learning rate of rho, as a multiple of that of mu.
        candidates: Draws of a decision with an id: how often each action is the best of them is its probability.

    Examples:
        >>> agent = ThompsonSampling(features=3, actions=2)
        >>> action = agent.act([0.0, 1.0, 0.0])
        >>> agent.observe([0.0, 1.0, 0.0], action, reward=1.0)
    """

    halving: int | None = 200
    prior: Prior | None = None
    sigma: float = 0.05
    exploration: float = 1.0
    settling: int | None = 20
    optimism: float | None = 0.5
    draws: int = 1
    temperature: float = 0.03
    rho_rate: float = 1.0
    candidates: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        vars(self).update(check_count(owner, below=WORDS, draws=self.draws))
        vars(self).update(check_count(owner, below=max(2, WORDS // self.draws), candidates=self.candidates))
        settling = {} if self.settling is None else check_count(owner, settling=self.settling)
        vars(self).update(settling)
        vars(self).update(check_positive(owner, rho_rate=self.rho_rate, sigma=self.sigma))
        vars(self).update(check_not_negative(owner, temperature=self.temperature, exploration=self.exploration))
        optimism = {} if self.optimism is None else check_not_negative(owner, optimism=self.optimism)
        vars(self).update(optimism)
        self.prior = Normal(1.0) if self.prior is None else self.prior
        check_type(owner, Prior, "None, or a Prior such as Normal(1.0)", prior=self.prior)
        self.model = Bayesian(self.net, self._likelihood, self.prior, sigma=self.sigma, seed=self.seed)
        # An agent learns alone, whatever other processes do.
        self._objective = FreeEnergy(self.model, n=self.memory, temperature=self.temperature, own_averaging=True)
        self._tries = torch.zeros(self.replicas, self.actions, dtype=torch.int64)
        shape = self.actions, self.features, self._numbers or 0
        has_regression = self.optimism is not None and fits(self.features, self.actions, self._numbers or 0)
        self._regression = Regression(self.replicas, *shape) if has_regression else None
        rate_of_rho = self.learning_rate * self.rho_rate
        self._optimiser = _adam(
            (self.net, self.learning_rate), (self.model.rho, rate_of_rho), (self._likelihood, self.learning_rate)
        )

    def _choose(self, contexts: Tensor) -> list[int]:
        with torch.no_grad():
            first = self.acted * self.draws
            drawn = [self._outputs(self.model.draw(0, first + k), contexts) for k in range(self.draws)]
            if self.exploration != 1 or self.settling is not None:
                mean, width = self._outputs(self.net, contexts), self._widths()
                drawn = [mean + (each - mean) * width for each in drawn]
            expected = torch.stack([self._likelihood.expected(each) for each in drawn]).mean(0)
            if self._regression is not None:
                errors, random = self._errors, self._random(2 * self.acted)
                linear, error, trust = (
                    each[:, 0] for each in self._regression.expect(contexts[:, None], self._own_codes(self.replicas, 1))
                )
                share = self._regression.share(
                    errors * torch.randn(self.replicas, dtype=torch.float64, generator=random)
                )
                network = (expected * self._found_scale[:, None]).double()
                expected = torch.lerp(network, linear, share[:, None] * trust) + errors * error
            return self._best(expected)

    def _believe(self, requests: Requests, random: np.random.Generator) -> Beliefs:
        rows, many, noise = self._rows(requests), self.candidates * self.draws, int(random.integers(INT64))
        # Where each action has a row, they must see the same drawn networks.
        estimator: Literal["shared"] | None = None if self.encoding == "output" else "shared"
        with torch.no_grad():
            drawn = self._firsts(self.model.outputs(rows, draws=many, seed=noise, estimator=estimator))
            mean = self._firsts(self.net(rows))
            values = self._in_rewards(torch.cat([mean[None], torch.lerp(mean, drawn, self._widths())]))
        means, draws = values[0], values[1:].reshape(self.candidates, self.draws, *mean.shape).mean(1)
        if self._regression is not None:
            codes = self._own_codes(1, len(mean)) if requests.codes is None else requests.codes[None]
            found = self._regression.expect(requests.contexts[None], codes)
            linear, error = (each[0].numpy() * (self.scale or 1.0) for each in (found.mean, found.error))
            trust = found.trust[0].numpy()
            luck = np.append(0.0, random.standard_normal(self.candidates))
            best, *shares = self._regression.share(torch.from_numpy(self._errors * luck)).tolist()
            means = self._possible(means + best * trust * (linear - means))  # a line knows no bounds
            draws = draws + np.array(shares)[:, None, None] * trust * (linear - draws) + self._errors * error
        return by_draws(draws, means, requests.allowed)

    @property
    def _errors(self) -> float:
        """How many standard errors of the regression count."""
        return self.exploration * (self.optimism or 0.0)

    def _own_codes(self, replicas: int, count: int) -> Tensor | None:
        """The agent's own numbers of the actions for so many contexts, if it has any."""
        return None if self.action_features is None else self._codes.expand(replicas, count, -1, -1)

    def _widths(self) -> Tensor:
        """How far from the mean the draws for each action are, ``[replicas, actions]``, in units of the posterior's."""
        if self.settling is None:
            return torch.tensor(self.exploration)
        tries = self._tries.float()
        total = tries.sum(-1, keepdim=True)
        if self.action_features is not None:  # a try of one is one of those like it: of as many kinds as it has numbers
            tries = total / self._codes.shape[1]
        elif any(self._joined):  # an action is neglected since it is there
            total = total.minimum(torch.tensor([float(self.observed - joined) for joined in self._joined]))
        ratio = (1 + total) / (1 + tries)
        neglect = (1 + ratio.log()) * (ratio / (self.actions - len(self.retired))).clamp(min=1)
        return self.exploration * (self.settling / (1 + tries) * neglect).sqrt()

    def _remember(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        super()._remember(contexts, actions, rewards)
        self._tries[torch.arange(self.replicas), actions] += 1
        if self._regression is not None:
            self._regression.learn(contexts, actions, rewards / (self.scale or 1.0))

    def _judges(self) -> bool:
        return self._regression is not None or super()._judges()

    def _judge(self, contexts: Tensor, actions: Tensor, expected: Tensor) -> None:
        if self._regression is not None:
            newest = self._rewards[self.observed % self.memory].double()
            self._regression.compare(contexts, actions, newest, (expected * self._found_scale).double())
        super()._judge(contexts, actions, expected)

    def _remember_many(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        super()._remember_many(contexts, actions, rewards)
        self._tries += actions.bincount(minlength=self.actions)
        if self._regression is not None:
            self._regression.learn_many(contexts, actions, rewards / (self.scale or 1.0))

    def _begin_anew(self, changed: Tensor) -> None:
        super()._begin_anew(changed)
        self._tries[changed] = 0
        if self._regression is not None:
            self._regression.forget(changed)

    def _minimise(self, inputs: Tensor, targets: Tensor, remembered: int) -> Tensor:
        return self._optimiser.minimise(self._objective, inputs, targets, n=remembered)

    def _tensors(self) -> dict[str, Tensor]:
        tries = {} if self.settling is None else {"tries": self._tries}
        regression = {} if self._regression is None else self._regression.tensors()
        return {**super()._tensors(), **tries, **regression, "step": self._objective.step}


@dataclass(eq=False, repr=False, kw_only=True)
class EpsilonGreedy(NeuralAgent):
    """Acts at random now and then, else as is best on a plain network.

    The argument besides those of :class:`NeuralAgent`:

    Args:
        epsilon: How often to act at random; one number, or one for each replica.
    """

    epsilon: float | Sequence[float] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        one, owner = isinstance(self.epsilon, Real), type(self).__name__
        given = [self.epsilon] * self.replicas if one else check_list(owner, epsilon=self.epsilon)
        each = [check_probability(owner, epsilon=epsilon)["epsilon"] for epsilon in given]
        if len(each) != self.replicas:
            raise invalid("epsilon", owner, f"one number, or {self.replicas}", self.epsilon)
        self.epsilon = each
        self._objective = LikelihoodCost(self.net, self._likelihood)
        self._optimiser = _adam((self.net, self.learning_rate), (self._likelihood, self.learning_rate))

    def _choose(self, contexts: Tensor) -> list[int]:
        random = self._random(2 * self.acted)
        explores = torch.rand(self.replicas, generator=random) < torch.tensor(self.epsilon)
        left = self._left()
        anything = torch.randint(len(left), (self.replicas,), generator=random).tolist()
        with torch.no_grad():
            best = self._best(self._outputs(self.net, contexts))
        chosen = zip(explores.tolist(), anything, best, strict=True)
        return [left[number] if explore else action for explore, number, action in chosen]

    def _believe(self, requests: Requests, random: np.random.Generator) -> Beliefs:  # noqa: ARG002
        (epsilon,) = self.epsilon  # type: ignore[misc]
        with torch.no_grad():
            means = self._in_rewards(self._firsts(self.net(self._rows(requests))))
        probabilities = epsilon * requests.allowed / requests.allowed.sum(1, keepdims=True)
        probabilities += (1 - epsilon) * frequencies(means[None], requests.allowed)
        return Beliefs(probabilities, means, np.zeros_like(means))  # a network alone does not know how sure it is

    def _minimise(self, inputs: Tensor, targets: Tensor, remembered: int) -> Tensor:  # noqa: ARG002
        return self._optimiser.minimise(self._objective, inputs, targets)


def _adam(*parts: tuple[nn.Module, float]) -> Adam:
    """The optimiser of modules with their learning rates at the start."""
    groups = [{"params": list(m.parameters()), "lr": rate, "initial_lr": rate} for m, rate in parts]
    return Adam([group for group in groups if group["params"]])
