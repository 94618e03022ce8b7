"""Agents for contextual bandits (section 4 of the paper).

``decision = agent.decide(context)``; when and if the reward is known, ``agent.reward(decision.id, reward)``. Or,
without ids and probabilities, ``action = agent.act(context)`` and ``agent.observe(context, action, reward)``. All
that is random is a pure function of the seed and of how often the agent has acted and observed: an agent that was saved
and loaded goes on as if it had not been. Only the ids of decisions are new each time.

An agent can be several: ``replicas`` independent ones of the same kind that act side by side in their own environments,
as one batch of networks, which is how the experiments run their seeds.

Threads may share an agent. What one observed is learnt in a round of updates; rounds are learnt one after the other,
and others decide between two updates.
"""

import copy
import inspect
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import Described, check_count, check_list, check_positive, check_seed, check_type, invalid
from bayesbackprop._files import check_counter, check_same, write
from bayesbackprop.bandits._requests import (
    checked_action,
    checked_contexts,
    checked_features,
    checked_masks,
    checked_rewards,
)
from bayesbackprop.bandits._turns import Turns
from bayesbackprop.bandits.decisions import Beliefs, Decision, Explanation, Ledger, Requests, Waiting
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.priors import Prior

# Seeds of decisions and observations must not meet those of neighbouring agents.
_STRIDE = 1_000_003

# What counts or is a sum of squares.
_NEVER_NEGATIVE = ("actions", "began", "count", "errors", "exp_avg_sq", "is_number", "scale", "square", "step", "tries")

# Requests that are explained at a time: others decide in between.
_AT_A_TIME = 512

# Arguments that files of older versions lack.
_LATER: dict[str, Any] = {"most_waiting": 100_000, "expiry": None, "candidates": 100}

# What the tensors of decisions that wait are called in a file.
WAITING = "waiting."

Numbers = Tensor | Sequence[float]


@dataclass(eq=False, repr=False)
class Agent(ABC):
    """Chooses actions and learns from rewards.

    Args:
        features: The width of a context.
        actions: How many there are.
        replicas: How many independent agents; above 1, use :meth:`act_all` and :meth:`observe_all`.
        seed: Of everything random.
        most_waiting: How many decisions may wait for their reward; the oldest is forgotten for one more.
        expiry: Seconds after which a decision is forgotten; None for never.

    Attributes:
        acted: How many decisions were made.
        observed: How many rewards were learnt.
        retired: Actions that are no longer taken.
    """

    features: int
    actions: int
    _: KW_ONLY
    replicas: int = 1
    seed: int = 0
    most_waiting: int = 100_000
    expiry: float | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        sizes = check_count(owner, features=self.features, actions=self.actions, replicas=self.replicas)
        sizes |= check_count(owner, most_waiting=self.most_waiting)
        expiry = {} if self.expiry is None else check_positive(owner, expiry=self.expiry)
        vars(self).update({**sizes, **expiry, **check_seed(owner, seed=self.seed)})
        self.acted = self.observed = 0
        self.retired: tuple[int, ...] = ()
        # Of all decisions with an id, and those of them in which another action than the best was taken.
        self._decided = self._explored = 0
        self._ledger = Ledger(self.most_waiting, self.expiry)
        self._set_turns()

    def _set_turns(self) -> None:
        # Whoever needs several takes them in this order: a save, a round of learning, an update or a decision.
        self._saves, self._rounds, self._turns = Turns(), Turns(), Turns()

    # --- decisions with an id ----------------------------------------------------------------------------------------

    def decide(self, context: Numbers, mask: Any = None, features: Any = None) -> Decision:
        """Choose an action in ``context``, with its probability, and remember the decision until its reward comes.

        Args:
            context: ``[features]``.
            mask: Whether each action may be taken, ``[actions]``; None for all. Retired ones never are.
            features: Numbers that describe each action in this request, ``[actions, numbers]``, in place of the
                agent's ``action_features``.

        Examples:
            >>> agent = Uniform(features=2, actions=3)
            >>> decision = agent.decide([0.5, 1.0], mask=[True, False, True])
            >>> decision.probabilities
            (0.5, 0.0, 0.5)
            >>> agent.reward(decision.id, 1.0)
            >>> agent.observed, agent.waiting
            (1, 0)
        """
        one = None if mask is None else [mask], None if features is None else [features]
        return self._decide("decide", [context], *one)[0]

    def decide_many(self, contexts: Any, masks: Any = None, features: Any = None) -> list[Decision]:
        """A decision in each of ``contexts``, ``[B, features]``; ``masks`` and ``features`` have a row for each."""
        return self._decide("decide_many", contexts, masks, features)

    def _decide(self, method: str, contexts: Any, masks: Any, features: Any) -> list[Decision]:
        requests = self._requests(method, contexts, masks, features)
        with self._turns:
            random = self._decision_random()
            explanations = self._explain(requests, random)
            decisions = [Decision.of(each, random.random()) for each in explanations]
            taken = torch.tensor([each.action for each in decisions])
            codes = None if requests.codes is None else requests.codes[torch.arange(len(taken)), taken]
            learnt, now = self._with_codes(requests.contexts, taken, codes), time.time()
            self._ledger.put({d.id: Waiting(row, d.action, now) for d, row in zip(decisions, learnt, strict=True)})
            self.acted += len(decisions)
            self._decided += len(decisions)
            self._explored += sum(each.explored for each in decisions)
        return decisions

    def explain(self, context: Numbers, mask: Any = None, features: Any = None) -> Explanation:
        """How :meth:`decide` would choose, and why: probabilities, means and spreads of all actions.

        Nothing changes: the next decision has these very probabilities, if nothing is learnt before.
        """
        one = None if mask is None else [mask], None if features is None else [features]
        return self.explain_many([context], *one)[0]

    def explain_many(
        self, contexts: Any, masks: Any = None, features: Any = None, *, random: np.random.Generator | None = None
    ) -> list[Explanation]:
        """:meth:`explain` for each of ``contexts``, ``[B, features]``.

        Whoever decides by explanations, and keeps a ledger of their own, takes the noise from their own ``random``:
        else it is the same until something is learnt.
        """
        requests = self._requests("explain", contexts, masks, features)
        check_type("explain_many", np.random.Generator | None, "None or a generator of numpy", random=random)
        with self._turns:
            return self._explain(requests, random or self._decision_random())

    def _explain(self, requests: Requests, random: np.random.Generator) -> list[Explanation]:
        found: list[Explanation] = []
        for start in range(0, len(requests.contexts), _AT_A_TIME):
            if start:
                self._turns.give_way()
            some = requests.part(start, start + _AT_A_TIME)
            found += Explanation.of(self._believe(some, random), some.allowed)
        return found

    def reward(self, id: str, reward: float) -> None:
        """Learn the reward of the decision with this id: once, at any time, in any order."""
        self._reward("reward", [id], [reward])

    def reward_many(self, ids: Sequence[str], rewards: Sequence[float] | Tensor) -> None:
        """Learn the reward of each of these decisions; if one is refused, all are."""
        self._reward("reward_many", check_list(f"{type(self).__name__}.reward_many", ids=ids), rewards)

    def _reward(self, method: str, ids: Sequence[Any], rewards: Any) -> None:
        owner = self._check_alone(method)
        gains = checked_rewards(owner, check_list(owner, rewards=rewards), len(ids))
        self._check_rewards(owner, gains)
        waiting = self._ledger.take(owner, ids)
        left = dict(waiting)
        try:
            for (each, entry), gain in zip(waiting.items(), gains, strict=True):
                self._take_in(entry.context[None], torch.tensor([entry.action]), gain[None])
                del left[each]
        except BaseException:
            self._ledger.put(left)
            raise

    def check_rewards(self, rewards: Sequence[float] | Tensor) -> None:
        """Refuse rewards that this agent cannot learn, such as 0.5 where it counts; nothing changes."""
        owner = self._check_alone("check_rewards")
        self._check_rewards(owner, checked_rewards(owner, check_list(owner, rewards=rewards), len(rewards)))

    @property
    def waiting(self) -> int:
        """How many decisions wait for their reward."""
        return len(self._ledger)

    @property
    def exploration_rate(self) -> float:
        """How often a decision with an id took another action than the one of the highest mean, as a fraction."""
        return self._explored / self._decided if self._decided else 0.0

    # --- actions alone -----------------------------------------------------------------------------------------------

    def act(self, context: Numbers) -> int:
        """The action to take in ``context``, ``[features]``."""
        self._check_alone("act")
        return self.act_all([context])[0]

    def observe(self, context: Numbers, action: int, reward: float, features: Any = None) -> None:
        """Learn that ``action`` in ``context`` gave ``reward``: at once or later, in any order; or never.

        Args:
            context: ``[features]``.
            action: What was done, whoever decided it.
            reward: What came of it.
            features: As :meth:`decide` was given them, or those of the action alone, ``[numbers]``.
        """
        self._check_alone("observe")
        self._observe([context], [action], [reward], None if features is None else [features])

    def act_all(self, contexts: Any) -> list[int]:
        """The action of each replica in its context, ``[replicas, features]``."""
        xs = self._check_contexts(contexts)
        with self._turns:
            chosen = self._choose(xs)
            self.acted += 1
        return chosen

    def observe_all(self, contexts: Any, actions: Sequence[int], rewards: Sequence[float] | Tensor) -> None:
        """Learn the reward of each replica."""
        self._observe(contexts, actions, rewards, None)

    def _observe(self, contexts: Any, actions: Any, rewards: Any, features: Any) -> None:
        xs, owner = self._check_contexts(contexts), type(self).__name__
        check_list(owner, actions=actions)
        check_list(owner, rewards=rewards)
        if len(actions) != self.replicas or len(rewards) != self.replicas:
            got = Described(f"{len(actions)} actions and {len(rewards)} rewards")
            raise invalid("actions", owner, f"one, with one reward, for each of {self.replicas}", got)
        taken = torch.tensor([checked_action(owner, action, self.actions) for action in actions])
        gains = checked_rewards(owner, rewards, self.replicas)
        self._check_rewards(owner, gains)
        codes = checked_features(owner, features, taken, self.actions, self._numbers)
        self._take_in(self._with_codes(xs, taken, codes), taken, gains)

    def _take_in(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Learn one observation of each replica."""
        with self._rounds, self._turns:
            self._learn(contexts, actions, rewards)
            self.observed += 1

    # --- what the kinds of agents do ---------------------------------------------------------------------------------

    @abstractmethod
    def _choose(self, contexts: Tensor) -> list[int]:
        """The actions in ``contexts``, ``[replicas, features]``; what :meth:`tensors` says stays as it is."""

    def _believe(self, requests: Requests, random: np.random.Generator) -> Beliefs:
        """How an agent alone chooses in each of ``requests``, and what it expects; all noise is from ``random``.

        An agent of the user's own that has no probabilities can do without: it acts and observes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no probabilities of its actions: use act and observe.")

    @abstractmethod
    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Take in one observation of each replica; ``self._turns.give_way()`` lets other threads decide meanwhile."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """All that changes, by name: the agent's own tensors, not copies."""

    @property
    def _numbers(self) -> int | None:
        """How many numbers describe an action in a request; None if none do."""
        return None

    def _with_codes(self, contexts: Tensor, actions: Tensor, codes: Tensor | None) -> Tensor:  # noqa: ARG002
        """What is to be learnt of ``contexts``: with the numbers of the actions taken, where requests have them."""
        return contexts

    def _check_rewards(self, owner: str, rewards: Tensor) -> None:  # noqa: B027
        """Refuse, before anything has changed, rewards that the agent cannot learn."""

    def _best(self, values: Tensor) -> list[int]:
        """The actions of the highest values, ``[replicas, actions]``, among those not retired."""
        if self.retired:
            values = values.index_fill(-1, torch.tensor(self.retired), -torch.inf)
        return values.argmax(-1).tolist()

    def _left(self) -> list[int]:
        """The actions that are not retired."""
        return [action for action in range(self.actions) if action not in self.retired]

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
            "decided": self._decided,
            "explored": self._explored,
            "retired": list(self.retired),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that the agent is and knows to ``path``, atomically."""
        with self._saves:  # so that of several saves to one path the newest stays
            tensors, described = self._snapshot()
            tensors |= {f"{WAITING}{name}": tensor for name, tensor in self._ledger.tensors().items()}
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

    def restore_decisions(self, waiting: dict[str, Tensor], counts: Mapping[str, Any]) -> None:
        """Become the agent that also had these decisions waiting and counts as :meth:`described` says them."""
        decided, explored = (check_counter(name, counts.get(name, 0)) for name in ("decided", "explored"))
        retired = [check_counter("retired", action) for action in counts.get("retired", [])]
        if explored > decided or (retired and max(retired) >= self.actions) or len(set(retired)) >= self.actions:
            raise ValueError(f"{explored} of {decided} decisions, {retired!r:.80} retired")
        self._ledger.restore(waiting, self.features + (self._numbers or 0), self.actions)
        self._decided, self._explored, self.retired = decided, explored, tuple(retired)

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

    def _decision_random(self) -> np.random.Generator:
        """Of the next decision with an id, or of those that are explained before something is learnt."""
        return np.random.default_rng((self.seed, self.acted, self.observed))

    def _check_alone(self, method: str) -> str:
        """Refuse replicas, which have methods of their own; the name of the method for errors."""
        if self.replicas > 1:
            use = f"{method}_all" if method in ("act", "observe") else "act_all and observe_all"
            raise ValueError(f"This agent is {self.replicas} replicas: use {use}.")
        return f"{type(self).__name__}.{method}"

    def _requests(self, method: str, contexts: Any, masks: Any, features: Any) -> Requests:
        owner = self._check_alone(method)
        xs = checked_contexts(owner, contexts, self.features)
        if not len(xs):
            raise invalid("contexts", owner, "at least one", Described("none"))
        every = torch.arange(self.actions).expand(len(xs), -1)
        codes = checked_features(owner, features, every, self.actions, self._numbers)
        return Requests(xs, checked_masks(owner, masks, len(xs), self.actions, self.retired), codes)

    def _check_contexts(self, contexts: Any) -> Tensor:
        owner = type(self).__name__
        xs = checked_contexts(owner, contexts, self.features)
        if len(xs) != self.replicas:
            raise invalid("contexts", owner, f"one for each of {self.replicas} replicas", len(xs))
        return xs


class Uniform(Agent):
    """Acts at random and learns nothing."""

    def _choose(self, contexts: Tensor) -> list[int]:  # noqa: ARG002
        left = self._left()
        chosen = torch.randint(len(left), (self.replicas,), generator=self._random(2 * self.acted))
        return [left[number] for number in chosen.tolist()]

    def _believe(self, requests: Requests, random: np.random.Generator) -> Beliefs:  # noqa: ARG002
        allowed = requests.allowed.double()
        nothing = torch.zeros_like(allowed)  # is known
        return Beliefs(allowed / allowed.sum(1, keepdim=True), nothing, nothing)

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        pass

    def _tensors(self) -> dict[str, Tensor]:
        return {}


def completed(kind: type[Agent], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a file has, with those that older versions did not write."""
    known = inspect.signature(kind).parameters
    return {**{name: value for name, value in _LATER.items() if name in known}, **arguments}


def _described(value: Any) -> Any:
    """An argument as far as JSON can say it."""
    if isinstance(value, Prior):
        return priors.describe(value)
    return likelihoods.describe(value) if isinstance(value, Likelihood) else value
