"""The linear regression beside the network of Thompson sampling."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bayesbackprop.bandits import ThompsonSampling, load
from bayesbackprop.bandits._regression import Regression, fits
from ztests import assert_z

FEATURES, ACTIONS, N = 3, 4, 60


def observations(width: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    contexts = torch.randn(N, width, generator=random)
    return contexts, torch.arange(N) % ACTIONS, torch.randn(N, generator=random, dtype=torch.float64)


def taught(width: int, numbers: int) -> Regression:
    regression = Regression(1, ACTIONS, FEATURES, numbers)
    for context, action, reward in zip(*observations(width), strict=True):
        regression.learn(context[None], action[None], reward[None])
    return regression


def ridge(x: Tensor, r: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """x^T A^-1 b and x^T A^-1 x, by the definition."""
    inverse = torch.linalg.inv(torch.eye(x.shape[1], dtype=torch.float64) + x.T @ x)
    return at @ inverse @ (x.T @ r), (at @ inverse * at).sum(-1)


@pytest.mark.identities
def test_each_action_has_the_ridge_regression_of_its_rewards() -> None:
    contexts, actions, rewards = observations(FEATURES)
    at = torch.randn(5, FEATURES)
    mean, error, trust = taught(FEATURES, 0).expect(at[None], None)
    pad = torch.nn.functional.pad
    for action in range(ACTIONS):
        its = actions == action
        x, new = (pad(each.double(), (0, 1), value=1.0) for each in (contexts[its], at))
        expected, like = ridge(x, rewards[its], new)
        torch.testing.assert_close(mean[0, :, action], expected)
        torch.testing.assert_close(error[0, :, action], (rewards.square().mean() * like).sqrt())
    assert bool((trust == 1).all())  # all were tried as often


@pytest.mark.identities
def test_with_numbers_for_the_actions_one_regression_is_that_of_products() -> None:
    observed, _, rewards = observations(FEATURES + 2)
    at, codes = torch.randn(5, FEATURES), torch.randn(ACTIONS, 2)
    mean, error, trust = taught(FEATURES + 2, 2).expect(at[None], codes.expand(1, 5, -1, -1))

    def products(context: Tensor, code: Tensor) -> Tensor:
        one = torch.ones(1, dtype=torch.float64)
        return torch.outer(torch.cat([context.double(), one]), torch.cat([code.double(), one])).flatten()

    x = torch.stack([products(*each.split([FEATURES, 2])) for each in observed])
    for row in range(5):
        new = torch.stack([products(at[row], code) for code in codes])
        expected, like = ridge(x, rewards, new)
        torch.testing.assert_close(mean[0, row], expected)
        torch.testing.assert_close(error[0, row], (rewards.square().mean() * like).sqrt())
    assert bool((trust == 1).all())


@pytest.mark.identities
@pytest.mark.parametrize("tries", [3, 10, 1000])
def test_of_an_action_that_is_neglected_the_line_is_doubted(tries: int) -> None:
    regression, action = Regression(1, 2, 1, 0), torch.tensor([0])
    here = torch.tensor([[3.0]])
    for _ in range(tries):
        regression.learn(here, action, torch.ones(1, dtype=torch.float64))
    _, error, trust = regression.expect(here[None], None)
    # x = (3, 1), so x^T x = 10: of action 0 A = 1 + tries x x^T, of action 1 A = 1.
    n = [(1 + 10 * tries) / 10, 1 / 10]
    average = sum(n) / 2
    assert average > 5 * n[1]
    doubt = math.sqrt(1 + math.log(average / 5 / n[1]))
    assert error[0, 0].tolist() == pytest.approx([n[0] ** -0.5, n[1] ** -0.5 * doubt])
    assert trust[0, 0].tolist() == pytest.approx([1.0, n[1] * max(1, 5 / average)])


@pytest.mark.equivalence
@pytest.mark.parametrize("numbers", [0, 2])
def test_many_at_once_are_learnt_as_one_by_one(numbers: int) -> None:
    one_by_one, at_once = taught(FEATURES + numbers, numbers), Regression(1, ACTIONS, FEATURES, numbers)
    contexts, actions, rewards = observations(FEATURES + numbers)
    for part in (slice(0, 20), slice(20, None)):
        at_once.learn_many(contexts[part], actions[part], rewards[part])
    torch.testing.assert_close(at_once.tensors(), one_by_one.tensors())


def test_the_share_is_that_of_who_predicts_better() -> None:
    for right, expected in (("linear", 1.0), ("network", 0.0), ("both", 0.5)):
        regression = Regression(1, 1, 1, 0)
        random = torch.Generator().manual_seed(3)
        for _ in range(400):
            x = torch.randn(1, 1, generator=random)
            linear, other = 2.0 * x[0].double(), torch.randn(1, generator=random, dtype=torch.float64)
            rewards = {"linear": linear, "network": other, "both": (linear + other) / 2}[right]
            regression.learn(x, torch.tensor([0]), linear)
            regression.compare(x, torch.tensor([0]), rewards, other)
        share = regression.share(torch.zeros(1, dtype=torch.float64))
        assert float(share) == pytest.approx(expected, abs=0.02)
        wide = regression.share(torch.tensor([-1e6, 1e6], dtype=torch.float64))
        assert wide.tolist() == [0.0, 1.0]


def test_the_share_is_judged_by_the_last_quarter_of_all() -> None:
    kept = []
    for count in (10, 2000, 40_000):
        regression = Regression(1, 1, 1, 0)
        regression.count.fill_(count)
        regression.below.fill_(1.0)
        same = torch.zeros(1, dtype=torch.float64)
        regression.compare(torch.zeros(1, 1), torch.tensor([0]), same, same)  # both expect 0: nothing is added
        kept.append(1 / (1 - float(regression.below)))
    assert kept == pytest.approx([500, 500, 10_000])


def test_what_is_forgotten_is_as_at_the_start() -> None:
    regression, fresh = taught(FEATURES, 0), Regression(1, ACTIONS, FEATURES, 0)
    regression.forget(torch.tensor([True]))
    torch.testing.assert_close(regression.tensors(), fresh.tensors(), rtol=0, atol=0)


def test_matrices_that_are_too_large_are_left_out(tmp_path: Path) -> None:
    assert fits(1000, 4, 0)
    assert not fits(1000, 5, 0)
    agent = ThompsonSampling(1500, 2, hidden=[2], memory=4, updates=1)
    assert agent._regression is None
    agent.observe([0.0] * 1500, 1, 1.0)
    agent.save(tmp_path / "agent")
    assert load(tmp_path / "agent").act([0.0] * 1500) in (0, 1)


@pytest.mark.statistical
def test_probabilities_of_decisions_are_those_of_acting_when_the_regression_has_learnt() -> None:
    agent = ThompsonSampling(2, 3, hidden=[4], sigma=0.3, updates=1, candidates=20_000, seed=4)
    random = torch.Generator().manual_seed(2)
    for n in range(40):
        context = torch.randn(2, generator=random)
        agent.observe(context, n % 3, float(context[0]) * (n % 3) + 0.3 * n % 2)
    agent._regression.above.copy_(0.4 * agent._regression.below)  # a share that varies, and contexts that are new
    context, n = [-4.0, 1.0], 3000
    shares = torch.tensor(agent.explain(context).probabilities, dtype=torch.float64)
    assert float(shares.max()) < 0.95
    acting = torch.tensor([agent.act(context) for _ in range(n)]).bincount(minlength=3) / n
    error = (shares * (1 - shares) * (1 / n + 1 / 20_000)).sqrt()
    possible = shares > 0.01
    assert_z(((acting - shares) / error)[possible], "actions")
