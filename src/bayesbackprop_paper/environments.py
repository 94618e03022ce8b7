"""The bandits of the experiments: the paper's, others that need a data set, and the wheel."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesbackprop._errors import invalid
from bayesbackprop.bandits import Environment, Table, classification
from bayesbackprop_paper import data


def mushroom(seed: int = 0) -> Table:
    """The paper's: action 0 leaves the mushroom; action 1 eats it: +5 if edible, else +5 or -35 at even odds."""
    contexts, edible = data.mushroom()
    eaten = torch.where(edible, 5.0, torch.tensor([[5.0], [-35.0]]))
    return Table(contexts, torch.stack([torch.zeros_like(eaten), eaten], dim=-1), seed)


def adult(seed: int = 0) -> Table:
    """Adult: which of 14 occupations a person has."""
    return classification(*data.adult(label="occupation"), seed=seed)


def covertype(seed: int = 0) -> Table:
    """Covertype: which of 7 kinds of forest grows somewhere."""
    return classification(*data.covertype(), seed=seed)


class Wheel(Environment):
    """The wheel bandit of Riquelme et al. (2018): five actions on the unit disc.

    Action 0 gives about 1.2 everywhere. The others give 1, but beyond the radius ``delta`` one of them, by the
    quadrant, gives 50: the nearer delta is to 1 the rarer that is, and only exploring finds it.
    """

    SAFE, USUAL, RARE, NOISE = 1.2, 1.0, 50.0, 0.01

    def __init__(self, delta: float = 0.95, seed: int = 0) -> None:
        if not isinstance(delta, (int, float)) or not 0 < delta < 1:
            raise invalid("delta", "Wheel", "a float in (0, 1)", delta)
        super().__init__(2, 5, seed)
        self.delta = delta

    def described(self) -> dict[str, Any]:
        return {**super().described(), "delta": self.delta}

    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        radius, angle = math.sqrt(random.random()), 2 * math.pi * random.random()
        context = torch.tensor([radius * math.cos(angle), radius * math.sin(angle)])
        expected = torch.tensor([self.SAFE] + 4 * [self.USUAL])
        if radius > self.delta:
            expected[1 + int(angle / (math.pi / 2)) % 4] = self.RARE
        noise = torch.from_numpy(random.standard_normal(5)).float()
        return context, expected, expected + self.NOISE * noise


def digits(seed: int = 0) -> Table:
    """Scikit-learn's digits: which of 10 an image of 8 x 8 pixels shows."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return classification(torch.tensor(images / 16).float(), torch.tensor(labels), 10, seed)


def delayed(seed: int = 0) -> Table:
    """The digits, with rewards that come 100 steps after their actions."""
    environment = digits(seed)
    environment.delay = 100
    return environment


class Clicks(Environment):
    """Yes or no: 10 actions, each with a logistic regression on 10 normal features."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(10, 10, seed)
        self._weights = torch.tensor(0.6 * np.random.default_rng(7).standard_normal((10, 10))).float()

    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        context = torch.tensor(random.standard_normal(10)).float()
        expected = torch.sigmoid(self._weights @ context - 1.5)
        return context, expected, (torch.tensor(random.random(10)).float() < expected).float()


class Items(Environment):
    """A hundred actions with five features each: the logit of a yes is bilinear in those of the context and theirs."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(5, 100, seed)
        fixed = np.random.default_rng(11)
        self._items = self.action_features = torch.tensor(fixed.standard_normal((100, 5))).float()
        self._weights = torch.tensor(0.5 * fixed.standard_normal((5, 5))).float()

    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        context = torch.tensor(random.standard_normal(5)).float()
        expected = torch.sigmoid(self._items @ (self._weights @ context) - 1.5)
        return context, expected, (torch.tensor(random.random(100)).float() < expected).float()


class Switched(Environment):
    """Another environment whose actions after ``at`` steps do what their neighbours did."""

    def __init__(self, inside: Environment, at: int) -> None:
        super().__init__(inside.features, inside.actions, inside.seed)
        self._inside, self.at = inside, at
        self.delay = inside.delay

    def described(self) -> dict[str, Any]:
        return {**super().described(), "inside": self._inside.described(), "at": self.at}

    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        context, expected, rewards = self._inside.make(random)
        if self.t < self.at:
            return context, expected, rewards
        return context, expected.roll(1), rewards.roll(1)


def switched(seed: int = 0) -> Switched:
    """The digits, whose actions exchange what they do after 1,000 steps: half of a run of 2,000."""
    return Switched(digits(seed), 1000)
