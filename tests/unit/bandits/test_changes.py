"""The test for change: silent while errors are alike, soon loud when they grow, for each replica by itself."""

import pytest
import torch
from torch import Tensor

from bayesbackprop.bandits import ThompsonSampling
from bayesbackprop.bandits._changes import RECENT, Changes

pytestmark = pytest.mark.identities

ERRORS = {
    "small": lambda n, random: torch.rand(n, 20, generator=random, dtype=torch.float64),
    "exact": lambda n, _: torch.zeros(n, 20, dtype=torch.float64),
    # As of a reward that is right nine times of ten.
    "rare": lambda n, random: (torch.rand(n, 20, generator=random, dtype=torch.float64) < 0.1).double(),
}


def alarms(changes: Changes, errors: Tensor) -> list[list[int]]:
    """The steps at which each replica had an alarm."""
    found: list[list[int]] = [[] for _ in range(errors.shape[1])]
    for t, each in enumerate(errors):
        for replica in changes.see(each).nonzero().flatten().tolist():
            found[replica].append(t)
    return found


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_that_are_alike_are_no_alarm(kind: str) -> None:
    errors = ERRORS[kind](3000, torch.Generator().manual_seed(1))
    assert alarms(Changes(20, 8.0), errors) == [[]] * 20


@pytest.mark.parametrize("kind", ERRORS)
def test_a_change_is_noticed_soon_by_those_whom_it_concerns(kind: str) -> None:
    errors = ERRORS[kind](800, torch.Generator().manual_seed(2))
    errors[500:, ::2] = 1.5
    found = alarms(Changes(20, 8.0), errors)
    assert found[1::2] == [[]] * 10
    for steps in found[::2]:
        assert len(steps) == 1  # and then all begins anew
        assert 500 <= steps[0] < 500 + 4 * RECENT


def test_a_single_large_error_is_no_alarm() -> None:
    errors = ERRORS["small"](600, torch.Generator().manual_seed(3))
    errors[400] = 1e6
    assert alarms(Changes(20, 8.0), errors) == [[]] * 20


def test_an_agent_that_notices_begins_anew() -> None:
    agent = ThompsonSampling(2, 2, hidden=[8], updates=1, batch_size=8, replicas=2, halving=50, learning_rate=0.01)
    contexts, began = torch.eye(2), []
    for t in range(420):
        actions = [t % 2, t % 2]
        right = [float(action == 0) for action in actions]
        # For the first replica alone, the actions are exchanged after 300 observations.
        rewards = [1 - right[0] if t >= 300 else right[0], right[1]]
        agent.observe_all(contexts, actions, rewards)
        began.append(agent._began.tolist())
    (first, second), tries = began[-1], agent.tensors()["tries"]
    assert second == 0
    assert 300 - RECENT < first < 350
    assert tries[0].sum() == 420 - first - RECENT
    assert tries[1].sum() == 420
    # Each learns at the rate of its own world.
    rates = agent._set_rates(agent._rates())
    assert rates is not None
    assert rates.tolist() == pytest.approx([1.0, (1 + (420 - first) / 50) / (1 + 420 / 50)])
    (group, _) = agent._optimiser.param_groups
    assert group["lr"] == pytest.approx(0.01 / (1 + (420 - first) / 50))


def test_without_an_alarm_nothing_is_forgotten() -> None:
    agent = ThompsonSampling(1, 1, hidden=[2], updates=1, alarm=None)
    for t in range(400):
        agent.observe([1.0], 0, float(t >= 300))
    assert agent._began.tolist() == [0]
    assert "errors" not in agent.tensors()


def test_a_step_is_as_long_as_the_rate_of_its_replica() -> None:
    agents = [ThompsonSampling(2, 2, hidden=[4], updates=1, replicas=2, seed=1) for _ in range(2)]
    before = [p.detach().clone() for p in agents[0].net.parameters()]
    inputs, targets = torch.ones(3, 2, 2), torch.tensor([[0.0, 1.0], [1.0, 5.0]]).expand(3, 2, 2)
    for agent, rates in zip(agents, (None, torch.tensor([1.0, 0.25])), strict=True):
        agent._update(inputs, targets, 3, rates)
    for old, whole, part in zip(before, *(agent.net.parameters() for agent in agents), strict=True):
        assert torch.allclose((part - old)[0], (whole - old)[0])
        assert torch.allclose((part - old)[1], 0.25 * (whole - old)[1], rtol=1e-3)
        assert bool((whole != old).all())
