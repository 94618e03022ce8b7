"""A thread learns while others decide."""

import contextlib
import copy
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bandit_threads import PATIENCE, run_all
from bandit_worlds import ACTIONS, GOOD, KINDS, NEURAL, assert_same, neighbours, snapshot
from bayesbackprop.bandits import Agent, load

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("kind", KINDS)
def test_the_thread_learns_what_would_be_learnt_without_it(kind: str) -> None:
    agent, alone = KINDS[kind](seed=3), KINDS[kind](seed=3)
    with agent.learning() as same:
        assert same is agent
        decisions = [agent.decide(neighbours(agent, t)[0][0]) for t in range(6)]
        agent.reward_many([each.id for each in decisions[:4]], [0.5, 1.0, 0.0, 2.0])
        agent.observe(GOOD, 1, 1.0)
        agent.settle()
        assert (agent.observed, agent.waiting) == (5, 2)
        agent.reward(decisions[5].id, 1.0)
    for each, reward in zip(decisions[:4], (0.5, 1.0, 0.0, 2.0), strict=True):
        alone.observe(neighbours(agent, decisions.index(each))[0][0], each.action, reward)
    alone.observe(GOOD, 1, 1.0)
    alone.observe(neighbours(agent, 5)[0][0], decisions[5].action, 1.0)
    assert_same({**snapshot(agent), "acted": torch.tensor(0)}, snapshot(alone))
    assert agent.explain(GOOD).means == alone.explain(GOOD).means
    alone.settle()  # without a thread there is nothing to wait for


@pytest.mark.parametrize("kind", NEURAL)
def test_a_decision_does_not_wait_for_an_update(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS[kind](seed=1)
    before, known = agent.explain(GOOD), threading.Event()
    inside, minimise = threading.Event(), type(agent)._minimise

    def slow(self: Any, *arguments: Any) -> Any:
        if self is agent:
            inside.set()
            assert known.wait(PATIENCE)
        return minimise(self, *arguments)

    monkeypatch.setattr(type(agent), "_minimise", slow)
    with agent.learning():
        agent.observe(GOOD, 0, 3.0)
        assert inside.wait(PATIENCE)
        # In the middle of an update: decisions are by what was learnt before.
        assert agent.explain(GOOD) == before
        assert agent.decide(GOOD).means == before.means
        assert agent.act(GOOD) in range(ACTIONS)
        assert agent.observed == 0
        known.set()
        agent.settle()
        assert agent.explain(GOOD).means != before.means
        assert agent.explain(GOOD).means == copy.deepcopy(agent).explain(GOOD).means
    assert agent.acted == 2


def test_no_update_begins_while_one_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS["thompson, output"]()
    begun, minimise = threading.Event(), type(agent)._minimise
    monkeypatch.setattr(agent, "_minimise", lambda *some: (begun.set(), minimise(agent, *some)))
    with agent.learning():
        with agent._deciding() as decider:
            assert decider is not agent
            agent.observe(GOOD, 0, 1.0)
            assert not begun.wait(0.2)
        assert begun.wait(PATIENCE)


@pytest.mark.parametrize("kind", ["linear", "thompson, output"])
def test_threads_decide_and_reward_and_nothing_is_lost(kind: str) -> None:
    agent = KINDS[kind](seed=2)

    def work() -> None:
        for t in range(25):
            decisions = agent.decide_many(neighbours(agent, t)[0].expand(3, -1))
            agent.reward(decisions[1].id, 1.0)
            agent.reward_many([decisions[2].id, decisions[0].id], [0.0, 2.0])

    with agent.learning(behind=4):
        run_all([work] * 3)
    assert (agent.acted, agent.observed, agent.waiting) == (225, 225, 0)


def test_one_reward_of_several_at_once_is_taken() -> None:
    agent = KINDS["linear"]()
    for _ in range(20):
        decision, taken = agent.decide(GOOD), list[int]()

        def reward(which: str = decision.id, taken: list[int] = taken) -> None:
            with contextlib.suppress(ValueError):
                agent.reward(which, 1.0)
                taken.append(1)

        run_all([reward] * 4)
        assert taken == [1]
    assert agent.observed == 20


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "thompson, input"])
def test_an_error_of_the_thread_surfaces_at_the_next_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS[kind]()
    learn, calls = type(agent)._learn, list[int]()

    def broken(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("broken")
        learn(self, *arguments)

    monkeypatch.setattr(type(agent), "_learn", broken)
    nexts: list[Any] = [
        lambda: agent.decide(GOOD),
        lambda: agent.act(GOOD),
        lambda: agent.observe(GOOD, 0, 1.0),
        lambda: agent.reward("x", 1.0),
        agent.settle,
    ]
    for call in nexts:
        calls.clear()
        with agent.learning():
            decisions = agent.decide_many([GOOD] * 3)
            agent.reward_many([each.id for each in decisions], [1.0] * 3)
            learner = agent._learner
            with learner._changed:
                assert learner._changed.wait_for(lambda learner=learner: learner._done == learner._given, PATIENCE)
            with pytest.raises(RuntimeError, match=r"The thread of learning\(\) could not learn") as caught:
                call()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            # It is said once; the decision waits again, and the one after it is learnt.
            assert agent.decide(GOOD).action in range(ACTIONS)
            agent.reward(decisions[1].id, 1.0)
    assert agent.observed == 3 * len(nexts)


def test_an_error_at_the_end_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS["linear"]()
    monkeypatch.setattr(agent, "_learn", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="could not learn an observation"), agent.learning():
        agent.observe(GOOD, 0, 1.0)
    monkeypatch.undo()
    agent.observe(GOOD, 0, 1.0)  # without the thread
    with agent.learning():
        agent.observe(GOOD, 0, 1.0)
    assert agent.observed == 2


def test_there_is_one_thread_and_not_for_replicas() -> None:
    agent = KINDS["uniform"]()
    with agent.learning(), pytest.raises(RuntimeError, match="learns for this agent already"), agent.learning():
        pass
    with pytest.raises(ValueError, match="2 replicas"), KINDS["uniform"](replicas=2).learning():
        pass
    for behind in (0, 1.5, "many"):
        with pytest.raises(ValueError, match=r"'behind' parameter of Uniform\.learning"), agent.learning(behind):  # type: ignore[arg-type]
            pass


def test_a_process_that_was_forked_is_refused() -> None:
    agent = KINDS["linear"]()
    reading, writing = os.pipe()
    with agent.learning():
        agent.observe(GOOD, 0, 1.0)
        agent.settle()
        child = os.fork()
        if child == 0:  # pragma: no cover
            said = ""
            for call in (lambda: agent.decide(GOOD), lambda: agent.observe(GOOD, 0, 1.0), agent.settle):
                try:
                    call()
                except RuntimeError as error:
                    said += str(error)
            os.write(writing, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        assert os.read(reading, 10_000).decode().count("was forked from one in which a thread learns") == 3
    os.close(reading)


# --- files and copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["file", "pickle", "deepcopy"])
def test_a_copy_has_learnt_all_that_was_given_before(way: str, tmp_path: Path) -> None:
    agent = KINDS["thompson, input"](seed=1, updates=8)
    taken: list[Agent] = []
    with agent.learning():
        decisions = agent.decide_many([GOOD] * 8)
        agent.reward_many([each.id for each in decisions[:6]], [1.0] * 6)
        if way == "file":
            agent.save(tmp_path / "agent")
            taken.append(load(tmp_path / "agent"))
        else:
            taken.append(pickle.loads(pickle.dumps(agent)) if way == "pickle" else copy.deepcopy(agent))
        agent.settle()
        assert_same(snapshot(agent), snapshot(taken[0]))
        assert (taken[0].observed, taken[0].waiting) == (6, 2)
    twin = taken[0]
    twin.observe(GOOD, 0, 1.0)  # it learns at once
    assert twin.observed == 7


def test_files_that_are_saved_meanwhile_lose_no_decision(tmp_path: Path) -> None:
    agent, rounds = KINDS["linear"](), 60
    decided = threading.Event()

    def work() -> None:
        for _ in range(rounds):
            agent.reward(agent.decide(GOOD).id, 1.0)
        decided.set()

    def save() -> None:
        while not decided.is_set():
            agent.save(tmp_path / "agent")
            found = load(tmp_path / "agent")
            # Each decision is learnt or waits; one may have been made after the agent was looked at.
            assert found.acted - 1 <= found.observed + found.waiting <= found.acted + 1

    for thread in (False, True):
        decided.clear()
        if thread:
            with agent.learning():
                run_all([work, save])
        else:
            run_all([work, save])
    assert agent.observed == agent.acted == 2 * rounds


@pytest.mark.parametrize("kind", ["linear", "thompson, output", "thompson, input"])
@pytest.mark.parametrize("thread", [False, True])
def test_arms_are_added_and_retired_while_others_decide(kind: str, thread: bool) -> None:
    agent, done = KINDS[kind](seed=1), threading.Event()

    def decide() -> None:
        while not done.is_set():
            retired = agent.retired
            decision = agent.decide(GOOD)
            assert len(decision.means) >= ACTIONS
            assert decision.action not in retired
            agent.reward(decision.id, 1.0)
            agent.act(GOOD)

    def change() -> None:
        for number in range(6):
            (new,) = agent.add_arms()
            assert new == ACTIONS + number
            agent.retire(number)
        done.set()

    with agent.learning() if thread else contextlib.nullcontext():
        run_all([decide, decide, change])
    assert (agent.actions, agent.retired) == (ACTIONS + 6, tuple(range(6)))
    assert agent.acted == 2 * agent.observed
