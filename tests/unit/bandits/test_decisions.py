"""Decisions have the probabilities that they were made with, and each is rewarded once."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bandit_worlds import ACTIONS, FEATURES, GOOD, KINDS, LEARNING, NAN, assert_same, live, neighbours, snapshot
from bayesbackprop import Bernoulli, Poisson
from bayesbackprop.bandits import Agent, Decision, EpsilonGreedy, LinearThompson, ThompsonSampling, Uniform, load
from bayesbackprop.bandits import decisions as ledgers
from rewriting import rewrite

pytestmark = pytest.mark.identities

CODES = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]]


def described(**options: Any) -> Any:
    """An agent whose actions are described by two numbers each."""
    return KINDS["thompson, input"](action_features=CODES, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_sum_to_one_and_are_zero_where_masked(kind: str) -> None:
    agent = KINDS[kind](seed=1)
    live(agent, range(6))
    random = torch.Generator().manual_seed(3)
    contexts, masks = torch.randn(40, FEATURES, generator=random), torch.rand(40, ACTIONS, generator=random) < 0.5
    masks[:, 2] |= ~masks.any(1)
    for decision, mask in zip(agent.decide_many(contexts, masks), masks.tolist(), strict=True):
        assert sum(decision.probabilities) == pytest.approx(1, abs=1e-12)
        assert all(allowed or not p for p, allowed in zip(decision.probabilities, mask, strict=True))
        assert mask[decision.action]
        assert decision.propensity == decision.probabilities[decision.action] > 0
        best = max((a for a in range(ACTIONS) if mask[a]), key=decision.means.__getitem__)
        assert decision.explored == (decision.means[decision.action] < decision.means[best])
        assert len(decision.means) == len(decision.spreads) == ACTIONS


@pytest.mark.parametrize("kind", KINDS)
def test_an_explanation_changes_nothing_and_is_that_of_the_next_decision(kind: str) -> None:
    agent, other = KINDS[kind](seed=1), KINDS[kind](seed=1)
    for each in (agent, other):
        live(each, range(5))
    before = agent.described()
    for t in range(4):
        context = neighbours(agent, t)[0][0]
        explanation = agent.explain(context)
        assert explanation == agent.explain(context) == agent.explain_many(context[None])[0]
        decision = agent.decide(context)
        assert (decision.probabilities, decision.means, decision.spreads) == (
            explanation.probabilities, explanation.means, explanation.spreads,
        )  # fmt: skip
        assert decision.explored == explanation.explores(decision.action)
        assert decision.action == other.decide(context).action
        assert explanation.probabilities[explanation.sample()] > 0
    assert agent.described() == {
        **before, "acted": before["acted"] + 4, "decided": 4, "explored": round(4 * agent.exploration_rate),
    }  # fmt: skip
    live(agent, range(5, 8))
    live(other, range(5, 8))
    assert_same(snapshot(agent), snapshot(other))


@pytest.mark.parametrize("kind", LEARNING)
def test_means_are_in_units_of_the_reward(kind: str) -> None:
    options: Any = {} if kind == "linear" else {"scale": None, "learning_rate": 0.02, "updates": 16, "hidden": [16]}
    agent = KINDS[kind](**options, **({"temperature": 0.0} if "thompson" in kind else {}))
    for n in range(60):
        agent.observe([0.0, 0.0, 0.0], n % ACTIONS, 500.0 + 100.0 * (n % ACTIONS))
    explanation = agent.explain([0.0, 0.0, 0.0])
    assert explanation.best == 3
    for action, mean in enumerate(explanation.means):
        assert mean == pytest.approx(500 + 100 * action, rel=0.1)


def test_the_probabilities_of_epsilon_greedy_are_in_closed_form() -> None:
    agent = KINDS["epsilon, output"](epsilon=0.3)
    live(agent, range(4))
    for mask, left in (([True] * 4, 4), ([True, False, True, False], 2), ([False, True, False, False], 1)):
        explanation = agent.explain(GOOD, mask=mask)
        expected = [0.3 / left * allowed for allowed in mask]
        expected[explanation.best] += 0.7
        assert explanation.probabilities == pytest.approx(expected, abs=1e-15)
        assert explanation.spreads == (0.0,) * ACTIONS


def test_an_agent_of_ones_own_without_probabilities_acts() -> None:
    class Own(Uniform):
        _believe = Agent._believe

    agent = Own(FEATURES, ACTIONS)
    assert agent.act(GOOD) in range(ACTIONS)
    with pytest.raises(NotImplementedError, match="Own has no probabilities of its actions: use act and observe"):
        agent.decide(GOOD)


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_of_decisions_are_learnt_as_observations(kind: str) -> None:
    agent, listener = KINDS[kind](seed=3), KINDS[kind](seed=3)
    contexts = [neighbours(agent, t)[0][0] for t in range(5)]
    decisions = [agent.decide(context) for context in contexts]
    assert (agent.waiting, agent.observed) == (5, 0)
    for number in (3, 0, 4):
        agent.reward(decisions[number].id, number / 2)
        listener.observe(contexts[number], decisions[number].action, number / 2)
    agent.reward_many([decisions[2].id, decisions[1].id], torch.tensor([1.0, 0.0]))
    listener.observe(contexts[2], decisions[2].action, 1.0)
    listener.observe(contexts[1], decisions[1].action, 0.0)
    assert (agent.waiting, agent.observed) == (0, 5)
    assert_same({**snapshot(agent), "acted": torch.tensor(0)}, snapshot(listener))


def test_each_id_is_its_own() -> None:
    agent = KINDS["uniform"]()
    ids = [each.id for each in [*agent.decide_many([GOOD] * 50), agent.decide(GOOD)]]
    assert len(set(ids)) == 51
    assert all(len(each) == 32 for each in ids)


def test_a_reward_is_taken_once_and_only_for_a_decision_that_waits() -> None:
    agent = LinearThompson(FEATURES, 2)
    first, second = agent.decide_many([GOOD, GOOD])
    agent.reward(first.id, 1.0)
    refused: list[tuple[Any, str]] = [(first.id, "has its reward already"), ("ab", "is not known"), (7, "is no text")]
    for which, why in refused:
        with pytest.raises(ValueError, match=rf"'id' parameter of LinearThompson\.reward must be .*this one {why}"):
            agent.reward(which, 1.0)
    for ids, rewards in (([second.id, first.id], [1.0, 1.0]), ([second.id] * 2, [1.0] * 2), ([second.id], [NAN])):
        with pytest.raises(ValueError, match=r"parameter of LinearThompson\.reward_many must be"):
            agent.reward_many(ids, rewards)
        assert (agent.waiting, agent.observed) == (1, 1)
    agent.reward(second.id, 1.0)


def test_a_reward_that_cannot_be_learnt_leaves_the_decision_waiting() -> None:
    agent = ThompsonSampling(FEATURES, 2, hidden=(4,), memory=8, likelihood=Bernoulli())
    decision = agent.decide(GOOD)
    with pytest.raises(ValueError, match=r"'reward' parameter of ThompsonSampling\.reward must be 0 or 1.* Got 0\.5"):
        agent.reward(decision.id, 0.5)
    with pytest.raises(ValueError, match=r"'reward' parameter of ThompsonSampling\.check_rewards .* Got 3\.0 instead"):
        agent.check_rewards([1.0, 3.0])
    linear = LinearThompson(2, 2, precision=1e-30)
    large = linear.decide([1e6, 1e6])
    with pytest.raises(ValueError, match="'context' parameter of LinearThompson"):
        linear.reward(large.id, 1.0)
    assert (agent.waiting, linear.waiting, agent.observed, linear.observed) == (1, 1, 0, 0)
    agent.reward(decision.id, 1.0)


def test_too_many_and_too_old_decisions_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Uniform(FEATURES, 2, most_waiting=3)
    decisions = agent.decide_many([GOOD] * 5)
    assert agent.waiting == 3
    for each in decisions[:2]:
        with pytest.raises(ValueError, match="this one has expired"):
            agent.reward(each.id, 1.0)
    now = [1000.0]
    monkeypatch.setattr(ledgers.time, "time", lambda: now[0])
    old = Uniform(FEATURES, 2, expiry=60.0)
    first = old.decide(GOOD)
    now[0] += 50
    second = old.decide(GOOD)
    now[0] += 50
    assert old.waiting == 1
    with pytest.raises(ValueError, match="this one has expired"):
        old.reward(first.id, 1.0)
    old.reward(second.id, 1.0)


def test_a_context_that_changes_after_the_decision_is_learnt_as_it_was() -> None:
    agent, listener = KINDS["linear"](), KINDS["linear"]()
    context = torch.tensor(GOOD)
    decision = agent.decide(context)
    context.fill_(9.0)
    agent.reward(decision.id, 1.0)
    listener.observe(GOOD, decision.action, 1.0)
    assert_same({**snapshot(agent), "acted": torch.tensor(0)}, snapshot(listener))


# --- files and copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["file", "pickle", "deepcopy", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_decisions_wait_in_files_and_copies(kind: str, way: str, tmp_path: Path) -> None:
    agent = KINDS[kind](seed=2)
    live(agent, range(3))
    decisions = agent.decide_many(neighbours(agent, 1)[0].expand(4, -1))
    agent.reward(decisions[0].id, 1.0)
    ways: dict[str, Callable[[], Agent]] = {
        "file": lambda: (agent.save(tmp_path / "agent"), load(tmp_path / "agent"))[1],
        "pickle": lambda: pickle.loads(pickle.dumps(agent)),
        "deepcopy": lambda: copy.deepcopy(agent),
        "copy": lambda: copy.copy(agent),
    }
    twin = ways[way]()
    assert (twin.waiting, twin.exploration_rate) == (agent.waiting, agent.exploration_rate)
    for each in (agent, twin):
        each.reward(decisions[2].id, 0.5)
        with pytest.raises(ValueError, match="this one"):
            each.reward(decisions[0].id, 1.0)
    assert_same(snapshot(agent), snapshot(twin))
    assert agent.decide(GOOD).probabilities == twin.decide(GOOD).probabilities


DAMAGED: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "an action that there is not": lambda _, tensors: tensors["waiting.actions"].fill_(7),
    "an id cut short": lambda _, tensors: tensors.update({"waiting.ids": tensors["waiting.ids"][:, :8].clone()}),
    "NaN": lambda _, tensors: tensors["waiting.contexts"].fill_(NAN),
    "no times": lambda _, tensors: tensors.pop("waiting.times"),
    "more explored than decided": lambda contents, _: contents.update(explored=99),
    "all retired": lambda contents, _: contents.update(retired=[0, 1]),
    "an unknown one retired": lambda contents, _: contents.update(retired=[5]),
    "a count that is text": lambda contents, _: contents.update(decided="3"),
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_ledger_is_refused(change: Any, tmp_path: Path) -> None:
    agent = Uniform(FEATURES, 2)
    agent.decide_many([GOOD] * 2)
    agent.save(tmp_path / "agent")
    rewrite(tmp_path / "agent", lambda header, tensors: change(header["contents"], tensors))
    with pytest.raises(ValueError, match=r"'path' parameter of bandits\.load must be .* damaged"):
        load(tmp_path / "agent")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_decided_is_refused_and_changes_nothing(kind: str) -> None:
    agent = KINDS[kind]()
    live(agent, range(2))
    before, said = snapshot(agent), agent.described()
    owner = type(agent).__name__
    masks: list[Any] = [
        [False] * 4,
        [True] * 3,
        [1, 0, 1, 0],
        "True",
        True,
        torch.ones(4),
        [[True] * 4],
        [True, None] * 2,
    ]
    for mask in masks:
        with pytest.raises(ValueError, match=rf"'mask' parameter of {owner}\.decide must be"):
            agent.decide(GOOD, mask=mask)
    for context in (GOOD[:2], [NAN, 0, 0], None, "abc", [1e8, 0, 0]):
        with pytest.raises(ValueError, match=rf"'context' parameter of {owner}\.explain must be"):
            agent.explain(context)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"'masks' parameter of {owner}\.decide_many must be one for each of 2"):
        agent.decide_many([GOOD] * 2, masks=[[True] * 4])
    with pytest.raises(ValueError, match=rf"'contexts' parameter of {owner}\.decide_many must be at least one"):
        agent.decide_many([])
    with pytest.raises(ValueError, match=rf"'features' parameter of {owner}\.decide must be None, unless"):
        agent.decide(GOOD, features=CODES)
    assert_same(snapshot(agent), before)
    assert agent.described() == said


def test_replicas_have_methods_of_their_own() -> None:
    agent = KINDS["uniform"](replicas=2)
    calls: list[Callable[[], object]] = [
        lambda: agent.decide(GOOD),
        lambda: agent.decide_many([GOOD]),
        lambda: agent.explain(GOOD),
        lambda: agent.reward("a", 1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="2 replicas: use act_all and observe_all"):
            call()


def test_errors_name_the_class_that_was_called() -> None:
    class Mine(ThompsonSampling):
        pass

    class Greedy(EpsilonGreedy):
        pass

    class Line(LinearThompson):
        pass

    for make in (lambda: Mine(2, 2, draws=0), lambda: Greedy(2, 2, epsilon=2), lambda: Line(2, 2, a=0)):
        with pytest.raises(ValueError, match=r"parameter of (Mine|Greedy|Line) must be"):
            make()
    with pytest.raises(ValueError, match=r"of Mine\.decide"):
        Mine(2, 2, hidden=(3,), memory=4).decide([1.0])


def test_actions_come_as_any_integer() -> None:
    forms: list[Any] = [1, torch.tensor(1), torch.tensor(1, dtype=torch.uint8), torch.tensor(1).numpy()[()]]
    agents = [KINDS["linear"]() for _ in forms]
    for agent, action in zip(agents, forms, strict=True):
        agent.observe(GOOD, action, 1.0)
        assert_same(snapshot(agent), snapshot(agents[0]))
    for bad in (torch.tensor(1.0), torch.tensor(True), torch.tensor([1]), torch.tensor(9), torch.tensor(1j)):
        with pytest.raises(ValueError, match="'action' parameter of"):
            agents[0].observe(GOOD, bad, 1.0)  # type: ignore[arg-type]


# --- features of a request -------------------------------------------------------------------------------------------


def test_a_decision_is_made_and_learnt_by_the_features_of_its_request() -> None:
    agent, listener, usual = (described(seed=1) for _ in range(3))
    turned = CODES[::-1]
    for each, codes in ((agent, CODES), (listener, None), (usual, None)):
        assert each.explain(GOOD, features=codes).means == listener.explain(GOOD).means
    assert agent.explain(GOOD, features=turned).means == pytest.approx(usual.explain(GOOD).means[::-1])
    decision = agent.decide(GOOD, features=turned)
    agent.reward(decision.id, 1.0)
    listener.observe(GOOD, decision.action, 1.0, features=turned)
    usual.observe(GOOD, ACTIONS - 1 - decision.action, 1.0)
    own = described(seed=1)
    own.observe(GOOD, decision.action, 1.0, features=turned[decision.action])
    for each in (agent, listener, own):
        assert_same({**snapshot(each), "acted": torch.tensor(0)}, snapshot(listener))
    # The network learns the numbers, whatever the action is called.
    found, same = snapshot(listener), snapshot(usual)
    assert [name for name in found if not torch.equal(found[name], same[name])] == ["actions"]


def test_features_of_another_width_are_refused() -> None:
    agent = described()
    bad: list[Any] = [CODES[:3], [[1.0]] * 4, [[NAN, 0.0]] * 4, 3.0, "ab", torch.ones(2, 4, 2)]
    for features in bad:
        with pytest.raises(ValueError, match=r"'features' parameter of ThompsonSampling\.decide must be"):
            agent.decide(GOOD, features=features)
        with pytest.raises(ValueError, match=r"'features' parameter of ThompsonSampling\.observe must be"):
            agent.observe(GOOD, 1, 1.0, features=features)
    assert (agent.acted, agent.observed) == (0, 0)


def test_what_describes_the_actions_may_stand_apart_in_a_file(tmp_path: Path) -> None:
    """As versions wrote it in which requests had no features of their own."""
    agent = described(seed=2)
    live(agent, range(5))
    agent.save(tmp_path / "agent")
    whole = load(tmp_path / "agent")

    def change(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["contexts"] = tensors["contexts"][..., :FEATURES].clone()
        for name in ("most_waiting", "expiry", "candidates"):
            del header["contents"]["arguments"][name]

    rewrite(tmp_path / "agent", change)
    older = load(tmp_path / "agent")
    remembered, found = snapshot(whole).pop("contexts"), snapshot(older).pop("contexts")
    assert torch.equal(found[:5], remembered[:5])
    assert live(older, range(5, 9)) == live(whole, range(5, 9))


def test_a_decision_can_be_logged_as_json() -> None:
    decision = KINDS["thompson, output"]().decide(GOOD)
    assert Decision(**json.loads(json.dumps(vars(decision)))).id == decision.id


@pytest.mark.parametrize(("likelihood", "most"), [(None, 1.0), (Bernoulli(), 1.0), (Poisson(), 9e99)])
def test_means_are_what_rewards_can_be(likelihood: Any, most: float) -> None:
    """The line beside the network goes on below 0 and above 1; what is reported does not."""
    agent = ThompsonSampling(features=1, actions=2, likelihood=likelihood, updates=1, seed=0)
    for n in range(40):
        agent.observe([n / 20 - 1], n % 2, float(n > 30))
    for explanation in agent.explain_many([[-9.0], [9.0]]):
        assert all(0 <= mean <= most for mean in explanation.means)


def test_one_reward_for_each_id() -> None:
    agent = Uniform(features=FEATURES, actions=ACTIONS)
    ids = [decision.id for decision in agent.decide_many(torch.zeros(2, FEATURES))]
    for rewards in ([1.0], [1.0, 2.0, 3.0]):
        says = f"'rewards' parameter of Uniform.reward_many must be one for each of the 2 in 'ids'. Got {len(rewards)}"
        with pytest.raises(ValueError, match=says):
            agent.reward_many(ids, rewards)
    assert agent.waiting == 2


def test_of_equal_means_none_is_explored() -> None:
    agent = Uniform(features=FEATURES, actions=ACTIONS)
    decisions = agent.decide_many(torch.zeros(20, FEATURES))
    assert len({decision.action for decision in decisions}) > 1
    assert not any(decision.explored for decision in decisions)
    assert agent.exploration_rate == 0
