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

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_count, check_type, invalid
from bayesbackprop.bandits._requests import (
    checked_action,
    checked_actions,
    checked_contexts,
    checked_features,
    checked_masks,
    checked_rewards,
    listed,
)
from bayesbackprop.bandits.decisions import Beliefs, Decision, Explanation, Requests, Waiting
from bayesbackprop.bandits.learning import Learner
from bayesbackprop.bandits.state import KEPT, State

# Seeds of decisions and observations must not meet those of neighbouring agents.
_STRIDE = 1_000_003

# Requests that are explained at a time: others decide in between.
_AT_A_TIME = 512

Numbers = Tensor | Sequence[float]


@dataclass(eq=False, repr=False)
class Agent(State):
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
        """A decision in each of ``contexts``, ``[B, features]``; ``masks`` and ``features`` have a row for each.

        A row of ``features`` may be None: the actions of that request are described by the agent's own.
        """
        return self._decide("decide_many", contexts, masks, features)

    def _decide(self, method: str, contexts: Any, masks: Any, features: Any) -> list[Decision]:
        owner = self._check_alone(method)
        with self._deciding() as decider:
            requests = self._requests(owner, contexts, masks, features)
            random = self._decision_random()
            explanations = decider._explain(requests, random)
            said = zip(explanations, requests.allowed.tolist(), _described(features, requests.codes), strict=False)
            decisions = [Decision.of(each, random.random(), *row) for each, *row in said]
            taken = [each.action for each in decisions]
            codes = None if requests.codes is None else requests.codes[range(len(taken)), taken]
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
        return self._explained("explain", [context], *one, None)[0]

    def explain_many(
        self, contexts: Any, masks: Any = None, features: Any = None, *, random: np.random.Generator | None = None
    ) -> list[Explanation]:
        """:meth:`explain` for each of ``contexts``, ``[B, features]``.

        Whoever decides by explanations, and keeps a ledger of their own, takes the noise from their own ``random``:
        else it is the same until something is learnt.
        """
        return self._explained("explain_many", contexts, masks, features, random)

    def _explained(
        self, method: str, contexts: Any, masks: Any, features: Any, random: np.random.Generator | None
    ) -> list[Explanation]:
        owner = self._check_alone(method)
        check_type(owner, np.random.Generator | None, "None or a generator of numpy", random=random)
        with self._deciding() as decider:
            requests = self._requests(owner, contexts, masks, features)
            return decider._explain(requests, random or self._decision_random())

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
        self._reward("reward_many", listed(f"{type(self).__name__}.reward_many", ids=ids), rewards)

    def _reward(self, method: str, ids: Sequence[Any], rewards: Any) -> None:
        owner = self._check_alone(method)
        rewards = listed(owner, rewards=rewards)
        if len(rewards) != len(ids):
            raise invalid("rewards", owner, f"one for each of the {len(ids)} in 'ids'", Described(f"{len(rewards)}"))
        gains = checked_rewards(owner, rewards, len(ids))
        self._check_rewards(owner, gains)
        waiting, begun = self._ledger.take(owner, ids), 0
        try:
            for (each, entry), gain in zip(waiting.items(), gains, strict=True):
                begun += 1
                self._take_in(entry.context[None], torch.tensor([entry.action]), gain[None], each)
        finally:  # if one could not be learnt, those after it wait again
            for each in ids[begun:]:
                self._ledger.give_back(each)

    def check_rewards(self, rewards: Sequence[float] | Tensor) -> None:
        """Refuse rewards that this agent cannot learn, such as 0.5 where it counts; nothing changes."""
        owner = self._check_alone("check_rewards")
        self._check_rewards(owner, checked_rewards(owner, listed(owner, rewards=rewards), len(rewards)))

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
        return self._act(self._check_alone("act"), [context])[0]

    def observe(self, context: Numbers, action: int, reward: float, features: Any = None) -> None:
        """Learn that ``action`` in ``context`` gave ``reward``: at once or later, in any order; or never.

        Args:
            context: ``[features]``.
            action: What was done, whoever decided it.
            reward: What came of it.
            features: As :meth:`decide` was given them, or those of the action alone, ``[numbers]``.
        """
        owner = self._check_alone("observe")
        self._observe(owner, [context], [action], [reward], None if features is None else [features])

    def act_all(self, contexts: Any) -> list[int]:
        """The action of each replica in its context, ``[replicas, features]``."""
        return self._act(f"{type(self).__name__}.act_all", contexts)

    def _act(self, owner: str, contexts: Any) -> list[int]:
        xs = self._check_contexts(owner, contexts)
        with self._deciding() as decider:
            decider.acted = self.acted
            chosen = decider._choose(xs)
            self.acted += 1
        return chosen

    def observe_all(self, contexts: Any, actions: Sequence[int], rewards: Sequence[float] | Tensor) -> None:
        """Learn the reward of each replica."""
        self._observe(f"{type(self).__name__}.observe_all", contexts, actions, rewards, None)

    def _observe(self, owner: str, contexts: Any, actions: Any, rewards: Any, features: Any) -> None:
        xs = self._check_contexts(owner, contexts)
        actions, rewards = listed(owner, actions=actions), listed(owner, rewards=rewards)
        if len(actions) != self.replicas or len(rewards) != self.replicas:
            got = Described(f"{len(actions)} actions and {len(rewards)} rewards")
            raise invalid("actions", owner, f"one, with one reward, for each of {self.replicas}", got)
        taken = torch.tensor([checked_action(owner, action, self.actions) for action in actions])
        gains = checked_rewards(owner, rewards, self.replicas)
        self._check_rewards(owner, gains)
        codes = checked_features(owner, features, taken, self._action_codes)
        self._take_in(self._with_codes(xs, taken, codes), taken, gains)

    def _take_in(self, contexts: Tensor, actions: Tensor, rewards: Tensor, which: str | None = None) -> None:
        """Learn one observation of each replica, now or in the thread that learns; of a decision its id."""
        learner = self._learner
        if learner is None or not learner.give(contexts, actions, rewards, which):
            self._learn_now(contexts, actions, rewards, which)

    def _learn_now(self, contexts: Tensor, actions: Tensor, rewards: Tensor, which: str | None) -> None:
        try:
            with self._rounds, self._turns:
                self._learn(contexts, actions, rewards)
                self.observed += 1
                self._publish()
                if which is not None:
                    self._ledger.learnt(which)
        except BaseException:
            if which is not None:
                self._ledger.give_back(which)
            raise

    def warm_start(self, contexts: Any, actions: Any, rewards: Any, features: Any = None) -> None:
        """Learn from a log in one call, much faster than one observation after the other.

        Args:
            contexts: ``[B, features]``, the oldest first.
            actions: What was done in each, ``[B]``.
            rewards: What came of it, ``[B]``.
            features: Those of each request, ``[B, actions, numbers]``, or of each action taken, ``[B, numbers]``; None
                for a request that had none.

        Examples:
            >>> agent = Uniform(features=2, actions=3)
            >>> agent.warm_start(torch.zeros(5, 2), actions=[0, 1, 2, 1, 1], rewards=[1.0, 0.0, 0.0, 1.0, 0.0])
            >>> agent.observed
            5
        """
        owner = self._check_alone("warm_start")
        xs = checked_contexts(owner, contexts, self.features)
        taken = checked_actions(owner, actions, self.actions)
        gains = checked_rewards(owner, listed(owner, rewards=rewards), len(rewards))
        if not len(xs) or not len(xs) == len(taken) == len(gains):
            got = Described(f"{len(xs)} contexts, {len(taken)} actions and {len(gains)} rewards")
            raise invalid("contexts", owner, "one for each action and reward, and at least one", got)
        self._check_rewards(owner, gains)
        codes = checked_features(owner, features, taken, self._action_codes)
        self.settle()
        with self._rounds, self._turns:
            self._learn_many(self._with_codes(xs, taken, codes), taken, gains)
            self.observed += len(gains)
            self._publish()

    # --- arms --------------------------------------------------------------------------------------------------------

    def add_arms(self, count: int = 1, features: Any = None) -> list[int]:
        """Add actions; what was learnt of the others, and their numbers, stay.

        A new action begins as in a new agent of that many actions with the same seed.

        Args:
            count: How many.
            features: Numbers that describe each of them, ``[count, numbers]``, if the agent has ``action_features``.

        Returns:
            Their numbers.

        Examples:
            >>> agent = Uniform(features=2, actions=3)
            >>> agent.add_arms(2)
            [3, 4]
            >>> agent.retire(0)
            >>> agent.explain([0.0, 1.0]).probabilities
            (0.0, 0.25, 0.25, 0.25, 0.25)
        """
        owner = self._check_alone("add_arms")
        count = check_count(owner, count=count)["count"]
        self.settle()
        with self._rounds, self._turns, nullcontext() if self._twin is None else self._twin._turns:
            larger = {"actions": self.actions + count, **self._more_codes(owner, count, features)}
            grown = type(self)(**{**self._arguments(), **larger})
            own = self._tensors()
            for name, tensor in grown._tensors().items():
                _copy_into(tensor.detach(), own[name], self._blocks(name))
            added = list(range(self.actions, grown.actions))
            vars(grown).update({name: vars(self)[name] for name in KEPT})
            vars(self).update(vars(grown))
            self._joined = [*self._joined, *[self.observed] * count]
            if self._twin is not None:
                self._twin = self._make_twin()
        return added

    def retire(self, action: int) -> None:
        """Never take ``action`` again. Rewards of it can still be learnt, and the others keep their numbers."""
        owner = self._check_alone("retire")
        action = checked_action(owner, action, self.actions)
        with self._rounds, self._turns:
            if self._left() == [action]:
                raise invalid("action", owner, "one of several that are left", action)
            self.retired = tuple(sorted({*self.retired, action}))
            self._publish()

    # --- learning off the path of decisions --------------------------------------------------------------------------

    @contextmanager
    def learning(self, behind: int = 10_000) -> Iterator[Self]:
        """Within it a thread of its own learns; :meth:`reward` and :meth:`observe` return at once.

        Leaving it waits until all is learnt. What was given is learnt in that order, exactly as without the thread. If
        the thread cannot learn an observation, the next call of the agent says so, and a decision waits again.

        Args:
            behind: How many observations may wait to be learnt; with more, whoever gives one waits.

        Examples:
            >>> agent = Uniform(features=2, actions=3)
            >>> with agent.learning():
            ...     agent.observe([0.0, 1.0], action=2, reward=1.0)
            >>> agent.observed
            1
        """
        behind = check_count(self._check_alone("learning"), behind=behind)["behind"]
        with self._rounds, self._turns:
            if self._learner is not None:
                raise RuntimeError("A thread learns for this agent already.")
            learner = self._learner = Learner(self._learn_now, behind)
            self._twin = self._make_twin()
        try:
            yield self
        finally:
            try:
                learner.end()
            finally:
                with self._rounds, self._deciding():
                    self._learner = self._twin = None

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
        """Take in one observation of each replica; ``self._give_way()`` lets other threads decide meanwhile."""

    def _learn_many(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Take in many observations of an agent alone, the oldest first."""
        before = self.observed
        for number in range(len(actions)):
            one = slice(number, number + 1)
            self._learn(contexts[one], actions[one], rewards[one])
            self.observed += 1
            self._give_way()
        self.observed = before

    def _with_codes(self, contexts: Tensor, actions: Tensor | list[int], codes: Tensor | None) -> Tensor:  # noqa: ARG002
        """What is to be learnt of ``contexts``: with the numbers of the actions taken, where requests have them."""
        return contexts

    def _make_twin(self) -> Self | None:
        """An agent that chooses as this one does now; None where one can wait for the learning."""
        return None

    def _more_codes(self, owner: str, count: int, features: Any) -> dict[str, Any]:  # noqa: ARG002
        """The argument with the numbers of the actions, and of ``count`` new ones."""
        if features is not None:
            raise invalid("features", owner, "None, unless the agent has action_features", features)
        return {}

    def _blocks(self, name: str) -> int:  # noqa: ARG002
        """In how many blocks the dimension of a tensor by actions has them."""
        return 1

    def _check_rewards(self, owner: str, rewards: Tensor) -> None:
        """Refuse, before anything has changed, rewards that the agent cannot learn."""

    def _best(self, values: Tensor) -> list[int]:
        """The actions of the highest values, ``[replicas, actions]``, among those not retired."""
        if self.retired:
            values = values.index_fill(-1, torch.tensor(self.retired), -torch.inf)
        return values.argmax(-1).tolist()

    def _left(self) -> list[int]:
        """The actions that are not retired."""
        return [action for action in range(self.actions) if action not in self.retired]

    def _random(self, count: int) -> torch.Generator:
        """Decisions have even numbers, observations odd ones."""
        return torch.Generator().manual_seed(((self.seed + 1) * _STRIDE**2 + count) % 2**64)

    def _decision_random(self) -> np.random.Generator:
        """Of the next decision with an id, or of those that are explained before something is learnt."""
        return np.random.default_rng((self.seed, self.acted, self.observed))

    def _check_alone(self, method: str) -> str:
        """Refuse replicas, which have methods of their own; the name of the method for errors."""
        self._check_learner()
        if self.replicas > 1:
            use = f"{method}_all" if method in ("act", "observe") else "act_all and observe_all"
            raise ValueError(f"This agent is {self.replicas} replicas: use {use}.")
        return f"{type(self).__name__}.{method}"

    def _requests(self, owner: str, contexts: Any, masks: Any, features: Any) -> Requests:
        xs = checked_contexts(owner, contexts, self.features)
        if not len(xs):
            raise invalid("contexts", owner, "at least one", Described("none"))
        every = torch.arange(self.actions).expand(len(xs), -1) if features is not None else None
        codes = checked_features(owner, features, every, self._action_codes)
        return Requests(xs, checked_masks(owner, masks, len(xs), self.actions, self.retired), codes)

    def _check_contexts(self, owner: str, contexts: Any) -> Tensor:
        self._check_learner()
        xs = checked_contexts(owner, contexts, self.features)
        if len(xs) != self.replicas:
            raise invalid("contexts", owner, f"one for each of {self.replicas} replicas", len(xs))
        return xs


@dataclass(eq=False, repr=False)
class Uniform(Agent):
    """Acts at random and learns nothing."""

    def _choose(self, contexts: Tensor) -> list[int]:  # noqa: ARG002
        left = self._left()
        chosen = torch.randint(len(left), (self.replicas,), generator=self._random(2 * self.acted))
        return [left[number] for number in chosen.tolist()]

    def _believe(self, requests: Requests, random: np.random.Generator) -> Beliefs:  # noqa: ARG002
        nothing = np.zeros(requests.allowed.shape)  # is known
        return Beliefs(requests.allowed / requests.allowed.sum(1, keepdims=True), nothing, nothing)

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        pass

    def _tensors(self) -> dict[str, Tensor]:
        return {}


def _described(features: Any, codes: Tensor | None) -> Iterator[tuple[tuple[float, ...], ...] | None]:
    """What each request said of the actions, as far as it did; for ever None where none did."""
    if codes is None:
        return repeat(None)
    rows = zip(features, codes.tolist(), strict=True)
    return (None if given is None else tuple(map(tuple, row)) for given, row in rows)


def _copy_into(larger: Tensor, own: Tensor, blocks: int) -> None:
    """Copy ``own`` to where it belongs in a tensor that has more actions, ``blocks`` times in one dimension."""
    for dim, (few, many) in enumerate(zip(own.shape, larger.shape, strict=True)):
        if few != many:
            larger = larger.unflatten(dim, (blocks, -1)).narrow(dim + 1, 0, few // blocks)
            own = own.unflatten(dim, (blocks, -1))
            break
    larger.copy_(own)
