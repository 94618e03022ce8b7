"""Contextual bandits: a context, an action, a reward, and what the oracle would have expected.

Everything random at step t is a pure function of (seed, t): so the state of an environment is the number t, agents with
the same seed meet the same contexts and coins, and a run that was killed goes on as if it had not been.
"""

import zlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_count, check_finite, invalid
from bayesbackprop.bandits._requests import checked_action


class Environment(ABC):
    """A contextual bandit.

    Attributes:
        features: The width of a context.
        actions: How many there are.
    """

    def __init__(self, features: int, actions: int, seed: int) -> None:
        owner = type(self).__name__
        self.features, self.actions = check_count(owner, features=features, actions=actions).values()
        self.seed = check_count(owner, least=0, below=2**128, seed=seed)["seed"]  # the key of the generator below
        self._seen: int | None = None
        self.t = 0

    @property
    def t(self) -> int:
        """The number of steps taken; set it to go to another."""
        return self._t

    @t.setter
    def t(self, t: int) -> None:
        self._t = check_count(type(self).__name__, least=0, t=t)["t"]

    @property
    def context(self) -> Tensor:
        """What the agent sees before it acts, ``[features]``."""
        return self._look()[0]

    @property
    def expected(self) -> Tensor:
        """The expected reward of each action in this context, ``[actions]``: what the agent does not know."""
        return self._look()[1]

    @property
    def best(self) -> float:
        """The expected reward of the oracle, who knows them."""
        return float(self.expected.max())

    def step(self, action: int) -> float:
        """The reward for ``action``; the next context follows."""
        reward = float(self._look()[2][checked_action(type(self).__name__, action, self.actions)])
        self.t += 1
        return reward

    def described(self) -> dict[str, Any]:
        """What tells it from others, as far as JSON can say it."""
        named = {"features": self.features, "actions": self.actions, "seed": self.seed}
        return {"environment": type(self).__name__, **named}

    @abstractmethod
    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """A step: its context, the expected reward of each action, and the reward each would get."""

    def _look(self) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`make` makes at this step, made once."""
        if self._seen != self.t:
            random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, self.t]))
            self._made, self._seen = self.make(random), self.t
        return self._made


class Table(Environment):
    """A bandit made of rows: at each step one of them, drawn at random.

    Args:
        contexts: ``[N, features]``.
        rewards: Of each action in each row, ``[N, actions]``; or ``[outcomes, N, actions]``, one of which, at even
            odds, comes true.
        seed: Of the rows and outcomes.
    """

    def __init__(self, contexts: Tensor, rewards: Tensor, seed: int = 0) -> None:
        if not _holds_numbers(contexts) or contexts.dim() != 2 or not len(contexts):
            raise invalid("contexts", "Table", "a tensor [N, features]", contexts)
        n = len(contexts)
        if not _holds_numbers(rewards) or rewards.dim() not in (2, 3) or rewards.shape[-2] != n or not len(rewards):
            raise invalid("rewards", "Table", f"a tensor [{n}, actions] or [outcomes, {n}, actions]", rewards)
        check_finite("contexts", "Table", contexts)
        check_finite("rewards", "Table", rewards)
        super().__init__(contexts.shape[1], rewards.shape[-1], seed)
        self._contexts = contexts.detach().float()
        self._outcomes = rewards.detach().float().reshape(-1, n, self.actions)
        self._checksum = 0
        for values in (self._contexts, self._outcomes):
            self._checksum = zlib.crc32(values.cpu().contiguous().numpy().data, self._checksum)

    def described(self) -> dict[str, Any]:
        return {**super().described(), "checksum": self._checksum}

    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        row, outcome = int(random.integers(len(self._contexts))), int(random.integers(len(self._outcomes)))
        return self._contexts[row], self._outcomes[:, row].mean(0), self._outcomes[outcome, row]


def classification(features: Tensor, labels: Tensor, classes: int, seed: int = 0) -> Table:
    """A bandit whose actions name the class of an example: reward 1 if right, 0 if not.

    Args:
        features: The examples, ``[N, features]``.
        labels: Their classes, ints in [0, classes), ``[N]``.
        classes: How many there are.
        seed: Of the order of the examples.

    Examples:
        >>> environment = classification(torch.eye(3), torch.tensor([0, 1, 1]), classes=2)
        >>> environment.features, environment.actions
        (3, 2)
    """
    classes = check_count("classification", classes=classes)["classes"]
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not _holds_numbers(labels) or labels.dim() != 1 or labels.dtype not in kinds or not len(labels):
        raise invalid("labels", "classification", "a tensor [N] of ints", labels)
    if bool(((labels < 0) | (labels >= classes)).any()):
        got = Described(f"{int(labels.min())} to {int(labels.max())}")
        raise invalid("labels", "classification", f"ints in [0, {classes})", got)
    return Table(features, torch.nn.functional.one_hot(labels.long(), classes), seed)


def _holds_numbers(value: object) -> bool:
    """Whether this is a tensor of numbers in memory, as the library's own are."""
    return isinstance(value, Tensor) and not value.is_complex() and value.layout is torch.strided and not value.is_meta
