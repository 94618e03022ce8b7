"""Threads share an agent: nothing is lost or torn, and a decision never waits for a round of learning."""

import copy
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import bandit_threads
from bandit_threads import PATIENCE, act_and_observe, run_all
from bandit_worlds import GOOD, KINDS, LEARNING, NEURAL, assert_same, live, snapshot
from bayesbackprop.bandits import Agent, load
from bayesbackprop.bandits._turns import Turns
from processes import run_script

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("kind", ["uniform", "linear", "thompson, input", "epsilon, input"])
def test_thousands_of_calls_lose_nothing(kind: str, tmp_path: Path) -> None:
    """In a process of its own, which may crash."""
    run_script(bandit_threads.__file__, kind, 6, 170, tmp_path, timeout=PATIENCE)


@pytest.mark.parametrize("kind", KINDS)
def test_each_decision_has_a_draw_of_its_own(kind: str) -> None:
    shared, alone = KINDS[kind](seed=3), KINDS[kind](seed=3)
    chosen: list[int] = []
    run_all([lambda: chosen.extend(shared.act(GOOD) for _ in range(50))] * 4)
    assert Counter(chosen) == Counter(alone.act(GOOD) for _ in range(200))
    assert shared.acted == 200


@pytest.mark.parametrize("kind", LEARNING)
def test_agents_that_share_nothing_learn_as_if_alone(kind: str) -> None:
    together, alone = ([KINDS[kind](seed=seed) for seed in range(4)] for _ in range(2))
    run_all([partial(act_and_observe, agent, worker, 40, []) for worker, agent in enumerate(together)])
    for worker, agent in enumerate(alone):
        act_and_observe(agent, worker, 40, [])
        assert_same(snapshot(together[worker]), snapshot(agent))


# --- who waits for whom ----------------------------------------------------------------------------------------------


def at_updates(agent: Any, hook: Callable[[int], object], patch: pytest.MonkeyPatch) -> None:
    """Call ``hook`` at the beginning of each update of the agent, with its number from 0."""
    minimise, numbers = type(agent)._minimise, count()

    def hooked(self: Any, *arguments: Any) -> Any:
        if self is agent:
            hook(next(numbers))
        return minimise(self, *arguments)

    patch.setattr(type(agent), "_minimise", hooked)


@pytest.mark.parametrize("kind", NEURAL)
def test_a_decision_waits_for_an_update_and_not_for_a_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, decided, during = KINDS[kind](updates=64), threading.Event(), list[int]()
    decision = threading.Thread(target=lambda: (agent.act(GOOD), decided.set()), daemon=True)

    def hook(update: int) -> None:
        if update == 3:
            decision.start()
        if update >= 3 and not during and decided.wait(0.05):
            during.append(update)

    at_updates(agent, hook, monkeypatch)
    agent.observe(GOOD, 0, 1.0)
    decision.join(PATIENCE)
    assert during, "the decision waited for the round"
    assert during[0] > 3, "the decision did not wait for the update"
    assert (agent.acted, agent.observed) == (1, 1)


def test_decisions_do_not_change_what_is_learnt() -> None:
    disturbed, alone = (KINDS["thompson, input"](seed=2, updates=16) for _ in range(2))
    learning = threading.Thread(target=lambda: [disturbed.observe(GOOD, action % 4, 1.0) for action in range(8)])
    learning.start()
    while learning.is_alive():
        disturbed.act(GOOD)
    for action in range(8):
        alone.observe(GOOD, action % 4, 1.0)
    assert disturbed.acted > 8
    assert_same({**snapshot(disturbed), "acted": torch.tensor(0)}, snapshot(alone))


def test_saves_and_copies_are_of_a_moment_between_two_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, alone = (KINDS["thompson, input"](seed=2, updates=8) for _ in range(2))
    taken: list[Agent] = []

    def save() -> None:
        agent.save(tmp_path / "agent")
        taken.append(load(tmp_path / "agent"))

    ways: list[Callable[[], object]] = [
        save,
        lambda: taken.append(pickle.loads(pickle.dumps(agent))),
        lambda: taken.append(copy.deepcopy(agent)),
    ]
    takers = [threading.Thread(target=way, daemon=True) for way in ways]

    def hook(update: int) -> None:
        if update == 3:
            for taker in takers:
                taker.start()
        if update >= 3:
            takers[update % 3].join(0.05)  # time for it to look

    at_updates(agent, hook, monkeypatch)
    agent.observe(GOOD, 1, 1.0)
    for taker in takers:
        taker.join(PATIENCE)
    alone.observe(GOOD, 1, 1.0)
    assert len(taken) == 3
    for each in taken:
        assert_same(snapshot(each), snapshot(alone))


def test_tensors_restored_while_others_use_the_agent_are_taken_as_a_whole() -> None:
    agent, other = KINDS["linear"](seed=1), KINDS["linear"](seed=1)
    live(other, range(20))
    tensors, empty = other.tensors(), agent.tensors()

    def restore() -> None:
        for number in range(60):
            agent.restore(*((tensors, 20, 20) if number % 2 else (empty, 0, 0)))

    def look() -> None:
        for _ in range(60):
            found, said, _ = agent._snapshot()
            whole = tensors if said["observed"] else empty
            assert_same(found, whole)
            agent.act(GOOD)

    run_all([restore, look, look])


def test_the_newest_of_several_saves_stays(tmp_path: Path) -> None:
    agent = KINDS["linear"]()

    def work() -> None:
        for _ in range(30):
            agent.observe(GOOD, 0, 1.0)
            seen = agent.observed
            agent.save(tmp_path / "agent")
            assert load(tmp_path / "agent").observed >= seen

    run_all([work] * 3)


# --- copies, interruptions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda agent: pickle.loads(pickle.dumps(agent))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_as_the_agent_and_shares_nothing_with_it(kind: str, duplicate: Callable[[Any], Any]) -> None:
    agent = KINDS[kind](seed=4)
    live(agent, range(3))
    before, twin = snapshot(agent), duplicate(agent)
    chosen = live(twin, range(3, 9))
    assert_same(snapshot(agent), before)
    assert live(agent, range(3, 9)) == chosen
    assert_same(snapshot(agent), snapshot(twin))


def test_a_call_inside_a_call_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    agent = KINDS["thompson, input"](updates=2)
    calls: list[Callable[[], object]] = [
        lambda: agent.act(GOOD),
        lambda: agent.observe(GOOD, 0, 1.0),
        lambda: agent.save(tmp_path / "agent"),
        agent.tensors,
    ]

    def hook(_: int) -> None:
        for call in calls:
            with pytest.raises(RuntimeError, match="in the middle of a call of the same agent"):
                call()

    at_updates(agent, hook, monkeypatch)
    agent.observe(GOOD, 0, 1.0)
    assert (agent.acted, agent.observed) == (0, 1)
    for call in calls[2:]:
        call()


def test_an_error_passes_the_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = KINDS["thompson, input"](updates=2)
    with monkeypatch.context() as patch:
        at_updates(agent, lambda _: 1 / 0, patch)
        with pytest.raises(ZeroDivisionError):
            agent.observe(GOOD, 0, 1.0)
    run_all([partial(act_and_observe, agent, worker, 5, []) for worker in range(2)])
    assert (agent.acted, agent.observed) == (10, 10)


# --- turns -----------------------------------------------------------------------------------------------------------


def in_line(turns: Turns, number: int) -> None:
    """Wait until so many have the turn or wait for it."""
    for _ in range(int(PATIENCE / 0.001)):
        if len(turns._line) == number:
            return
        time.sleep(0.001)
    raise AssertionError(f"{len(turns._line)} are in line instead of {number}")


def test_turns_are_in_the_order_of_asking() -> None:
    turns, order = Turns(), list[int]()

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(5)]
        for number, thread in enumerate(threads):
            thread.start()
            in_line(turns, number + 2)
        turns.give_way()  # to all of them
        order.append(5)
    for thread in threads:
        thread.join(PATIENCE)
    assert order == list(range(6))
    assert not turns._line


@pytest.mark.parametrize("gives_way", [False, True])
def test_who_is_interrupted_while_waiting_leaves_the_line(gives_way: bool) -> None:
    turns, order, main = Turns(), list[str](), threading.get_ident()
    held, interrupted, release = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            release.wait(PATIENCE)

    def follow() -> None:
        with turns:
            order.append("next")

    def interrupt() -> None:
        held.wait(PATIENCE)
        in_line(turns, 2)
        threads[2].start()
        in_line(turns, 3)
        while not interrupted.wait(0.01):  # Python misses a signal just before it waits for a lock
            signal.pthread_kill(main, signal.SIGINT)

    def once(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def wait() -> None:
        if gives_way:
            with turns:
                threads[0].start()
                in_line(turns, 2)
                threads[1].start()
                turns.give_way()
                order.append("interrupted")
        else:
            threads[0].start()
            in_line(turns, 1)
            threads[1].start()
            with turns:
                order.append("interrupted")

    threads = [threading.Thread(target=work, daemon=True) for work in (hold, interrupt, follow)]
    before = signal.signal(signal.SIGINT, once)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
        threads[1].join(PATIENCE)
    finally:
        signal.signal(signal.SIGINT, before)
    in_line(turns, 2)  # the one that holds it, and the next
    release.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["next"]
    assert not turns._line
