"""Off-policy evaluation: known values, identities of the estimators, and what is said when a log cannot answer."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesbackprop.bandits import EpsilonGreedy, Estimate, Log, compare, evaluate
from bayesbackprop.bandits.off_policy import _linear, _ridge

pytestmark = pytest.mark.identities

ESTIMATORS = ("ips", "snips", "dr")

# A log of six decisions, a policy, and a model, all of numbers that are exact in tenths or hundredths.
ACTIONS = [0, 1, 2, 1, 0, 2]
REWARDS = ["1", "0", "2", "3", "-1", "0.5"]
PROPENSITIES = ["0.5", "0.25", "0.25", "0.5", "0.8", "0.1"]
POLICY = ["0.2 0.5 0.3", "0.1 0.8 0.1", "0 0 1", "0.4 0.3 0.3", "0.6 0.2 0.2", "0.25 0.25 0.5"]
EXPECTED = ["0.5 1 1.5", "0 0.25 0.5", "1 1 1", "0.75 2 0.1", "-0.5 0 0.5", "0.2 0.4 0.6"]

# What version 0.4.1 of the Open Bandit Pipeline says of them.
OPEN_BANDIT_PIPELINE = {"ips": 1.9916666666666665, "snips": 0.85663082437276, "dr": 1.1008333333333333}


def floats(rows: list[str]) -> list[list[float]]:
    return [[float(each) for each in row.split()] for row in rows]


def six() -> Log:
    contexts = [[float(row)] for row in range(6)]
    return Log(contexts, ACTIONS, [float(r) for r in REWARDS], [float(p) for p in PROPENSITIES])


def known(rows: Any) -> Callable[..., Any]:
    """The model that says ``rows`` of contexts that are the numbers of rows."""
    return lambda *_: lambda contexts: torch.tensor(rows, dtype=torch.float64)[contexts[:, 0].long()]


def by_hand() -> dict[str, list[Fraction]]:
    """What each row says of the value, in exact numbers."""
    pi, q = ([[Fraction(each) for each in row.split()] for row in rows] for rows in (POLICY, EXPECTED))
    r, p = [Fraction(each) for each in REWARDS], [Fraction(each) for each in PROPENSITIES]
    w = [pi[i][a] / p[i] for i, a in enumerate(ACTIONS)]
    ratio = sum(w[i] * r[i] for i in range(6)) / sum(w)
    return {
        "ips": [w[i] * r[i] for i in range(6)],
        "snips": [ratio + w[i] * (r[i] - ratio) * 6 / sum(w) for i in range(6)],
        "dr": [sum(map(Fraction.__mul__, pi[i], q[i])) + w[i] * (r[i] - q[i][a]) for i, a in enumerate(ACTIONS)],
    }


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_known_values(estimator: Any) -> None:
    found = evaluate(floats(POLICY), six(), estimator, model=known(floats(EXPECTED)))
    rows = by_hand()[estimator]
    mean = sum(rows) / 6
    variance = sum((row - mean) ** 2 for row in rows) / 5
    assert found.value == pytest.approx(float(mean), rel=1e-12)
    assert found.value == pytest.approx(OPEN_BANDIT_PIPELINE[estimator], rel=1e-12)
    assert found.standard_error == pytest.approx(math.sqrt(variance / 6), rel=1e-12)
    assert found.interval == pytest.approx(
        (found.value - 1.959964 * found.standard_error, found.value + 1.959964 * found.standard_error), rel=1e-12
    )
    w = [Fraction(floats(POLICY)[i][a]) / Fraction(float(PROPENSITIES[i])) for i, a in enumerate(ACTIONS)]
    assert found.effective_size == pytest.approx(float(sum(w) ** 2 / sum(each**2 for each in w)))
    assert found.decisions == 6


# --- a log of any size -----------------------------------------------------------------------------------------------

N, COUNT = 400, 4


def policy_of(sharpness: float, seed: int) -> Callable[..., Tensor]:
    weights = sharpness * torch.randn(2, COUNT, generator=torch.Generator().manual_seed(seed))
    return lambda contexts: (contexts @ weights).softmax(1).double()


def logged(n: int = N, seed: int = 0, masks: Tensor | None = None) -> Log:
    random = torch.Generator().manual_seed(seed)
    contexts = torch.randn(n, 2, generator=random)
    probabilities = policy_of(0.7, 1)(contexts)
    if masks is not None:
        probabilities = probabilities * masks
        probabilities /= probabilities.sum(1, keepdim=True)
    actions = torch.multinomial(probabilities, 1, generator=random)[:, 0]
    rewards = contexts[:, 0] * actions + torch.randn(n, generator=random)
    return Log(contexts, actions, rewards, probabilities, masks)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_logged_policy_has_the_rewards_that_it_had(estimator: Any) -> None:
    log = logged()
    own = evaluate(None, log)
    assert own.value == pytest.approx(float(log.rewards.mean()))
    assert own.standard_error == pytest.approx(float(log.rewards.std()) / math.sqrt(N))
    assert own.effective_size == N
    if estimator != "dr":  # whose model takes the luck out of the contexts' actions
        assert evaluate(policy_of(0.7, 1), log, estimator)[:4] == pytest.approx(own[:4])


def test_snips_does_not_depend_on_the_zero_of_rewards() -> None:
    log, policy = logged(), policy_of(1.5, 2)
    moved = Log(log.contexts, log.actions, log.rewards + 7, log.probabilities)
    one, other = (evaluate(policy, each, "snips") for each in (log, moved))
    assert other.value - 7 == pytest.approx(one.value, rel=1e-12)
    assert other.standard_error == pytest.approx(one.standard_error, rel=1e-12)
    assert abs(evaluate(policy, moved, "ips").value - 7 - evaluate(policy, log, "ips").value) > 0.01


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_are_in_the_unit_of_rewards(estimator: Any) -> None:
    log, policy = logged(), policy_of(1.5, 2)
    larger = Log(log.contexts, log.actions, 10 * log.rewards, log.probabilities)
    one, other = evaluate(policy, log, estimator), evaluate(policy, larger, estimator)
    assert other[:2] == pytest.approx((10 * one.value, 10 * one.standard_error), rel=1e-6)


def test_dr_without_a_model_is_ips() -> None:
    log, policy = logged(), policy_of(1.5, 2)
    nothing = evaluate(policy, log, model=lambda *_: lambda contexts: torch.zeros(len(contexts), COUNT))
    assert nothing == evaluate(policy, log, "ips")


def test_dr_is_what_the_model_says_if_the_model_is_right_on_every_row() -> None:
    log, policy = logged(), policy_of(1.5, 2)
    q = torch.randn(N, COUNT, generator=torch.Generator().manual_seed(5)).double()
    right = Log(log.contexts, log.actions, q.gather(1, log.actions[:, None])[:, 0], log.probabilities)
    numbered = {tuple(row.tolist()): i for i, row in enumerate(log.contexts)}

    def model(*_: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda contexts: q[[numbered[tuple(row.tolist())] for row in contexts]]

    found = evaluate(policy, right, model=model)
    assert found.value == pytest.approx(float((policy(log.contexts) * q).sum(1).mean()), rel=1e-12)


def test_policies_may_be_probabilities_actions_and_functions() -> None:
    log = logged()
    taken = (log.contexts[:, 0] > 0).long()
    rows = torch.nn.functional.one_hot(taken, COUNT)
    forms: list[Any] = [rows, rows.tolist(), rows.numpy(), taken, taken.numpy(), lambda x: (x[:, 0] > 0).long()]
    forms.append(lambda x: np.eye(COUNT)[(np.asarray(x)[:, 0] > 0).astype(int)])
    assert len({evaluate(form, log) for form in forms}) == 1


def test_functions_get_the_masks_if_there_are_any() -> None:
    masks = torch.rand(N, COUNT, generator=torch.Generator().manual_seed(0)) < 0.7
    masks[:, 0] = True
    log = logged(masks=masks)

    def last(_: Tensor, allowed: Tensor) -> Tensor:
        return COUNT - 1 - allowed.int().flip(1).argmax(1)

    assert evaluate(last, log).decisions == N
    with pytest.raises(ValueError, match="'policy' parameter of evaluate must be 0 for actions that a mask forbids"):
        evaluate(torch.full((N, COUNT), 1 / COUNT), log)


def test_functions_get_as_much_as_they_take() -> None:
    masks = torch.ones(N, COUNT, dtype=torch.bool)
    log, expected = logged(masks=masks), evaluate([1] * N, logged(masks=masks))
    policies: list[Any] = [
        lambda contexts: [1] * len(contexts),
        lambda contexts, masks: [1] * len(masks),
        lambda *given: [1] * len(given[1]),
        lambda contexts, masks, features=None: [1] * len(masks),
        _Ones(),
    ]
    assert {evaluate(policy, log) for policy in policies} == {expected}
    with pytest.raises(ValueError, match="'policy' parameter of evaluate must be a function of the contexts and"):
        evaluate(lambda: [1] * N, log)
    with pytest.raises(ValueError, match=r"must be a function of the contexts of the log.* Got one of \(a, b\)"):
        evaluate(lambda a, b: [1] * N, logged())


class _Ones(torch.nn.Module):
    def forward(self, contexts: Tensor) -> list[int]:
        return [1] * len(contexts)


def test_what_a_function_of_contexts_must_not_take_is_said() -> None:
    masks = torch.ones(N, COUNT, dtype=torch.bool)
    masks[0, 1] = False
    log = logged(masks=masks)
    with pytest.raises(ValueError, match="'policy' parameter of evaluate must be 0 for actions that a mask forbids"):
        evaluate(lambda contexts: [1] * len(contexts), log)


@pytest.mark.parametrize("masked", [True, False])
def test_an_agent_is_judged_by_its_probabilities_and_stays_as_it_is(masked: bool) -> None:
    masks = None
    if masked:
        masks = torch.rand(N, COUNT, generator=torch.Generator().manual_seed(0)) < 0.7
        masks[:, 0] = True
    log, agent = logged(masks=masks), EpsilonGreedy(2, COUNT, hidden=[4], epsilon=0.4, seed=3)
    probabilities = [each.probabilities for each in agent.explain_many(log.contexts, log.masks)]
    before = agent.tensors()
    assert evaluate(agent, log) == evaluate(probabilities, log)
    assert all(torch.equal(value, before[name]) for name, value in agent.tensors().items())
    assert (agent.acted, agent.waiting) == (0, 0)
    with pytest.raises(ValueError, match=r"'policy' .* at least 4 actions"):
        evaluate(EpsilonGreedy(2, 2, hidden=[4]), logged())


# --- comparing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_comparison_is_the_difference_of_values_row_by_row(estimator: Any) -> None:
    log, one, other = logged(), policy_of(1.5, 2), policy_of(1.2, 3)
    found = compare(one, log, other, estimator)
    values = [evaluate(each, log, estimator) for each in (one, other)]
    assert found.value == pytest.approx(values[0].value - values[1].value)
    assert found.effective_size == min(each.effective_size for each in values)
    assert compare(other, log, one, estimator)[:2] == pytest.approx((-found.value, found.standard_error))
    assert compare(one, log, one, estimator)[:2] == (0, 0)


def test_alike_policies_differ_by_less_than_their_own_errors() -> None:
    log, one = logged(), policy_of(1.0, 2)
    near = 0.95 * one(log.contexts) + 0.05 / COUNT
    assert compare(one, log, near, "ips").standard_error < 0.2 * evaluate(one, log, "ips").standard_error


def test_against_what_was_done() -> None:
    log, policy = logged(), policy_of(1.5, 2)
    w = policy(log.contexts).gather(1, log.actions[:, None])[:, 0] / log.propensities
    rows = (w - 1) * log.rewards
    assert compare(policy, log, estimator="ips")[:2] == pytest.approx(
        (float(rows.mean()), float(rows.std()) / math.sqrt(N))
    )


# --- warnings --------------------------------------------------------------------------------------------------------


def warned(policy: Any, log: Log, **given: Any) -> str:
    return " ".join(evaluate(policy, log, **given).warnings)


def test_a_log_that_can_answer_gets_no_warning() -> None:
    found = evaluate(policy_of(0.9, 2), logged(4000))
    assert not found.warnings
    assert str(found).startswith(f"{found.value:.4g} ± {found.standard_error:.2g} (95 %: ")
    assert "from 4,000 decisions that count as" in str(found)


def test_rounding_is_no_wrong_propensity() -> None:
    actions = torch.arange(600) % 3
    log = Log(torch.zeros(600, 1), actions, torch.ones(600), torch.full((600,), 1 / 3))  # in single precision
    assert not evaluate(torch.full((600, 3), 1 / 3, dtype=torch.float64), log).warnings


def even(actions: Tensor, kinds: int, propensities: bool) -> Log:
    """Decisions at even odds among the first ``kinds`` of three actions."""
    rows = torch.zeros(len(actions), 3)
    rows[:, :kinds] = 1 / kinds
    given = rows if propensities else torch.full((len(actions),), 1 / kinds)
    return Log(torch.zeros(len(actions), 1), actions, torch.ones(len(actions)), given)


@pytest.mark.parametrize("propensities", [True, False])
def test_actions_that_were_never_logged(propensities: bool) -> None:
    log = even(torch.arange(600) % 2, 2, propensities)
    found = evaluate(torch.tensor([[0.5, 0.2, 0.3]]).expand(600, -1), log, "ips")
    assert found.outside == pytest.approx(0.3)
    assert found.value == pytest.approx(0.7)  # all rewards are 1; of the rest it knows nothing
    assert [each[:4] for each in found.warnings] == ["30% "]
    assert found.warnings[0] in str(found)
    with pytest.raises(ValueError, match="takes none of the logged actions"):
        evaluate([2] * 600, log)


def test_more_actions_than_the_log_has_probabilities_of() -> None:
    log = Log(torch.zeros(4, 1), [0, 1, 0, 1], torch.ones(4), [[0.5, 0.5]] * 4)
    assert evaluate([[0.25] * 4] * 4, log).outside == 0.5


def test_actions_that_were_impossible_in_some_contexts_alone() -> None:
    """Each was taken somewhere; that the policy never meets them shows in the mean of the weights."""
    actions = torch.arange(600) % 2
    policy = 1 - actions  # the other one
    policy[:100] = actions[:100]
    log = Log(torch.zeros(600, 1), actions, torch.ones(600), torch.ones(600))
    assert evaluate(policy, log, "ips").outside == 0
    assert "The weights have a mean of 0.167 ± 0.015, which should be 1" in warned(policy, log)
    exact = Log(torch.zeros(600, 1), actions, torch.ones(600), torch.nn.functional.one_hot(actions))
    assert evaluate(policy, exact).outside == pytest.approx(5 / 6)
    assert "The weights have" not in warned(policy, exact)


def test_propensities_that_are_not_true() -> None:
    log = logged(2000)
    wrong = Log(log.contexts, log.actions, log.rewards, log.propensities / 2)
    assert "its propensities are not true" in warned(policy_of(0.9, 2), wrong)


def test_a_log_that_counts_as_few_decisions_and_weights_that_dominate() -> None:
    log = logged(60)
    assert "counts as" in warned(policy_of(0.9, 2), log)
    policy = policy_of(0.7, 1)(log.contexts)  # the logged one
    row = int(log.propensities.argmin())
    policy[row] = torch.nn.functional.one_hot(log.actions[row], COUNT).double()
    share = float(1 / log.propensities[row]) / (59 + float(1 / log.propensities[row]))
    assert f"A single decision has {share:.0%} of all weight" in warned(policy, log)


def test_warnings_say_of_which_of_two_policies_they_are() -> None:
    log, one, other = logged(60), policy_of(0.9, 2), policy_of(0.9, 3)
    own = [evaluate(each, log).warnings for each in (one, other)]
    assert all(own)
    named = [f"{name}: {each}" for name, those in zip(("policy", "against"), own, strict=True) for each in those]
    assert list(compare(one, log, other).warnings) == named
    assert compare(one, log).warnings == own[0]


def test_clipping_is_said() -> None:
    log, policy = logged(2000), policy_of(1.5, 2)
    w = policy(log.contexts).gather(1, log.actions[:, None])[:, 0] / log.propensities
    found = evaluate(policy, log, "ips", clip=2)
    assert found.value == pytest.approx(float((w.clamp(max=2) * log.rewards).mean()))
    assert found.clipped == pytest.approx(float((w > 2).double().mean()))
    assert found.standard_error < evaluate(policy, log, "ips").standard_error
    assert found.effective_size > evaluate(policy, log, "ips").effective_size
    assert "were clipped: the estimate is biased" in found.warnings[-1]
    assert evaluate(policy, log, "ips", clip=1e9) == evaluate(policy, log, "ips")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": torch.full((N, COUNT), 0.3)}, "'policy' .* adds up to 1"),
        ({"policy": torch.full((N, 2), 0.5)}, "'policy' .* at least 4 actions"),
        ({"policy": torch.full((3, COUNT), 0.25)}, "'policy'"),
        ({"policy": torch.full((N,), 0.25)}, "'policy'"),
        ({"policy": torch.full((N, COUNT), math.nan)}, "'policy'"),
        ({"policy": lambda x: x}, "'policy'"),
        ({"policy": "best"}, "'policy'"),
        ({"estimator": "best"}, "'estimator'"),
        ({"clip": 0}, "'clip'"),
        ({"folds": 1}, "'folds'"),
        ({"model": 1}, "'model'"),
        ({"model": lambda *_: None}, "'model'"),
        ({"model": lambda *_: lambda x: x}, "'model'"),
        ({"model": lambda *_: lambda x: torch.full((len(x), COUNT), math.nan)}, "'model' .* finite"),
        ({"log": [1]}, "'log'"),
        ({"log": logged(1), "policy": [0]}, "'log' .* at least 2"),
    ],
)
@pytest.mark.parametrize("call", [evaluate, compare])
def test_bad_arguments_are_refused(call: Callable[..., Estimate], given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(**{"policy": policy_of(1.0, 2), "log": logged(), **given})


def test_the_other_policy_of_a_comparison_is_named() -> None:
    with pytest.raises(ValueError, match="'against' parameter of compare"):
        compare(policy_of(1.0, 2), logged(), torch.full((N, COUNT), 0.3))


# --- the linear model ------------------------------------------------------------------------------------------------


def test_folds_are_predicted_by_what_others_taught() -> None:
    log = logged(53)
    seen: list[Tensor] = []

    def model(contexts: Tensor, actions: Tensor, rewards: Tensor) -> Callable[[Tensor], Tensor]:
        assert len(contexts) == len(actions) == len(rewards)

        def predict(others: Tensor) -> Tensor:
            both = torch.cat([contexts, others])
            assert len(both.unique(dim=0)) == len(both) == 53
            seen.append(others)
            return torch.zeros(len(others), COUNT)

        return predict

    evaluate(policy_of(1.0, 2), log, model=model, folds=4)
    assert len(seen) == 4
    assert torch.equal(torch.cat(seen).sort(0)[0], log.contexts.sort(0)[0])


def test_a_linear_world_is_learnt_and_an_untried_action_is_as_the_others() -> None:
    random = torch.Generator().manual_seed(0)
    x = 5 + 3 * torch.randn(2000, 3, generator=random)
    actions = torch.randint(2, (2000,), generator=random)
    weights = torch.randn(2, 3, generator=random)
    rewards = ((x * weights[actions]).sum(1) + actions + 0.1 * torch.randn(2000, generator=random)).double()
    found = _linear(3, x, actions, rewards)(x[:5])
    true = x[:5] @ weights.T + torch.tensor([0, 1])
    assert (found[:, :2] - true).abs().max() < 0.05
    assert ((found[:, 2] - found[:, :2].mean(1)).abs() < 0.1 + 0.2 * (found[:, 0] - found[:, 1]).abs()).all()


def test_the_penalty_is_that_of_the_least_error_of_leaving_one_out() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=random).double()
    y = (x @ torch.tensor([1.0, -0.5, 0.2]).double() + torch.randn(12, generator=random)).double()

    def solved(x: Tensor, y: Tensor, penalty: float) -> Tensor:
        found: Tensor = torch.linalg.solve(x.T @ x + penalty * torch.eye(3).double(), x.T @ y)
        return found

    def error(penalty: float) -> float:
        rows = [[each for each in range(12) if each != i] for i in range(12)]
        return sum(float(y[i] - x[i] @ solved(x[rest], y[rest], penalty)) ** 2 for i, rest in enumerate(rows))

    penalties = torch.logspace(-2, 6, 17).tolist()
    best = min(penalties, key=error)
    assert penalties[0] < best < penalties[-1]
    assert _ridge(x, y).tolist() == pytest.approx(solved(x, y, best).tolist(), rel=1e-5)


def test_one_row_and_columns_without_any_spread_are_no_trouble() -> None:
    assert _ridge(torch.zeros(0, 3).double(), torch.zeros(0).double()).tolist() == [0, 0, 0]
    assert _ridge(torch.ones(1, 3).double(), torch.ones(1).double()).abs().max() < 1e-4  # one row says nothing
    log = Log(torch.ones(8, 2), [0, 1] * 4, [0.0, 1.0] * 4, [0.5] * 8)
    assert evaluate([1] * 8, log).value == pytest.approx(1.0, abs=0.1)
    assert math.isfinite(evaluate([0, 1], log[:2]).standard_error)
