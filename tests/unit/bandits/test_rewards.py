"""What neural agents find out from rewards: their kind and their scale; and what is said of actions."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bandit_worlds import FEATURES, GOOD, assert_same, live, snapshot
from bayesbackprop import Bernoulli, Gaussian, Poisson
from bayesbackprop.bandits import EpsilonGreedy, ThompsonSampling, load
from bayesbackprop.likelihoods import Likelihood

pytestmark = pytest.mark.identities

SMALL: dict[str, Any] = {"hidden": [16], "updates": 1, "batch_size": 4, "memory": 300}


def observe_all(agent: Any, rewards: list[float]) -> None:
    for reward in rewards:
        agent.observe(GOOD, 0, reward)


def test_the_scale_is_the_size_of_the_rewards_and_later_does_not_fall() -> None:
    agent: Any = ThompsonSampling(FEATURES, 2, **SMALL)
    observe_all(agent, [0.0, 1.0, 1.0])
    assert float(agent._found_scale) == 1  # as long as they are yes or no
    observe_all(agent, [-5.0, 0.0])
    assert float(agent._found_scale) == pytest.approx(math.sqrt(27 / 5))
    observe_all(agent, [0.0] * 95)
    assert float(agent._found_scale) == pytest.approx(math.sqrt(27 / 100))
    observe_all(agent, [0.0] * 50)
    assert float(agent._found_scale) == pytest.approx(math.sqrt(27 / 100))
    observe_all(agent, [100.0])
    assert float(agent._found_scale) == pytest.approx(math.sqrt(10027 / 151))
    # The memory keeps the rewards as they were.
    assert agent.tensors()["rewards"][150, 0] == 100


def test_rewards_that_are_all_0_have_a_scale() -> None:
    agent: Any = ThompsonSampling(FEATURES, 2, likelihood=Gaussian(0.5), **SMALL)
    observe_all(agent, [0.0, 0.0])
    assert float(agent._found_scale) == 1


def test_a_scale_that_is_given_stays() -> None:
    agent: Any = ThompsonSampling(FEATURES, 2, scale=4.0, **SMALL)
    observe_all(agent, [2.0, -6.0])
    assert float(agent._found_scale) == 1
    assert agent.tensors()["rewards"][:2, 0].tolist() == [0.5, -1.5]
    assert "scale" not in agent.tensors()


LIKELIHOODS: dict[str, tuple[Likelihood, list[float]]] = {
    "fixed": (Gaussian(0.5), [1.5, -2.0]),
    "learnt": (Gaussian("learnt", initial=0.3), [1.5, -2.0]),
    "per input": (Gaussian("per-input", least=0.2), [1.5, -2.0]),
    "yes or no": (Bernoulli(), [1.0, 0.0]),
    "counts": (Poisson(), [3.0, 0.0]),
}


@pytest.mark.parametrize("kind", [ThompsonSampling, EpsilonGreedy])
@pytest.mark.parametrize("encoding", ["input", "output"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_any_likelihood_is_learnt_by_and_kept_in_a_file(name: str, encoding: Any, kind: Any, tmp_path: Path) -> None:
    likelihood, rewards = LIKELIHOODS[name]
    agent = kind(FEATURES, 2, likelihood=likelihood, encoding=encoding, **SMALL)
    before = snapshot(agent)
    observe_all(agent, rewards)
    parameters = [key for key in before if key.startswith("parameter.")]
    assert not any(torch.equal(before[key], agent.tensors()[key]) for key in parameters[:1] + parameters[-1:])
    agent.save(tmp_path / "agent")
    copy = load(tmp_path / "agent")
    assert copy.described() == agent.described()
    for each in (agent, copy):
        observe_all(each, rewards)
    assert_same(snapshot(copy), snapshot(agent))
    assert [copy.act(GOOD) for _ in range(5)] == [agent.act(GOOD) for _ in range(5)]
    # That of the user is left alone.
    assert all(torch.equal(p, torch.tensor(math.log(0.3))) for p in likelihood.parameters())


@pytest.mark.parametrize(
    ("likelihood", "bad"), [(Bernoulli(), 0.5), (Bernoulli(), 2.0), (Poisson(), -1.0), (Poisson(), 0.5)]
)
def test_a_reward_that_the_likelihood_does_not_have_is_refused_and_changes_nothing(
    likelihood: Likelihood, bad: float
) -> None:
    agent = ThompsonSampling(FEATURES, 2, likelihood=likelihood, **SMALL)
    observe_all(agent, [1.0, 0.0])
    before = snapshot(agent)
    with pytest.raises(
        ValueError, match=r"'reward' parameter of ThompsonSampling\.observe must be .*, by its likelihood"
    ):
        agent.observe(GOOD, 0, bad)
    assert_same(snapshot(agent), before)


def test_action_features_stand_for_the_actions(tmp_path: Path) -> None:
    codes = [[0.5, -1.0], [2.0, 0.0], [0.5, -1.0], [0.0, 0.3]]
    agent: Any = ThompsonSampling(FEATURES, 4, encoding="input", action_features=codes, **SMALL)
    contexts, actions = torch.randn(6, 1, FEATURES), torch.randint(4, (6, 1))
    inputs = agent._inputs(contexts, actions)
    assert torch.equal(inputs, torch.cat([contexts[:, 0], torch.tensor(codes)[actions[:, 0]]], -1))
    live(agent, range(4))
    # Actions that are alike have the same value, whichever was tried.
    with torch.no_grad():
        values = agent._outputs(agent.net, torch.randn(1, FEATURES))[0]
    assert float(values[0]) == float(values[2]) != float(values[1])
    agent.save(tmp_path / "agent")
    assert load(tmp_path / "agent").described() == agent.described()


@pytest.mark.parametrize(
    "codes", [[[1.0]], [[1.0], [2.0], [math.nan]], [1.0, 2.0, 3.0], [[], [], []], "abc", [[1.0], [1.0, 2.0], [3.0]]]
)
def test_action_features_are_numbers_for_each_action(codes: Any) -> None:
    with pytest.raises(ValueError, match="The 'action_features' parameter of ThompsonSampling"):
        ThompsonSampling(2, 3, encoding="input", action_features=codes)


def test_action_features_are_part_of_an_input() -> None:
    with pytest.raises(ValueError, match="'action_features' parameter of EpsilonGreedy must be None, unless"):
        EpsilonGreedy(2, 2, action_features=[[1.0], [2.0]])


def test_a_wild_reward_is_noticed() -> None:
    agent = ThompsonSampling(FEATURES, 2, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(100):
            agent.observe(GOOD, number % 2, number % 3)
        agent.observe(GOOD, 0, 10.0)
    with pytest.warns(UserWarning, match=r"a reward of 1e\+06 is \d+ times the size of those before"):
        agent.observe(GOOD, 0, 1e6)
