"""A log is learnt in one call."""

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from bandit_worlds import ACTIONS, FEATURES, GOOD, KINDS, NAN, NEURAL, assert_same, live, snapshot
from bayesbackprop import Bernoulli
from bayesbackprop.bandits import EpsilonGreedy, LinearThompson, ThompsonSampling
from bayesbackprop.bandits.neural import _FEWEST, _PASSES

pytestmark = pytest.mark.identities


def log(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    contexts = torch.randn(n, FEATURES, generator=random)
    return contexts, torch.randint(ACTIONS, (n,), generator=random), torch.randn(n, generator=random)


def test_the_linear_posterior_is_that_of_one_by_one() -> None:
    together, alone = (LinearThompson(FEATURES, ACTIONS, precision=0.3, seed=1) for _ in range(2))
    for each in (together, alone):
        live(each, range(3))
    contexts, actions, rewards = log(200)
    actions[actions == 1] = 2  # of one action nothing is known
    together.warm_start(contexts, actions, rewards)
    for row in zip(contexts, actions, rewards.tolist(), strict=True):
        alone.observe(*row)  # type: ignore[arg-type]
    assert together.observed == alone.observed == 203
    found, expected = snapshot(together), snapshot(alone)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", NEURAL)
@pytest.mark.parametrize("n", [5, 8, 30])
def test_the_memory_holds_the_newest(kind: str, n: int) -> None:
    agents: list[Any] = [KINDS[kind](memory=8) for _ in range(2)]
    for each in agents:
        live(each, range(3))
    contexts, actions, rewards = log(n)
    agents[0].warm_start(contexts, actions, rewards)
    for row in zip(contexts, actions, rewards.tolist(), strict=True):
        agents[1].observe(*row)
    found, expected = (snapshot(each) for each in agents)
    same = ["contexts", "actions", "rewards", "is_number", "tries", "observed", "square"]
    assert {name for name in expected if name in same} >= {"contexts", "actions", "rewards", "observed"}
    for name in same:
        if name in expected:
            torch.testing.assert_close(found[name], expected[name], msg=name)
    assert int(found["observed"]) == n + 3


@pytest.mark.parametrize(("n", "updates", "expected"), [(20, 3, 60), (700, 3, _FEWEST), (4800, 3, _PASSES * 75)])
def test_the_number_of_updates_is_as_said(n: int, updates: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = EpsilonGreedy(FEATURES, ACTIONS, hidden=(2,), updates=updates, batch_size=64, halving=100)
    rates: list[float] = []

    def update(inputs: Tensor, targets: Tensor, remembered: int, _: None) -> None:
        assert len(inputs) == len(targets) == min(64, n)
        assert remembered == n
        rates.append(agent._optimiser.param_groups[0]["lr"])

    monkeypatch.setattr(agent, "_update", update)
    agent.warm_start(*log(n))
    assert len(rates) == expected
    assert rates[0] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-3 / (1 + n / 100), rel=0.02 + 100 / expected)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("kind", NEURAL)
def test_a_log_is_learnt_by_the_seed(kind: str) -> None:
    agents = [KINDS[kind](seed=seed) for seed in (1, 1, 2)]
    for agent in agents:
        agent.warm_start(*log(40))
    assert_same(snapshot(agents[0]), snapshot(agents[1]))
    assert not torch.equal(snapshot(agents[0])["parameter.0"], snapshot(agents[2])["parameter.0"])


def test_actions_and_numbers_come_as_lists_arrays_and_tensors() -> None:
    contexts, actions, rewards = log(12)
    forms: list[Any] = [
        (contexts, actions, rewards),
        (contexts.numpy(), actions.numpy(), rewards.numpy()),
        (contexts.tolist(), actions.tolist(), rewards.tolist()),
        (list(contexts), list(actions), list(rewards)),
        (contexts, actions.to(torch.uint8), rewards.double()),
    ]
    agents = [KINDS["linear"]() for _ in forms]
    for agent, form in zip(agents, forms, strict=True):
        agent.warm_start(*form)
        assert_same(snapshot(agent), snapshot(agents[0]))


def test_features_of_the_requests_are_remembered() -> None:
    codes = torch.randn(ACTIONS, 2)
    agents: list[Any] = [KINDS["thompson, input"](action_features=codes.tolist()) for _ in range(3)]
    contexts, actions, rewards = log(6)
    agents[0].warm_start(contexts, actions, rewards)
    agents[1].warm_start(contexts, actions, rewards, features=codes.expand(6, -1, -1))
    agents[2].warm_start(contexts, actions, rewards, features=codes[actions])
    for each in agents[1:]:
        assert_same(snapshot(each), snapshot(agents[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_pandas_are_taken_as_the_numbers_they_hold(kind: str) -> None:
    """Also rows that were picked from a larger table, and so are not numbered from 0 on."""
    contexts, actions, rewards = log(12)
    numbers = {"action": actions.numpy(), "reward": rewards.numpy()}
    table = pd.DataFrame(contexts.numpy(), columns=["a", "b", "c"]).assign(**numbers)[2:]
    given, mask = table[["a", "b", "c"]], [True, False, True, True]

    def use(agent: Any, xs: Any, taken: Any, gains: Any, row: Any, masks: Any, column: Any) -> Any:
        agent.warm_start(xs, taken, gains)
        made = agent.decide_many(xs, masks)
        agent.reward_many(column([each.id for each in made]), gains)
        agent.observe(row, 1, 1.0)
        agent.check_rewards(gains)
        return agent, agent.explain(row)

    agent, found = use(
        KINDS[kind](),
        given,
        table["action"],
        table["reward"],
        given.iloc[0],
        pd.DataFrame([mask] * 10, index=table.index),
        lambda ids: pd.Series(ids, index=table.index),
    )
    plain, expected = use(KINDS[kind](), contexts[2:], actions[2:], rewards[2:], contexts[2], [mask] * 10, list)
    assert_same(snapshot(agent), snapshot(plain))
    assert found == expected
    words = table.assign(a="x")[["a", "b", "c"]]
    for bad, named in ((words, "context"), (given[["a"]], "context"), (table["a"], "context")):
        with pytest.raises(ValueError, match=f"'{named}' parameter of"):
            agent.decide_many(bad)
    with pytest.raises(ValueError, match=r"'contexts' parameter of .* must be a list, an array or a tensor"):
        agent.decide_many(None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_log_is_refused_and_changes_nothing(kind: str) -> None:
    agent = KINDS[kind]()
    live(agent, range(2))
    before, (contexts, actions, rewards) = snapshot(agent), log(5)
    bad: list[tuple[Any, Any, Any, str]] = [
        (contexts[:4], actions, rewards, "contexts"),
        (contexts, actions[:4], rewards, "contexts"),
        (contexts, actions, rewards[:4], "contexts"),
        (contexts[:0], actions[:0], rewards[:0], "contexts"),
        (contexts[:, :2], actions, rewards, "context"),
        (contexts * NAN, actions, rewards, "context"),
        (contexts, actions + 1, rewards, "action"),
        (contexts, actions.float(), rewards, "action"),
        (contexts, actions, rewards * NAN, "reward"),
        (contexts, actions, None, "rewards"),
        (contexts, 1, rewards, "actions"),
    ]
    actions[0] = ACTIONS - 1
    for xs, taken, gains, named in bad:
        with pytest.raises(ValueError, match=rf"'{named}' parameter of {type(agent).__name__}\.warm_start must be"):
            agent.warm_start(xs, taken, gains)
    assert_same(snapshot(agent), before)


def test_rewards_that_a_likelihood_does_not_have_are_refused() -> None:
    agent = ThompsonSampling(FEATURES, ACTIONS, hidden=(3,), memory=4, likelihood=Bernoulli())
    with pytest.raises(ValueError, match=r"'reward' parameter of ThompsonSampling\.warm_start must be 0 or 1"):
        agent.warm_start([GOOD, GOOD], [0, 1], [1.0, 0.5])
    assert agent.observed == 0
