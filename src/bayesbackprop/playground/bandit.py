"""A bandit with three actions and a context of one number, and two agents in it side by side."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bayesbackprop.bandits import Agent, Environment, EpsilonGreedy, ThompsonSampling
from bayesbackprop.playground.activities import Activity, GoesOn, History
from bayesbackprop.playground.requests import Bandit, Played, Player

_HIDDEN = (32, 32)
_RATE = 3e-3
# Where beliefs are asked for, of contexts in [-1, 1].
_CONTEXTS = torch.linspace(-1, 1, 41)
# Steps after which the agents have shown what they can.
_STEPS = 5000

# The probability that each of three actions is rewarded, at contexts x in [-1, 1].
WORLDS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    # Each is the best somewhere.
    "crossing": lambda x: (
        0.2 + 0.6 * torch.sigmoid(6 * (x - 0.4)),
        0.25 + 0.5 * torch.exp(-8 * x.square()),
        0.2 + 0.6 * torch.sigmoid(-6 * (x + 0.4)),
    ),
    # The third pays in few contexts: one who has stopped trying it never knows.
    "rare": lambda x: (
        0.5 + 0 * x,
        0.35 + 0 * x,
        0.1 + 0.85 * torch.sigmoid(16 * (x - 0.55)),
    ),
    # The context says nothing.
    "coins": lambda x: (0.45 + 0 * x, 0.5 + 0 * x, 0.6 + 0 * x),
}


class World(Environment):
    """Actions that are rewarded with 1 or 0, by probabilities that depend on a context in [-1, 1]."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(features=1, actions=3, seed=seed)
        self._name = name

    def probabilities(self, contexts: Tensor) -> Tensor:
        """Of a reward, ``[actions, contexts]``."""
        return torch.stack(WORLDS[self._name](contexts))

    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        context = torch.tensor([random.uniform(-1, 1)], dtype=torch.float32)
        expected = self.probabilities(context)[:, 0]
        return context, expected, (torch.from_numpy(random.random(3)) < expected).float()


class _Contestant:
    """An agent in a world of its own; worlds of the same seed have the same contexts and coins."""

    def __init__(self, agent: Agent, world: World) -> None:
        self.agent, self.world = agent, world
        self.chosen = [0] * world.actions
        self.regret = 0.0

    def step(self) -> None:
        context, expected = self.world.context, self.world.expected
        action = self.agent.act(context)
        self.regret += self.world.best - float(expected[action])
        self.chosen[action] += 1
        self.agent.observe(context, action, self.world.step(action))

    def look(self, regret: list[float]) -> Player:
        explanations = self.agent.explain_many(_CONTEXTS[:, None])
        by_action = [
            [_short(column) for column in zip(*rows, strict=True)]
            for rows in ([each.means for each in explanations], [each.spreads for each in explanations])
        ]
        name = type(self.agent).__name__
        return Player(name=name, means=by_action[0], spreads=by_action[1], chosen=list(self.chosen), regret=regret)


class Contest(Activity):
    """Thompson sampling beside epsilon-greedy: the same network, another way to explore."""

    def __init__(self, work: Bandit) -> None:
        options = {"features": 1, "actions": 3, "seed": work.seed, "hidden": _HIDDEN, "learning_rate": _RATE}
        agents: list[Agent] = [
            ThompsonSampling(**options, exploration=work.exploration),  # type: ignore[arg-type]
            EpsilonGreedy(**options, epsilon=work.epsilon),  # type: ignore[arg-type]
        ]
        self._contestants = [_Contestant(agent, World(work.world, work.seed)) for agent in agents]
        self._history = History(len(agents))

    def take_over(self, before: Activity) -> None:
        """Nothing: another contest begins anew."""

    def run(self, goes_on: GoesOn) -> None:
        while self.step < _STEPS:
            for each in self._contestants:
                each.step()
            self.step += 1
            self._history.add(self.step, *(each.regret for each in self._contestants))
            if not goes_on():
                return

    def look(self) -> Played:
        world = self._contestants[0].world
        curves = zip(self._contestants, self._history.columns, strict=True)
        return Played(
            contexts=_short(_CONTEXTS.tolist()),
            truth=[_short(each) for each in world.probabilities(_CONTEXTS).tolist()],
            steps=list(self._history.steps),
            players=[each.look(_short(curve)) for each, curve in curves],
        )


def _short(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
