"""The regret that an agent expects of its decisions."""

import math

import numpy as np
import pytest
import torch

from services import CONTEXT

from bayesbackprop.bandits import LinearThompson  # isort: skip
from bayesbackprop.serving.arms import Arms  # isort: skip
from bayesbackprop.serving.deciding import decide, expected_best  # isort: skip
from bayesbackprop.serving.requests import DecisionRequest  # isort: skip
from ztests import assert_z  # isort: skip


def best(means: list[float], spreads: list[float], allowed: list[bool] | None = None) -> float:
    mask = torch.tensor([allowed or [True] * len(means)])
    return float(expected_best(torch.tensor([means]).double(), torch.tensor([spreads]).double(), mask))


@pytest.mark.identities
@pytest.mark.parametrize(
    ("m1", "m2", "s1", "s2"),
    [(0.0, 0.0, 1.0, 1.0), (1.0, -2.0, 0.5, 3.0), (100.0, 99.0, 0.1, 2.0), (1e6, 0.0, 1.0, 1.0)],
)
def test_the_best_of_two_is_that_of_clark(m1: float, m2: float, s1: float, s2: float) -> None:
    """E max = m1 Phi(a) + m2 Phi(-a) + t phi(a), a = (m1 - m2) / t, t^2 = s1^2 + s2^2."""
    t = math.hypot(s1, s2)
    a = (m1 - m2) / t
    phi, density = 0.5 * math.erfc(-a / math.sqrt(2)), math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    exact = m1 * phi + m2 * (1 - phi) + t * density
    assert best([m1, m2], [s1, s2]) == pytest.approx(exact, rel=1e-9, abs=1e-4 * t)


@pytest.mark.identities
def test_what_is_certain_is_the_highest_mean() -> None:
    assert best([1.0, 3.0, 2.0], [0.0, 0.0, 0.0]) == pytest.approx(3.0)
    assert best([0.0, 0.0], [0.0, 0.0]) == pytest.approx(0.0, abs=1e-9)
    assert best([5.0, 3.0, 2.0], [9.0, 0.0, 0.0], [False, True, True]) == pytest.approx(3.0)


@pytest.mark.identities
def test_more_actions_and_more_spread_are_more() -> None:
    assert best([0.0], [1.0]) == pytest.approx(0.0, abs=1e-4)
    values = [best([0.0] * count, [1.0] * count) for count in (1, 2, 3, 10)]
    assert values == sorted(values)
    assert best([0.0, 0.0], [2.0, 2.0]) == pytest.approx(2 * best([0.0, 0.0], [1.0, 1.0]))


@pytest.mark.statistical
def test_decisions_are_drawn_by_the_probabilities_they_state() -> None:
    agent = LinearThompson(3, 2)
    for reward in (0.3, 0.1, 0.2):
        agent.observe(CONTEXT, 0, reward)
    requests, random = [DecisionRequest(context=CONTEXT)] * 50, np.random.default_rng(0)
    entries = [entry for _ in range(20) for entry in decide(agent, requests, random, Arms.of(agent))]
    first = np.array([entry.action == 0 for entry in entries], dtype=float)
    stated = np.array([entry.probabilities[0] for entry in entries])
    assert 0.05 < stated.mean() < 0.95
    deviation = math.sqrt(float((stated * (1 - stated)).sum()))
    assert_z(torch.tensor([(first - stated).sum() / deviation]), "actions beside their probabilities")
    assert len({round(p, 9) for p in stated}) > 3  # the noise is new each time, though nothing was learnt
    assert all(entry.loss >= 0 for entry in entries)
    assert agent.acted == agent.waiting == 0
