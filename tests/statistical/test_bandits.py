"""Bandits: environments and agents draw from the distributions they should, and the agents learn."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from bandit_worlds import ACTIONS, GAINS, GOOD, KINDS, ROWS, expected_reward, greedy_actions, neighbours, walk
from bayesbackprop import Gaussian, Normal
from bayesbackprop.bandits import (
    Agent,
    EpsilonGreedy,
    LinearThompson,
    Table,
    ThompsonSampling,
    Uniform,
    simulate,
)
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Mushrooms
from bayesbackprop_paper.environments import Wheel, mushroom
from ztests import assert_mean, assert_p_value, assert_variance, assert_z

# --- environments ----------------------------------------------------------------------------------------------------


@pytest.mark.statistical
def test_rows_and_outcomes_come_at_even_odds_and_expectations_are_means() -> None:
    seen, seen_outcomes = torch.zeros(5), torch.zeros(5, 2)
    losses = []
    for context, expected, rewards in walk(Table(ROWS, GAINS, 1), 2000):
        row = int(context[0]) // 3
        assert torch.equal(context, ROWS[row])
        assert torch.allclose(expected, GAINS[:, row].mean(0))
        outcome = next(k for k in range(2) if torch.equal(rewards, GAINS[k, row]))
        seen[row] += 1
        seen_outcomes[row, outcome] += 1
        losses.append(rewards - expected)
    assert_p_value(stats.chisquare(seen).pvalue, "rows")
    assert_p_value(stats.chisquare(seen_outcomes.flatten()).pvalue, "outcomes of each row")
    assert_mean(torch.stack(losses), 0.0, "rewards of a table")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Mushrooms:
    """Four mushrooms instead of thousands; the second and third are poisonous."""
    mushrooms = Mushrooms(torch.eye(4), torch.tensor([True, False, False, True]))
    monkeypatch.setattr(data, "mushroom", lambda: mushrooms)
    return mushrooms


@pytest.mark.statistical
def test_mushrooms_pay_as_in_the_paper(few: Mushrooms) -> None:
    eaten: list[float] = []
    environment = mushroom(seed=5)
    assert (environment.features, environment.actions) == (4, 2)
    for t, (context, expected, rewards) in enumerate(walk(environment, 3000)):
        environment.t = t
        assert rewards[0] == 0
        if few.edible[int(context.argmax())]:
            assert (expected.tolist(), environment.best, float(rewards[1])) == ([0, 5], 5, 5)
        else:
            assert (expected.tolist(), environment.best) == ([0, -15], 0)
            eaten.append(float(rewards[1]))
    assert set(eaten) == {5, -35}
    assert_mean(torch.tensor(eaten), -15, "the reward for eating poison")
    assert_z(torch.tensor([(len(eaten) - 1500) / math.sqrt(750)]), "half of the mushrooms are poisonous")


@pytest.mark.statistical
def test_the_wheel_is_as_riquelme_et_al_describe_it() -> None:
    delta, radii, angles, noise = 0.7, [], [], []
    for context, expected, rewards in walk(Wheel(delta, seed=2), 2500):
        x, y = context.tolist()
        radii.append(math.hypot(x, y))
        angles.append(math.atan2(y, x))
        quadrant = {(True, True): 1, (False, True): 2, (False, False): 3, (True, False): 4}[x > 0, y > 0]
        pays = [1.2, 1.0, 1.0, 1.0, 1.0]
        if radii[-1] > delta:
            pays[quadrant] = 50.0
        assert expected.tolist() == pytest.approx(pays)
        noise.append((rewards.double() - expected.double()) / 0.01)
    beyond = sum(radius > delta for radius in radii) / 2500
    share = 1 - delta**2
    assert_z(torch.tensor([(beyond - share) / math.sqrt(share * (1 - share) / 2500)]), "the ring")
    assert_p_value(stats.kstest([radius**2 for radius in radii], "uniform").pvalue, "uniform on the disc: radius")
    assert_p_value(stats.kstest(angles, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue, "angle")
    assert_mean(torch.stack(noise), 0.0, "rewards of the wheel")
    assert_variance(torch.stack(noise), 1.0, "noise of the wheel")
    assert_z(torch.corrcoef(torch.stack(noise).T)[0, 1:] * math.sqrt(len(noise)), "correlations of the noise")


# --- how agents choose -----------------------------------------------------------------------------------------------


def counts(actions: list[int]) -> list[int]:
    return torch.tensor(actions).bincount(minlength=ACTIONS).tolist()


@pytest.mark.statistical
@pytest.mark.parametrize(
    "make",
    [KINDS["uniform"], lambda **kw: KINDS["epsilon, input"](epsilon=1.0, **kw)],
    ids=["uniform", "epsilon 1"],
)
def test_acting_at_random_is_uniform_and_independent(make: Callable[..., Agent]) -> None:
    agent = make(replicas=2, seed=1)
    chosen = [agent.act_all([GOOD, GOOD]) for _ in range(2000)]
    first, second = ([actions[r] for actions in chosen] for r in range(2))
    assert_p_value(stats.chisquare(counts(first)).pvalue, "actions")
    for what, pairs in (("replicas", (first, second)), ("steps", (first[:-1], first[1:]))):
        table = torch.zeros(ACTIONS, ACTIONS)
        for a, b in zip(*pairs, strict=True):
            table[a, b] += 1
        assert_p_value(stats.chisquare(table.flatten()).pvalue, f"pairs of {what}")


@pytest.mark.statistical
def test_each_replica_explores_as_often_as_its_epsilon_says() -> None:
    epsilons = [0.0, 0.3, 0.8]
    agent = KINDS["epsilon, input"](epsilon=epsilons, replicas=3, seed=2)
    contexts, _ = neighbours(agent, 0)
    best, n = greedy_actions(agent, contexts), 2000
    chosen = torch.tensor([agent.act_all(contexts) for _ in range(n)])
    other = (chosen != torch.tensor(best)).double().mean(0)
    assert other[0] == 0
    expected = 0.75 * torch.tensor(epsilons[1:], dtype=torch.float64)
    assert_z((other[1:] - expected) / (expected * (1 - expected) / n).sqrt(), "actions that are not the best")


@pytest.mark.statistical
@pytest.mark.parametrize(("draws", "settling"), [(1, None), (3, None), (1, 10)])
def test_thompson_sampling_takes_an_action_as_often_as_its_draws_find_it_best(draws: int, settling: int | None) -> None:
    # A linear network: the difference of two outputs is normal, and its average over draws too.
    options: Any = {"hidden": (), "sigma": 0.5, "draws": draws, "likelihood": Gaussian(1.0), "settling": settling}
    agent: Any = ThompsonSampling(2, 2, exploration=0.8, replicas=3, seed=3, **options)
    tries = torch.tensor([[20, 0], [3, 7], [0, 5]])
    with torch.no_grad():
        agent._tries.copy_(tries)
        agent.net.layers[0].weight.zero_()
        agent.net.layers[0].bias.copy_(torch.tensor([0.0, 0.6]))
    contexts = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, -1.0]])
    n = 1500
    chosen = torch.tensor([agent.act_all(contexts) for _ in range(n)]).double()
    width = torch.ones(3, 2, dtype=torch.float64)
    if settling is not None:
        total = tries.double().sum(1, keepdim=True)
        ratio = (1 + total) / (1 + tries.double())
        width = (settling / (1 + tries.double()) * (1 + ratio.log()) * (ratio / 2).clamp(min=1)).sqrt()
    variance = (0.8 * 0.5 * width).square().sum(1)
    spread = (variance * (1 + contexts.double().square().sum(1)) / draws).sqrt()
    expected = torch.distributions.Normal(0, 1).cdf(0.6 / spread)
    assert_z((chosen.mean(0) - expected) / (expected * (1 - expected) / n).sqrt(), "the better action")
    # Replicas and decisions draw networks of their own.
    pairs = [(chosen[:, 0], chosen[:, 1]), (chosen[:, 1], chosen[:, 2]), (chosen[1:, 1], chosen[:-1, 1])]
    z = [float(torch.corrcoef(torch.stack(pair))[0, 1]) * math.sqrt(n) for pair in pairs]
    assert_z(torch.tensor(z), "correlations")


@pytest.mark.statistical
@pytest.mark.parametrize("encoding", ["input", "output"])
def test_probabilities_of_decisions_are_those_of_acting(encoding: str) -> None:
    options: Any = {"hidden": (6,), "sigma": 0.4, "draws": 2, "exploration": 0.7, "encoding": encoding, "seed": 2}
    agent = ThompsonSampling(2, 3, candidates=20_000, likelihood=Gaussian(1.0), **options)
    agent._tries.copy_(torch.tensor([[9, 2, 0]]))
    context, n = [0.5, -1.0], 3000
    acting = torch.tensor([agent.act(context) for _ in range(n)]).bincount(minlength=3) / n
    for mask in (None, [True, False, True]):
        shares = torch.tensor(agent.explain(context, mask).probabilities)
        if mask is None:
            assert float(shares.min()) > 0.05
            error = (shares * (1 - shares) * (1 / n + 1 / 20_000)).sqrt()
            assert_z((acting - shares) / error, "actions")
        assert bool((shares > 0).all()) == (mask is None)


@pytest.mark.statistical
def test_decisions_of_the_linear_agent_have_the_exact_probability() -> None:
    # So many degrees of freedom that the noise is known: the difference of two rewards is normal.
    agent = LinearThompson(2, 2, precision=0.5, a=1e9, b=4e9, seed=5)
    for n in range(12):
        agent.observe([math.sin(n), math.cos(3 * n)], n % 2, 1.0 + n % 3)
    x, tensors = torch.tensor([0.3, -0.8, 1.0], dtype=torch.float64), agent.tensors()
    mean = [float(x @ torch.linalg.solve(tensors["matrix"][0, a], tensors["moment"][0, a])) for a in range(2)]
    variance = [4 * float(x @ torch.linalg.solve(tensors["matrix"][0, a], x)) for a in range(2)]
    exact = float(stats.norm.cdf((mean[1] - mean[0]) / math.sqrt(sum(variance))))
    assert 0.1 < exact < 0.9
    n, context = 2000, [0.3, -0.8]
    decisions = [agent.decide(context) for _ in range(n)]
    assert decisions[0].means == pytest.approx(mean)
    shares = torch.tensor([each.probabilities[1] for each in decisions], dtype=torch.float64)
    taken = torch.tensor([float(each.action) for each in decisions], dtype=torch.float64)
    acted = torch.tensor([float(agent.act(context)) for _ in range(n)], dtype=torch.float64)
    assert_mean(torch.stack([shares, taken, acted], 1), exact, "the second action")
    assert_mean((taken - shares)[:, None], 0.0, "the propensity")
    assert_variance(shares[:, None], exact * (1 - exact) / agent.candidates, "frequencies of candidates")
    spreads = torch.tensor([each.spreads for each in decisions], dtype=torch.float64).square()
    expected = torch.tensor(variance, dtype=torch.float64) * (1 - 1 / agent.candidates)
    assert_mean(spreads, expected, "spreads")


@pytest.mark.statistical
@pytest.mark.parametrize("kind", KINDS)
def test_inverse_propensity_scores_are_unbiased(kind: str) -> None:
    # The value of a policy that always takes the last action, from the decisions of another; some are masked.
    agent, n = KINDS[kind](seed=6, **({"epsilon": 0.5} if "epsilon" in kind else {})), 1500
    random = torch.Generator().manual_seed(1)
    contexts = torch.randn(n, 3, generator=random)
    masks = torch.cat([torch.rand(n, ACTIONS - 1, generator=random) < 0.8, torch.ones(n, 1, dtype=torch.bool)], 1)
    rewards = (contexts.sum(1, keepdim=True) + torch.arange(4.0)).double()
    scores = []
    for context, mask, gains in zip(contexts, masks, rewards, strict=True):
        explanation = agent.explain(context, mask)
        decision = agent.decide(context, mask)
        # An action whose probability is 0 here cannot be scored; all that is taken is.
        known = torch.tensor([p > 0 for p in explanation.probabilities])
        expected = float((gains * known).sum())
        scores.append(float(gains[decision.action]) / decision.propensity - expected)
        if len(scores) % 10 == 0:
            agent.reward(decision.id, float(gains[decision.action]))
    assert_mean(torch.tensor(scores)[:, None], 0.0, "inverse propensity scores")


# --- the linear agent ------------------------------------------------------------------------------------------------


def linear_data(n: int, replicas: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(8)
    contexts = torch.randn(n, 2, generator=random)
    rewards = contexts @ torch.tensor([1.0, -2.0]) + 0.5 + 0.3 * torch.randn(n, generator=random)
    return contexts[:, None].expand(n, replicas, 2), torch.zeros(n, replicas, dtype=torch.int64), rewards


@pytest.mark.statistical
@pytest.mark.parametrize("n", [0, 5])
def test_linear_draws_are_of_the_exact_posterior(n: int) -> None:
    # Against an action whose reward is known to be v, the other is taken as often as its draws exceed v, and those
    # have a multivariate t-distribution.
    replicas, precision, a, b = 1500, 0.5, 1.5, 2.0
    contexts, actions, rewards = linear_data(n, replicas)
    x = torch.cat([contexts[:, 0].double(), torch.ones(n, 1)], 1)
    matrix = precision * torch.eye(3, dtype=torch.float64) + x.T @ x
    mean = torch.linalg.solve(matrix, x.T @ rewards.double())
    a_n = a + n / 2
    b_n = b + 0.5 * float(rewards.double().square().sum() - mean @ matrix @ mean)
    agent = LinearThompson(2, 2, precision=precision, a=a, b=b, replicas=replicas, seed=n)
    for xs, each, reward in zip(contexts, actions, rewards, strict=True):
        agent.observe_all(xs, each.tolist(), reward.expand(replicas))
    z = []
    for context in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]):
        at = torch.tensor([*context, 1.0], dtype=torch.float64)
        scale = math.sqrt(b_n / a_n * float(at @ torch.linalg.solve(matrix, at)))
        posterior = stats.t(2 * a_n, float(at @ mean), scale)
        for share in (0.05, 0.3, 0.9, 0.99):
            known = agent.tensors()
            known["matrix"][:, 1] = 1e20 * torch.eye(3, dtype=torch.float64)
            known["root"][:, 1] = 1e10 * torch.eye(3, dtype=torch.float64)
            known["moment"][:, 1] = torch.tensor([0.0, 0.0, 1e20 * posterior.isf(share)], dtype=torch.float64)
            agent.restore(known, agent.acted, agent.observed)
            taken = agent.act_all(at[:2].expand(replicas, 2)).count(0) / replicas
            z.append((taken - share) / math.sqrt(share * (1 - share) / replicas))
    assert_z(torch.tensor(z), "draws of the linear model")


@pytest.mark.statistical
def test_decisions_of_the_linear_agent_are_independent() -> None:
    agent = LinearThompson(2, 2, replicas=2, seed=9)
    chosen = torch.tensor([agent.act_all(torch.ones(2, 2)) for _ in range(1000)]).double()
    assert_mean(chosen, 0.5, "either action")
    pairs = [(chosen[:, 0], chosen[:, 1]), (chosen[1:, 0], chosen[:-1, 0])]
    z = [float(torch.corrcoef(torch.stack(pair))[0, 1]) * math.sqrt(1000) for pair in pairs]
    assert_z(torch.tensor(z), "correlations")


@pytest.mark.learning
def test_the_linear_agent_finds_the_best_action() -> None:
    contexts = torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    rewards = contexts @ torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]) + torch.tensor([0.0, 0.2, -0.2])
    places = [[Table(contexts, rewards, seed) for seed in range(5)] for _ in range(2)]
    regret = simulate(places[0], LinearThompson(2, 3, replicas=5), 200)
    random = simulate(places[1], Uniform(2, 3, replicas=5), 200)
    assert float(regret[:, -1].max()) < 0.15 * float(random[:, -1].min())
    assert float((regret[:, -1] - regret[:, 99]).mean()) < 0.02 * float((random[:, -1] - random[:, 99]).mean())


# --- the neural agents learn -----------------------------------------------------------------------------------------


PAPER: dict[str, Any] = {
    "encoding": "input", "scale": 1.0, "halving": None, "exploration": 1.0, "settling": None, "temperature": 1.0,
}  # fmt: skip


@pytest.mark.learning
@pytest.mark.parametrize("likelihood", [Gaussian(0.1), None], ids=["as in the paper", "by default"])
def test_thompson_sampling_explores_and_then_loses_almost_nothing(likelihood: Gaussian | None) -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    places = [[Table(torch.eye(3), rewards, seed) for seed in range(8)] for _ in range(2)]
    learning: Any = {"hidden": [16], "updates": 16, "batch_size": 32, "learning_rate": 0.02}
    made = {} if likelihood is None else PAPER | {"likelihood": likelihood}
    agent = ThompsonSampling(3, 2, prior=Normal(0.5), sigma=0.3, replicas=8, seed=1, **learning, **made)
    first = [set() for _ in range(8)]  # type: ignore[var-annotated]
    act_all = agent.act_all

    def watched(contexts: Any) -> list[int]:
        actions = act_all(contexts)
        for tried, action in zip(first, actions, strict=True):
            if agent.acted <= 15:
                tried.add(action)
        return actions

    agent.act_all = watched  # type: ignore[method-assign]
    regret = simulate(places[0], agent, 80)
    random = simulate(places[1], Uniform(3, 2, replicas=8), 80)
    assert all(len(tried) == 2 for tried in first)
    assert float(regret[:, 9].mean()) > 1
    assert float(regret[:, -1].mean()) < 0.4 * float(random[:, -1].mean())
    assert float((regret[:, -1] - regret[:, 49]).mean()) < 0.05 * float((random[:, -1] - random[:, 49]).mean())


@pytest.mark.learning
def test_epsilon_greedy_learns_the_mean_reward() -> None:
    outcomes = torch.tensor([[[4.0, 1.0]], [[-2.0, 2.0]]])
    agent: Any = EpsilonGreedy(
        1, 2, epsilon=1.0, hidden=[8], updates=4, learning_rate=0.01, scale=10.0, likelihood=Gaussian(1.0)
    )
    simulate([Table(torch.ones(1, 1), outcomes)], agent, 200)
    remembered = [
        10 * float(agent.tensors()["rewards"][:200][agent.tensors()["actions"][:200] == action].mean())
        for action in range(2)
    ]
    learnt = [10 * float(expected_reward(agent, torch.ones(1, 1, 1), torch.tensor([[a]]))) for a in range(2)]
    assert learnt == pytest.approx(remembered, abs=0.3)
    with torch.no_grad():
        assert agent._outputs(agent.net, torch.ones(1, 1))[0].tolist() == pytest.approx([x / 10 for x in learnt])
