"""Actions are added and retired, and what was learnt of the others stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bandit_worlds import ACTIONS, FEATURES, GOOD, KINDS, LEARNING, NEURAL, assert_same, live, neighbours, snapshot
from bayesbackprop import Gaussian
from bayesbackprop.bandits import Agent, ThompsonSampling, Uniform, load
from rewriting import rewrite

pytestmark = pytest.mark.identities

CODES = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]]


def of_old(name: str, tensor: Tensor, agent: Any) -> Tensor:
    """Of a tensor of a grown agent the part of its first ACTIONS actions."""
    by_action = ("tries", "matrix", "root", "moment", "square", "count", "regression.inverse", "regression.moment")
    if name in by_action and tensor.dim() > 1:
        return tensor[:, :ACTIONS]
    if not name.startswith(("parameter.", "optimiser.")):
        return tensor
    if agent.encoding == "input":
        first = tensor.dim() == 3 and tensor.shape[-1] == FEATURES + agent.actions
        return tensor[..., : FEATURES + ACTIONS] if first else tensor
    outputs = agent._likelihood.numbers * agent.actions
    kept = [number for number in range(outputs) if number % agent.actions < ACTIONS]
    for dim in range(1, tensor.dim()):
        if tensor.shape[dim] == outputs:
            return tensor.index_select(dim, torch.tensor(kept))
    return tensor


@pytest.mark.parametrize("kind", [*KINDS, "one number"])
def test_what_was_learnt_stays(kind: str) -> None:
    options: Any = {"likelihood": Gaussian(0.5), "hidden": [9]} if kind == "one number" else {}
    agent: Any = KINDS["thompson, output" if kind == "one number" else kind](seed=2, **options)
    live(agent, range(12))
    waiting = agent.decide(GOOD)
    before, expected = snapshot(agent), agent.explain(GOOD)
    assert agent.add_arms(3) == [4, 5, 6]
    assert agent.actions == 7
    after = snapshot(agent)
    assert_same({name: of_old(name, tensor, agent) for name, tensor in after.items()}, before)
    assert agent.explain(GOOD).means[:ACTIONS] == pytest.approx(expected.means, rel=1e-6)
    # A new one begins as in a new agent.
    new = snapshot(type(agent)(**agent._arguments()))
    for name, tensor in after.items():
        if tensor.shape != before[name].shape:
            changed = tensor != new[name]
            touched = of_old(name, changed, agent).sum()
            assert changed.sum() == touched, name
    agent.reward(waiting.id, 1.0)
    for arm in range(7):
        agent.observe(GOOD, arm, float(arm))
    assert {agent.decide(GOOD).action for _ in range(300)} - set(range(ACTIONS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_agent_is_saved_and_goes_on(kind: str, tmp_path: Path) -> None:
    agent = KINDS[kind](seed=1)
    live(agent, range(6))
    agent.add_arms()
    agent.retire(1)
    agent.observe(GOOD, 4, 1.0)
    agent.save(tmp_path / "agent")
    twin = load(tmp_path / "agent")
    assert twin.described() == agent.described()
    assert twin.retired == (1,)
    for each in (agent, twin):
        for t in range(6, 9):
            each.observe(neighbours(each, t)[0][0], each.act(neighbours(each, t)[0][0]), float(t))
    assert_same(snapshot(twin), snapshot(agent))
    assert twin.explain(GOOD) == agent.explain(GOOD)


@pytest.mark.parametrize("joined", [[0, 0, 0], [0, 0, 0, 9], [0, 0, 0, "1"], [0, 0, 0, -1], None])
def test_a_file_that_says_absurd_things_of_arms_is_refused(joined: Any, tmp_path: Path) -> None:
    Uniform(FEATURES, 4).save(tmp_path / "agent")
    rewrite(tmp_path / "agent", lambda header, _: header["contents"].update(joined=joined))
    with pytest.raises(ValueError, match=r"'path' parameter of bandits\.load must be .* damaged"):
        load(tmp_path / "agent")


def test_a_described_action_is_known_at_once() -> None:
    agent: Any = KINDS["thompson, input"](action_features=CODES, seed=3)
    live(agent, range(8))
    before = [p.detach().clone() for p in agent.net.parameters()]
    known = agent.explain(GOOD).means
    assert agent.add_arms(2, features=[CODES[1], [9.0, 9.0]]) == [4, 5]
    means = agent.explain(GOOD).means
    assert means[:5] == pytest.approx([*known, known[1]], rel=1e-5)
    assert all(torch.equal(p, old) for p, old in zip(agent.net.parameters(), before, strict=True))
    for bad in (None, [[1.0]], [[1.0, 2.0]] * 2, [[float("nan"), 0.0]], "ab"):
        with pytest.raises(ValueError, match=r"'features' parameter of ThompsonSampling\.add_arms must be"):
            agent.add_arms(1, features=bad)
    assert agent.actions == 6


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_added_or_retired_is_refused(kind: str) -> None:
    agent = KINDS[kind]()
    owner = type(agent).__name__
    for count in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match=rf"'count' parameter of {owner}\.add_arms must be"):
            agent.add_arms(count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"'features' parameter of {owner}\.add_arms must be None"):
        agent.add_arms(1, features=[[1.0]])
    for action in (4, -1, True, "1", None):
        with pytest.raises(ValueError, match=rf"'action' parameter of {owner}\.retire must be"):
            agent.retire(action)  # type: ignore[arg-type]
    for action in (torch.tensor(0), 1, 1, 3):
        agent.retire(action)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one of several that are left"):
        agent.retire(2)
    assert agent.retired == (0, 1, 3)
    two = KINDS[kind](replicas=2)
    for call in (two.add_arms, lambda: two.retire(0)):
        with pytest.raises(ValueError, match="2 replicas: use act_all"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_a_retired_action_is_never_taken_and_its_rewards_are_learnt(kind: str) -> None:
    agent: Agent = KINDS[kind](seed=4)
    live(agent, range(5))
    waiting = [agent.decide(GOOD, mask=[action == 2 for action in range(ACTIONS)]) for _ in range(2)]
    agent.retire(2)
    explanation = agent.explain(GOOD)
    assert explanation.probabilities[2] == 0
    assert explanation.best != 2
    assert {agent.act(GOOD) for _ in range(60)} <= {0, 1, 3}
    assert {each.action for each in agent.decide_many([GOOD] * 60)} <= {0, 1, 3}
    with pytest.raises(ValueError, match=r"'mask' parameter of .* at least one action that is not retired"):
        agent.decide(GOOD, mask=[False, False, True, False])
    observed = agent.observed
    for each in waiting:
        agent.reward(each.id, 1.0)
    assert agent.observed == observed + 2


@pytest.mark.parametrize("kind", NEURAL)
def test_the_kept_network_learns_on(kind: str) -> None:
    agent: Any = KINDS[kind](seed=1)
    live(agent, range(4))
    agent.add_arms()
    before = snapshot(agent)
    for t in range(3):
        agent.observe(neighbours(agent, t)[0][0], 4, 1.0)
    after = snapshot(agent)
    assert all(not torch.equal(after[name], before[name]) for name in after if name.startswith("parameter."))
    step = next(name for name in before if name.endswith(".step"))
    assert float(after[step]) == float(before[step]) + 3 * agent.updates


def test_a_new_arm_is_explored_as_one_of_a_new_agent_and_not_as_one_long_neglected() -> None:
    agent: Any = ThompsonSampling(FEATURES, 2, hidden=(4,), updates=1, memory=8)
    for n in range(30):
        agent.observe(GOOD, n % 2, 1.0)
    agent.add_arms()
    new = ThompsonSampling(FEATURES, 3, hidden=(4,), memory=8)
    assert float(agent._widths()[0, 2]) == pytest.approx(float(new._widths()[0, 2]))
    for n in range(8):
        agent.observe(GOOD, n % 2, 1.0)
    # t = 8 tries since it is there, n = 0 of them its own, and 3 actions.
    ratio = torch.tensor(9.0)
    assert float(agent._widths()[0, 2]) == pytest.approx(float((20 * (1 + ratio.log()) * ratio / 3).sqrt()))


@pytest.mark.parametrize("kind", LEARNING)
def test_arms_are_added_while_a_thread_learns(kind: str) -> None:
    agent, alone = KINDS[kind](seed=1), KINDS[kind](seed=1)
    with agent.learning():
        for t in range(6):
            agent.observe(GOOD, t % ACTIONS, 1.0)
        agent.add_arms()
        agent.retire(0)
        for t in range(6):
            agent.observe(GOOD, t % 5, 0.5)
        assert len(agent.explain(GOOD).means) == 5
        assert agent.explain(GOOD).probabilities[0] == 0
    for t in range(6):
        alone.observe(GOOD, t % ACTIONS, 1.0)
    alone.add_arms()
    for t in range(6):
        alone.observe(GOOD, t % 5, 0.5)
    assert_same(snapshot(agent), snapshot(alone))
