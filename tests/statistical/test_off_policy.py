"""Off-policy evaluation where the truth is known: no bias, true intervals, and a model that helps."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from bayesbackprop.bandits import Estimate, LinearThompson, Log, compare, evaluate
from ztests import assert_mean, assert_p_value

pytestmark = pytest.mark.statistical

# Five contexts at even odds, as one-hot vectors, and the chances of a reward of 1 for each of three actions. The true
# value of a policy is a mean of 15 numbers.
CONTEXTS = torch.eye(5)
CHANCES, LOGGED, NEW, OTHER = (
    row.softmax(1) if softmax else row.sigmoid()
    for row, softmax in zip(
        1.2 * torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
        (False, True, True, True),
        strict=True,
    )
)


def value(policy: Tensor) -> float:
    return float((policy * CHANCES).sum(1).mean())


def table(policy: Tensor) -> Callable[[Tensor], Tensor]:
    """The policy whose rows these are, as a function of contexts."""
    return lambda contexts: policy[contexts.argmax(1)]


def logged(n: int, seed: int, offset: float = 0.0) -> Log:
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(5, (n,), generator=random)
    actions = torch.multinomial(LOGGED[kinds], 1, generator=random)[:, 0]
    rewards = torch.rand(n, dtype=torch.float64, generator=random) < CHANCES[kinds, actions]
    return Log(CONTEXTS[kinds], actions, offset + rewards.double(), LOGGED[kinds])


@functools.cache
def estimates(estimator: Any, n: int, logs: int, offset: float = 0.0) -> list[Estimate]:
    return [evaluate(table(NEW), logged(n, seed, offset), estimator) for seed in range(logs)]


def values(found: list[Estimate]) -> Tensor:
    return torch.tensor([each.value for each in found], dtype=torch.float64)


@pytest.mark.parametrize(("estimator", "n", "logs"), [("ips", 30, 2000), ("dr", 30, 600)])
def test_no_bias(estimator: str, n: int, logs: int) -> None:
    """Of few decisions too; and of ``dr`` whatever its model, which here has learnt from 24 rows."""
    assert_mean(values(estimates(estimator, n, logs)), value(NEW), estimator)


def test_no_bias_with_a_wrong_model() -> None:
    wrong = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = [evaluate(table(NEW), logged(50, seed), model=lambda *_: table(wrong)) for seed in range(1000)]
    assert_mean(values(found), value(NEW), "a wrong model")


@pytest.mark.parametrize(("estimator", "logs"), [("ips", 1000), ("snips", 1000), ("dr", 500)])
def test_intervals_hold_the_truth_as_often_as_they_say(estimator: str, logs: int) -> None:
    found = estimates(estimator, 500, logs)
    covered = sum(each.interval[0] < value(NEW) < each.interval[1] for each in found)
    assert_p_value(stats.binomtest(covered, logs, 0.95).pvalue, f"{covered} of {logs} intervals")


def test_intervals_of_comparisons_hold_the_truth_as_often_as_they_say() -> None:
    logs = [logged(500, seed) for seed in range(600)]
    for against, true in ((table(OTHER), value(OTHER)), (None, value(LOGGED))):
        found = [compare(table(NEW), log, against, "snips").interval for log in logs]
        covered = sum(low < value(NEW) - true < high for low, high in found)
        assert_p_value(stats.binomtest(covered, len(logs), 0.95).pvalue, f"{covered} of {len(logs)} intervals")


def test_a_model_makes_the_estimate_vary_less() -> None:
    """With rewards of 10 and 11 nearly all that ``ips`` varies by is the weights'."""
    ips, snips, dr = (values(estimates(each, 300, 100, offset=10.0)).var() for each in ("ips", "snips", "dr"))
    assert dr < 0.05 * ips
    assert dr < 1.1 * snips
    assert_mean(values(estimates("dr", 300, 100, offset=10.0)), 10 + value(NEW), "dr with an offset")


def test_logs_of_an_agent_that_learns_miss_only_what_it_gave_no_chance() -> None:
    """Its probabilities depend on all rewards before, and are exact; some are 0. To these ``ips`` gives no reward."""
    found, masses = [], []
    for seed in range(120):
        agent, random = LinearThompson(5, 3, seed=seed), torch.Generator().manual_seed(seed)
        kinds = torch.randint(5, (25,), generator=random)
        rewards, decisions = [], []
        for kind in kinds:
            decisions.append(agent.decide(CONTEXTS[kind]))
            rewards.append(float(torch.rand((), generator=random) < CHANCES[kind, decisions[-1].action]))
            agent.reward(decisions[-1].id, rewards[-1])
        log = Log.of(decisions, CONTEXTS[kinds], rewards)
        assert log.probabilities is not None
        missed = NEW[kinds] * (log.probabilities == 0)
        estimate = evaluate(table(NEW), log, "ips")
        assert estimate.outside == pytest.approx(float(missed.sum(1).mean()))
        found.append(estimate.value + float((missed * CHANCES[kinds]).sum(1).mean()))
        weights = NEW[kinds, log.actions] / log.propensities
        masses.append(float(weights.mean()) + estimate.outside)
    assert_mean(torch.tensor(found), value(NEW), "ips and what it missed")
    assert_mean(torch.tensor(masses), 1.0, "weights and what they missed")
