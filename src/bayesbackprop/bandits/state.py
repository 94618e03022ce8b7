"""What an agent is and knows: its arguments, its files and copies, and who may change it when."""

import copy
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import check_count, check_positive, check_seed
from bayesbackprop._files import check_counter, check_same, write
from bayesbackprop.bandits._turns import Turns
from bayesbackprop.bandits.decisions import Ledger
from bayesbackprop.bandits.learning import Learner
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.priors import Prior

# What counts or is a sum of squares.
_NEVER_NEGATIVE = (
    "actions", "began", "below", "count", "errors", "exp_avg_sq", "is_number", "scale", "square", "step", "tries",
)  # fmt: skip

# Arguments that files of older versions lack.
_LATER: dict[str, Any] = {"most_waiting": 100_000, "expiry": None, "candidates": 100, "optimism": None}

# What a copy of an agent has anew, and what an agent keeps when it gets more actions.
_NOT_COPIED = ("_learner", "_twin", "_published", "_saves", "_rounds", "_turns")
KEPT = ("acted", "observed", "retired", "_decided", "_explored", "_joined", "_ledger", *_NOT_COPIED)

# What the tensors of decisions that wait are called in a file.
WAITING = "waiting."


@dataclass(eq=False, repr=False)
class State(ABC):
    """What :class:`Agent` is apart from what it does."""

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
        # How much had been observed when each action was added.
        self._joined = [0] * self.actions
        # Of all decisions with an id, and those of them in which another action than the best was taken.
        self._decided = self._explored = 0
        self._ledger = Ledger(self.most_waiting, self.expiry)
        # While a thread learns: it, and a copy of what decisions need, as it was after the last round.
        self._learner: Learner | None = None
        self._twin: Any = None
        self._published: tuple[list[Tensor], list[Tensor]] = [], []  # tensors of both
        self._set_turns()

    def _set_turns(self) -> None:
        # Whoever needs several takes them in this order: a save, a round of learning, an update or a decision.
        self._saves, self._rounds, self._turns = Turns(), Turns(), Turns()

    # --- threads ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until all that was given to the thread of :meth:`learning` is learnt; else there is nothing to do."""
        if self._learner is not None:
            self._learner.settle()

    def _check_learner(self) -> None:
        """Raise what went wrong in the thread of :meth:`learning`."""
        if self._learner is not None:
            self._learner.check()

    @contextmanager
    def _deciding(self) -> Iterator[Self]:
        """The turn to decide, and who decides: while a thread learns the twin, for which no update has to end."""
        while True:
            decider = self._twin or self
            with decider._turns:
                if decider is (self._twin or self):  # nor has that changed while waiting
                    yield decider
                    return

    def _give_way(self) -> None:
        """Let those decide who wait for it.

        With a twin they need not wait. But Python runs one thread at a time, and two that hand over at each operation
        take several times as long as one after the other: a decision 4 ms instead of 1.5.
        """
        self._turns.give_way()
        if self._twin is not None:
            with self._twin._turns:
                pass

    def _publish(self) -> None:
        """Let the twin, if there is one, be as the agent is now."""
        if self._twin is not None:
            with self._twin._turns:
                self._twin.observed, self._twin.retired, self._twin._joined = self.observed, self.retired, self._joined
                own, its = self._published
                torch._foreach_copy_(its, own)

    # --- files and copies ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """All that changes, by name: the agent's own tensors, not copies."""

    @property
    def _action_codes(self) -> Tensor | None:
        """The numbers that describe each action unless a request has others, ``[actions, numbers]``; None: none do."""
        return None

    @property
    def _numbers(self) -> int | None:
        """How many numbers describe an action; None if none do."""
        return None if self._action_codes is None else self._action_codes.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """All that changes, by name, to be written: copies, as of a moment between two rounds of learning."""
        return self._snapshot()[0]

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """What :meth:`tensors`, :meth:`described` and the ledger say, of one moment: all given before is learnt."""
        self.settle()
        with self._rounds:  # others may decide meanwhile, which changes no tensor
            tensors = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
            return tensors, self.described(), self._ledger.tensors()

    def described(self) -> dict[str, Any]:
        """The arguments that make an agent like this one, as far as JSON can say them, and how far it is."""
        return {
            "arguments": {name: _described(value) for name, value in self._arguments().items()},
            "acted": self.acted,
            "observed": self.observed,
            "decided": self._decided,
            "explored": self._explored,
            "retired": list(self.retired),
            "joined": list(self._joined),
        }

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that the agent is and knows to ``path``, atomically."""
        with self._saves:  # so that of several saves to one path the newest stays
            tensors, described, waiting = self._snapshot()
            tensors |= {f"{WAITING}{name}": tensor for name, tensor in waiting.items()}
            check_same(f"{type(self).__name__}.save", tensors, tensors)
            write(path, "agent", tensors, {"agent": type(self).__name__, **described})

    def restore(self, tensors: dict[str, Tensor], acted: int, observed: int) -> None:
        """Become the agent whose :meth:`tensors` these were."""
        with self._rounds, self._turns:
            self._restore(tensors, acted, observed)
            self._publish()

    def _restore(self, tensors: dict[str, Tensor], acted: int, observed: int) -> None:
        own = self._tensors()
        check_same(type(self).__name__, tensors, own)
        for name, tensor in tensors.items():
            *_, last = name.split(".")
            if last in _NEVER_NEGATIVE and bool((tensor < 0).any()):
                raise ValueError(f"{name} is negative")
            if last == "actions" and bool((tensor >= self.actions).any()):
                raise ValueError(f"{name} that there are not")
            if last == "inverse" and not bool((tensor.diagonal(dim1=-2, dim2=-1) >= 0).all()):
                raise ValueError(f"{name} that is not one")
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
        joined = [check_counter("joined", number) for number in counts.get("joined", self._joined)]
        if explored > decided or (retired and max(retired) >= self.actions) or len(set(retired)) >= self.actions:
            raise ValueError(f"{explored} of {decided} decisions, {retired!r:.80} retired")
        if len(joined) != self.actions or max(joined) > self.observed:
            raise ValueError(f"actions that joined at {joined!r:.80}")
        self._ledger.restore(waiting, self.features + (self._numbers or 0), self.actions)
        self._decided, self._explored = decided, explored
        self.retired, self._joined = tuple(retired), joined

    def __getstate__(self) -> dict[str, Any]:
        """A copy of all but the locks and the thread, as of a moment between two rounds of learning."""
        self.settle()
        with self._rounds, self._turns:  # a decision exchanges weights of the network for drawn ones
            return copy.deepcopy({name: value for name, value in vars(self).items() if name not in _NOT_COPIED})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._learner, self._twin, self._published = None, None, ([], [])
        self._set_turns()


def completed(kind: type[State], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a file has, with those that older versions did not write."""
    known = inspect.signature(kind).parameters
    return {**{name: value for name, value in _LATER.items() if name in known}, **arguments}


def _described(value: Any) -> Any:
    """An argument as far as JSON can say it."""
    if isinstance(value, Prior):
        return priors.describe(value)
    return likelihoods.describe(value) if isinstance(value, Likelihood) else value
