"""Sessions: what they work on, when they rest, how many there are, and what they say when something is wrong."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from playgrounds import POINTS, bandit, classification, regression
from services import wait_until

from bayesbackprop.convergence import Convergence  # isort: skip
from bayesbackprop.playground import sessions as module, training  # isort: skip
from bayesbackprop.playground.sessions import Limits, Sessions, warm_up  # isort: skip
from bayesbackprop.playground.training import Training  # isort: skip
from bayesbackprop.serving.access import RefusedError  # isort: skip

pytestmark = pytest.mark.identities

SMALL: dict[str, Any] = {"width": 4, "layers": 1, "family": "diagonal"}


@pytest.fixture
def made() -> Iterator[Any]:
    """What makes sessions, which are ended after the test."""
    found: list[Sessions] = []

    def make(**limits: Any) -> Sessions:
        found.append(Sessions(Limits(**limits)))
        return found[-1]

    yield make
    for each in found:
        threads = list(each._by_name.values())
        each.end()
        assert not any(session.is_alive() for session in threads)


def newest(sessions: Sessions, name: str = "a") -> Any:
    """The newest snapshot, when there is one."""
    wait_until(lambda: sessions._by_name[name].newest(0) is not None)
    return sessions.newest(name, 0)


def step(sessions: Sessions, name: str = "a") -> int:
    found: int = newest(sessions, name).step
    return found


def test_it_trains_until_it_has_settled(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "Convergence", partial(Convergence, first=100))
    sessions = made()
    sessions.put("a", regression([(0.0, 0.0)], **SMALL, noise=1.0))
    wait_until(lambda: newest(sessions).status == "settled")
    found = newest(sessions)
    assert found.step > 100
    assert found.trained.costs.step[-1] <= found.step
    time.sleep(0.1)
    assert newest(sessions) == found


def test_each_snapshot_is_newer(made: Any) -> None:
    sessions = made()
    assert sessions.put("a", regression(**SMALL)) == 1
    wait_until(lambda: newest(sessions).version > 2)
    found = newest(sessions)
    wait_until(lambda: sessions.newest("a", found.version) is not None)
    later = sessions.newest("a", found.version)
    assert later is not None
    assert (later.version > found.version, later.step > found.step) == (True, True)
    assert sessions.newest("a", 10**9) is None


def test_another_work_takes_the_place_of_the_first(made: Any) -> None:
    sessions = made()
    sessions.put("a", regression(**SMALL))
    wait_until(lambda: step(sessions) > 20)
    before = step(sessions)
    assert sessions.put("a", regression([*POINTS, (0.0, 2.0)], **SMALL)) == 2
    wait_until(lambda: newest(sessions).work == 2)
    assert step(sessions) >= before  # from where the network stood
    assert sessions.put("a", classification([(0, 0, 1)], **SMALL)) == 3
    wait_until(lambda: newest(sessions).task == "classification")
    assert newest(sessions).trained.picture.kind == "map"
    assert sessions.put("a", bandit()) == 4
    wait_until(lambda: newest(sessions).task == "bandit" and step(sessions) > 2)
    assert newest(sessions).trained is None
    assert len(newest(sessions).played.players) == 2


def test_what_is_refused_changes_nothing(made: Any) -> None:
    sessions = made()
    sessions.put("a", regression(**SMALL))
    wait_until(lambda: step(sessions) > 5)
    with pytest.raises(ValueError, match="full"):
        sessions.put("a", regression(family="full"))
    before = newest(sessions)
    wait_until(lambda: step(sessions) > before.step)
    assert newest(sessions).work == 1
    with pytest.raises(ValueError, match="full"):
        sessions.put("b", regression(family="full"))
    assert len(sessions) == 1


def test_a_pace_of_0_waits_and_another_pace_is_no_other_work(made: Any) -> None:
    sessions = made()
    sessions.put("a", regression(**SMALL, pace=0))
    wait_until(lambda: newest(sessions).version >= 1)
    time.sleep(0.3)
    assert step(sessions) <= 1
    began = time.monotonic()
    assert sessions.put("a", regression(**SMALL, pace=40)) == 1
    wait_until(lambda: step(sessions) >= 20)
    assert step(sessions) <= 2 + 40 * (time.monotonic() - began)
    assert sessions.put("a", regression(**SMALL)) == 1


def test_it_rests_while_nobody_asks(made: Any) -> None:
    sessions = made(rest=0.3)
    sessions.put("a", regression(**SMALL))
    wait_until(lambda: step(sessions) > 5)
    time.sleep(0.8)
    session = sessions._by_name["a"]
    resting = session._snapshot
    time.sleep(0.5)
    assert session._snapshot is resting
    before = step(sessions)  # which asks
    wait_until(lambda: step(sessions) > before)


def test_a_failure_is_said_and_other_settings_go_on(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the numbers are none")

    sessions = made()
    with monkeypatch.context() as patch:
        patch.setattr(Training, "run", fail)
        sessions.put("a", regression(**SMALL))
        wait_until(lambda: newest(sessions).status == "failed")
        found = newest(sessions)
        assert (found.message, found.trained) == ("the numbers are none", None)
    sessions.put("a", regression(**SMALL, noise=0.2))
    wait_until(lambda: newest(sessions).status == "training" and step(sessions) > 5)


def test_there_are_only_so_many_and_those_that_rest_make_room(made: Any) -> None:
    sessions = made(sessions=2, rest=0.4)
    sessions.put("a", regression(**SMALL))
    sessions.put("b", regression(**SMALL))
    with pytest.raises(RefusedError, match="2 pages open already"):
        sessions.put("c", regression(**SMALL))
    time.sleep(0.5)
    sessions.newest("b", 0)
    first = sessions._by_name["a"]
    sessions.put("c", regression(**SMALL))
    assert sorted(sessions._by_name) == ["b", "c"]
    wait_until(lambda: not first.is_alive())
    with pytest.raises(RefusedError, match="no longer"):
        sessions.newest("a", 0)


def test_one_that_nobody_asks_is_forgotten(made: Any) -> None:
    sessions = made(expiry=0.2)
    sessions.put("a", regression(**SMALL))
    session = sessions._by_name["a"]
    time.sleep(0.3)
    with pytest.raises(RefusedError, match="no such session"):
        sessions.newest("a", 0)
    wait_until(lambda: not session.is_alive())


def test_closing_one_ends_its_thread(made: Any) -> None:
    sessions = made()
    sessions.put("a", regression(**SMALL))
    session = sessions._by_name["a"]
    sessions.close("a")
    sessions.close("a")
    wait_until(lambda: not session.is_alive())
    assert len(sessions) == 0


def test_several_train_by_turns(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work: list[int] = []
    most: list[int] = []
    whole = Training.look

    def look(training: Training) -> Any:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.02)
        try:
            return whole(training)
        finally:
            at_work.pop()

    monkeypatch.setattr(module.Training, "look", look)
    sessions = made()
    for name in "abc":
        sessions.put(name, regression(**SMALL))
    wait_until(lambda: all(newest(sessions, name).version > 2 for name in "abc"))
    assert max(most) == 1


def test_a_first_step_can_be_taken_before_anyone_asks() -> None:
    warm_up()
