"""Decisions with their probabilities, and the ledger of those that wait for a reward."""

import math
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesbackprop._errors import Described, check_type, invalid
from bayesbackprop._files import check_same


class Requests(NamedTuple):
    """What is asked of an agent, for each of B contexts.

    Attributes:
        contexts: ``[B, features]``.
        allowed: Whether each action may be taken, ``[B, actions]``; at least one of a row.
        codes: The numbers that stand for the actions in each request, ``[B, actions, numbers]``; None for the agent's.
    """

    contexts: Tensor
    allowed: NDArray[np.bool_]
    codes: Tensor | None

    def part(self, start: int, stop: int) -> "Requests":
        """Some of them."""
        return Requests(*(None if each is None else each[start:stop] for each in self))  # type: ignore[arg-type]


# Of few numbers those of numpy are quicker than those of torch.
Numbers = NDArray[np.float64]


class Beliefs(NamedTuple):
    """What an agent makes of B requests, each ``[B, actions]``: how it chooses, and what it expects of each action."""

    probabilities: Numbers
    means: Numbers
    spreads: Numbers


def best_of(values: Numbers, allowed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The best action by ``values`` ``[..., actions]`` among those allowed."""
    found: NDArray[np.int64] = np.where(allowed, values, -np.inf).argmax(-1)
    return found


def frequencies(values: Numbers, allowed: NDArray[np.bool_]) -> Numbers:
    """How often each action is the best of those allowed, ``[B, actions]``, by drawn ``values`` ``[M, B, actions]``."""
    is_best: NDArray[np.bool_] = best_of(values, allowed)[..., None] == np.arange(values.shape[-1])
    counted: Numbers = is_best.mean(0)
    return counted


def by_draws(values: Numbers, means: Numbers, allowed: NDArray[np.bool_]) -> Beliefs:
    """Those of an agent that takes what is best by one of these draws, ``[M, B, actions]``."""
    return Beliefs(frequencies(values, allowed), means, values.std(0))


@dataclass(frozen=True)
class Explanation:
    """How an agent chooses in a context, and why.

    Attributes:
        probabilities: Of each action; 0 for those that are not allowed or retired.
        means: The expected reward of each action, in units of the reward.
        spreads: How uncertain each of these is: the standard deviation of the draws that a decision is made by.
        best: The action of the highest mean among those allowed.
    """

    probabilities: tuple[float, ...]
    means: tuple[float, ...]
    spreads: tuple[float, ...]
    best: int

    @staticmethod
    def of(beliefs: Beliefs, allowed: NDArray[np.bool_]) -> "list[Explanation]":
        """One for each request."""
        best = best_of(beliefs.means, allowed).tolist()
        rows = zip(*(part.tolist() for part in beliefs), best, strict=True)
        return [Explanation(tuple(p), tuple(means), tuple(spreads), b) for p, means, spreads, b in rows]

    def sample(self, generator: torch.Generator | None = None) -> int:
        """An action, drawn with these probabilities from ``generator``; None for torch's own.

        Examples:
            >>> Explanation((0.0, 1.0), means=(2.0, 1.0), spreads=(0.1, 0.1), best=1).sample()
            1
        """
        check_type("Explanation.sample", torch.Generator | None, "None or a torch.Generator", generator=generator)
        return self.at(float(torch.rand((), dtype=torch.float64, generator=generator)))

    def explores(self, action: int) -> bool:
        """Whether an action of a higher mean is allowed."""
        return self.means[action] < self.means[self.best]

    def at(self, share: float) -> int:
        """The action at which the sum of the probabilities exceeds ``share``, a number in [0, 1)."""
        sums = list(accumulate(self.probabilities))
        last = max(action for action, p in enumerate(self.probabilities) if p)
        return min(bisect_right(sums, share * sums[-1]), last)  # beyond it only by rounding


@dataclass(frozen=True)
class Decision:
    """An action that was chosen, with all that a log needs.

    Attributes:
        id: What :meth:`Agent.reward` is told.
        action: The action.
        propensity: The probability with which it was chosen, exactly.
        probabilities: Of each action.
        means: The expected reward of each action.
        spreads: How uncertain each of these is.
        explored: Whether an action of a higher mean was allowed.
        allowed: Whether each action could be taken: those that the mask forbade, and those retired, could not. Empty
            where it is not known, as of decisions that older versions made.
        features: The numbers that described each action in the request, ``[actions][numbers]``; None where it had none.
    """

    id: str
    action: int
    propensity: float
    probabilities: tuple[float, ...]
    means: tuple[float, ...]
    spreads: tuple[float, ...]
    explored: bool
    allowed: tuple[bool, ...] = ()
    features: tuple[tuple[float, ...], ...] | None = None

    @staticmethod
    def of(
        explanation: Explanation,
        share: float,
        allowed: Sequence[bool],
        features: tuple[tuple[float, ...], ...] | None,
    ) -> "Decision":
        """The one at ``share`` of the probabilities, a number in [0, 1)."""
        action = explanation.at(share)
        known = (explanation.probabilities, explanation.means, explanation.spreads)
        # A counter would give an id twice after a restart from an older file.
        explored = explanation.explores(action)
        return Decision(uuid.uuid4().hex, action, known[0][action], *known, explored, tuple(allowed), features)


class Waiting(NamedTuple):
    """A decision whose reward is not known yet: what is to be learnt with it, and when it was made."""

    context: Tensor
    action: int
    time: float


class Ledger:
    """The decisions that wait for a reward, the oldest first.

    Args:
        most: How many may wait; the oldest is forgotten for one more.
        expiry: Seconds after which a decision is forgotten, or None.
    """

    def __init__(self, most: int, expiry: float | None) -> None:
        self.most, self.expiry = most, expiry
        self._waiting: dict[str, Waiting] = {}
        # Those whose reward has come and is not learnt yet.
        self._taken: dict[str, Waiting] = {}
        # What became of the last ``most`` that no longer wait, for errors to say so.
        self._ended: dict[str, str] = {}
        self._guard = threading.RLock()  # reentrant, since a signal handler may interrupt its holder

    def __len__(self) -> int:
        with self._guard:
            self._forget()
            return len(self._waiting)

    def put(self, waiting: Mapping[str, Waiting]) -> None:
        """Add decisions by their ids."""
        with self._guard:
            self._waiting.update(waiting)
            self._forget()

    def take(self, owner: str, ids: Sequence[Any]) -> dict[str, Waiting]:
        """Take out all of these, or refuse them for ``owner`` if one does not wait, with what became of it."""
        with self._guard:
            self._forget()
            for each in ids:
                if not isinstance(each, str) or each not in self._waiting:
                    what = self._ended.get(each, "is not known") if isinstance(each, str) else "is no text"
                    raise invalid("id", owner, f"that of a decision that waits; this one {what}", each)
            if len(set(ids)) < len(ids):
                raise invalid("ids", owner, "different from each other", Described("one of them twice"))
            for each in ids:
                self._taken[each] = self._end(each, "has its reward already")
            return {each: self._taken[each] for each in ids}

    def learnt(self, which: str) -> None:
        """Forget a decision that was taken out: its reward is learnt."""
        self._taken.pop(which, None)

    def give_back(self, which: str) -> None:
        """Let a decision that was taken out wait again: its reward could not be learnt."""
        with self._guard:
            if which in self._taken:
                self._ended.pop(which, None)
                self.put({which: self._taken.pop(which)})

    def _forget(self) -> None:
        """Let go those that are too many or too old."""
        since = -math.inf if self.expiry is None else time.time() - self.expiry
        while self._waiting:
            oldest = next(iter(self._waiting))
            if len(self._waiting) <= self.most and self._waiting[oldest].time >= since:
                break
            self._end(oldest, "has expired")

    def _end(self, which: str, what: str) -> Waiting:
        self._ended[which] = what
        if len(self._ended) > self.most:
            del self._ended[next(iter(self._ended))]
        return self._waiting.pop(which)

    def __getstate__(self) -> dict[str, Any]:
        with self._guard:
            waiting, ended = {**self._taken, **self._waiting}, dict(self._ended)
            return {**vars(self), "_waiting": waiting, "_taken": {}, "_ended": ended, "_guard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "_guard": threading.RLock()})

    # --- files -------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Those whose reward is not learnt, to be written: their ids as bytes, what is to be learnt, and when."""
        with self._guard:
            waiting = {**self._taken, **self._waiting}
        if not waiting:
            return {}
        return {
            "ids": torch.tensor([list(bytes.fromhex(each)) for each in waiting], dtype=torch.uint8),
            "contexts": torch.stack([each.context for each in waiting.values()]),
            "actions": torch.tensor([each.action for each in waiting.values()]),
            "times": torch.tensor([each.time for each in waiting.values()], dtype=torch.float64),
        }

    def restore(self, tensors: dict[str, Tensor], width: int, actions: int) -> None:
        """Take in what :meth:`tensors` gave, of contexts of this width; refuse what cannot be that."""
        if not tensors:
            return
        n = len(tensors["ids"])
        like = {
            "ids": torch.empty(n, 16, dtype=torch.uint8),
            "contexts": torch.empty(n, width),
            "actions": torch.empty(n, dtype=torch.int64),
            "times": torch.empty(n, dtype=torch.float64),
        }
        check_same("decisions that wait", tensors, like)
        if bool(((tensors["actions"] < 0) | (tensors["actions"] >= actions)).any()):
            raise ValueError("actions of decisions that there are not")
        ids = [bytes(each).hex() for each in tensors["ids"].tolist()]
        rows = (tensors["contexts"].unbind(), tensors["actions"].tolist(), tensors["times"].tolist())
        self.put({each: Waiting(*row) for each, row in zip(ids, zip(*rows, strict=True), strict=True)})
