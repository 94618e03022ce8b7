"""Bandits beside other libraries: the same contexts and coins for all."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from bayesbackprop_paper.bench import bandits
from bayesbackprop_paper.environments import Wheel


class Recorder:
    """A bandit of another library that always takes action 2, and remembers what it was told."""

    told: ClassVar[list[tuple[str, int, float]]] = []

    def __init__(self, arms: list[int], policy: object, seed: int) -> None:
        self.arms, self.policy, self.seed = arms, policy, seed

    def fit(self, actions: list[int], rewards: list[float], contexts: Any) -> None:
        assert contexts.shape == (1, 2)
        self.told.append(("fit", actions[0], rewards[0]))

    def partial_fit(self, actions: list[int], rewards: list[float], contexts: Any) -> None:
        assert contexts.shape == (1, 2)
        self.told.append(("partial_fit", actions[0], rewards[0]))

    def predict(self, contexts: Any) -> int:
        assert contexts.shape == (1, 2)
        return 2


@pytest.fixture
def mabwiser(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("mabwiser.mab")
    module.MAB = Recorder
    module.LearningPolicy = SimpleNamespace(LinTS=object, LinUCB=object)
    monkeypatch.setitem(sys.modules, "mabwiser", ModuleType("mabwiser"))
    monkeypatch.setitem(sys.modules, "mabwiser.mab", module)
    monkeypatch.setattr(Recorder, "told", [])


@pytest.mark.usefixtures("mabwiser")
def test_a_peer_meets_the_steps_of_ours_and_learns_from_each() -> None:
    rows = bandits.compare(["wheel-0.5"], ["mabwiser"], steps=6, updates=1, seeds=1, says=lambda _: None)
    assert [row.agent for row in rows] == [*bandits.OURS, "mabwiser LinTS", "mabwiser LinUCB"]
    environment = Wheel(0.5, seed=0)
    told, lost = Recorder.told[:6], 0.0
    assert [name for name, _, _ in told] == ["fit"] + 5 * ["partial_fit"]
    assert [action for _, action, _ in told[1:]] == 5 * [2]
    for _, action, reward in told:
        lost += environment.best - reward
        assert environment.step(action) == reward
    assert rows[3].regret == pytest.approx(lost)


def test_rows_are_those_of_the_seeds() -> None:
    def regrets(seeds: int) -> list[float]:
        rows = bandits.compare(["wheel-0.5"], [], steps=20, updates=1, seeds=seeds, says=lambda _: None)
        assert [(row.agent, row.steps, row.seeds) for row in rows] == [(agent, 20, seeds) for agent in bandits.OURS]
        return [row.regret for row in rows]

    assert regrets(2) == regrets(2)
    assert regrets(2) != regrets(1)
