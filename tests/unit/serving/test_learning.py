"""Snapshot and log together are the agent that learnt everything in order."""

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from services import rewarded, serving, settings_in, wait_until, wait_until_learnt

from bayesbackprop.bandits import Agent, LinearThompson, ThompsonSampling, load  # isort: skip
from bayesbackprop.serving import Log, Settings  # isort: skip
from bayesbackprop.serving.app import Service  # isort: skip
from bayesbackprop.serving.learning import rebuilt  # isort: skip
from bayesbackprop.serving.snapshots import Snapshots  # isort: skip

pytestmark = pytest.mark.equivalence


def small(folder: Path) -> str:
    """The file of an agent that learns quickly."""
    path = folder / "small.agent"
    ThompsonSampling(3, 2, hidden=[4], memory=50, updates=2, batch_size=8).save(path)
    return str(path)


def assert_same(one: Agent, other: Agent) -> None:
    mine, yours = one.tensors(), other.tensors()
    assert mine.keys() == yours.keys()
    assert all(torch.equal(mine[name], yours[name]) for name in mine)
    assert one.observed == other.observed


def snapshots_of(settings: Settings) -> Snapshots:
    log = Log(settings.url)
    log.open()
    log.close()
    return Snapshots(settings.folder / log.name)


def log_of(settings: Settings) -> Log:
    log = Log(settings.url)
    log.open()
    return log


@pytest.fixture(params=["linear", "small"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    agent = small(tmp_path) if request.param == "small" else "linear"
    return settings_in(tmp_path, agent=agent, snapshot_seconds=0.01)


def test_the_end_leaves_a_snapshot_of_all(settings: Settings) -> None:
    with serving(settings) as client:
        rewarded(client, 30)
        wait_until_learnt(client)
    (newest, *_) = snapshots_of(settings).found()
    assert newest.position == 30
    assert_same(load(newest.path), rebuilt(log_of(settings)))
    assert len(snapshots_of(settings).found()) <= 3


def test_a_service_goes_on_from_snapshot_and_log(settings: Settings) -> None:
    """One that ended before it had learnt all; then one whose snapshots are gone."""
    with serving(settings) as client:
        rewarded(client, 10)
        wait_until_learnt(client)
        client.app.state.service.learner.end()
        rewarded(client, 10, seed=1)
        assert client.get("/state").json()["learner"]["lag"] == 10
    assert snapshots_of(settings).found()[0].position == 10
    for _ in range(2):
        with serving(settings) as client:
            wait_until_learnt(client)
            assert_same(client.app.state.service.agent, rebuilt(log_of(settings)))
        for each in snapshots_of(settings).found():
            each.path.unlink()


@pytest.mark.parametrize("spoilt", ["cut", "flipped", "empty", "another agent", "another log", "ahead"])
def test_a_bad_snapshot_is_skipped_with_a_message(spoilt: str, tmp_path: Path, caplog: Any) -> None:
    settings = settings_in(tmp_path, agent=small(tmp_path), snapshot_seconds=0.01)
    with serving(settings) as client:
        rewarded(client, 12)
        wait_until_learnt(client)
    snapshots = snapshots_of(settings).found()
    for each in snapshots[1:]:
        each.path.unlink()
    path, content = snapshots[0].path, bytearray(snapshots[0].path.read_bytes())
    if spoilt == "cut":
        path.write_bytes(content[:-20])
    elif spoilt == "flipped":
        content[-20] ^= 1
        path.write_bytes(content)
    elif spoilt == "empty":
        path.write_bytes(b"")
    elif spoilt == "another agent":
        LinearThompson(3, 2).save(path)
    elif spoilt == "another log":
        path.rename(path.with_name(f"{12:012d}-{'0' * 32}.agent"))
    else:
        path.rename(path.with_name(f"{13:012d}-{'0' * 32}.agent"))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bayesbackprop.serving").addHandler(handler)
    try:
        service = Service(settings)
        service.learner.take_over()
        assert service.learner.position == 0
    finally:
        logging.getLogger("bayesbackprop.serving").removeHandler(handler)
    assert [each for each in said if "is skipped" in each]
    service.start()
    wait_until(lambda: service.learner.position == 12)
    assert_same(service.agent, rebuilt(service.log))
    service.end()


def test_an_older_snapshot_is_taken_where_the_newest_is_bad(settings: Settings) -> None:
    with serving(settings) as client:
        for n in range(3):
            rewarded(client, 5, seed=n)
            wait_until_learnt(client)
            learner = client.app.state.service.learner
            wait_until(lambda learner=learner: learner.snapshot == learner.position)
    newest, before, *_ = snapshots_of(settings).found()
    newest.path.write_bytes(b"nonsense")
    service = Service(settings)
    service.learner.take_over()
    assert service.learner.position == before.position > 0
    service.start()
    wait_until(lambda: service.learner.position == 15)
    assert_same(service.agent, rebuilt(service.log))
    service.end()


def test_of_two_workers_one_learns_and_the_other_follows(settings: Settings) -> None:
    with serving(settings) as one, serving(settings) as two:
        wait_until(lambda: sum(each.get("/state").json()["learner"]["is_learner"] for each in (one, two)) == 1)
        rewarded(one, 8)
        rewarded(two, 8, seed=1)
        for each in (one, two):
            wait_until_learnt(each)
        assert_same(one.app.state.service.agent, two.app.state.service.agent)
        learners = [each.app.state.service.learner for each in (one, two)]
        first = next(learner for learner in learners if learner.is_learner)
        other = next(learner for learner in learners if learner is not first)
        first.end()
        wait_until(lambda: other.is_learner)
        rewarded(two, 8, seed=2)
        wait_until(lambda: other.position == 24)
        assert_same(other.agent, rebuilt(log_of(settings)))


def test_a_learner_that_was_stopped_for_long_does_no_harm(settings: Settings) -> None:
    """Both believe that they hold the office: what they make of the log is the same."""
    with serving(settings) as one:
        service = one.app.state.service
        rewarded(one, 8)
        wait_until_learnt(one)
        service.learner._asked = time.monotonic() + 1000  # it does not notice that its lease is over
        service.log.hold("elsewhere/1/x", -1.0, instead_of=service.log.holder())
        with serving(settings) as two:
            wait_until(lambda: two.get("/state").json()["learner"]["is_learner"])
            rewarded(two, 8, seed=1)
            for each in (one, two):
                wait_until_learnt(each)
            assert_same(service.agent, two.app.state.service.agent)
    assert_same(load(snapshots_of(settings).found()[0].path), rebuilt(log_of(settings)))


def test_the_office_of_a_dead_process_is_free(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, lease_seconds=3600.0)
    dead = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(dead, 0)
    service = Service(settings)
    service.log.hold(f"{socket.gethostname()}/{dead}/x", 3600.0)
    service.start()
    wait_until(lambda: service.learner.is_learner)
    service.end()


def test_the_office_of_a_living_one_is_not(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, lease_seconds=3600.0)
    service = Service(settings)
    service.log.hold(f"{socket.gethostname()}/{os.getpid()}/x", 3600.0)
    assert not service.learner._hold()
    service.log.close()


def test_what_the_agent_refuses_is_skipped_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a linear model may: contexts whose squares have no root. The position goes on."""
    settings = settings_in(tmp_path, snapshot_seconds=0.01)
    learn = LinearThompson.observe

    def refuse(agent: Any, context: Any, action: int, reward: float, **options: Any) -> None:
        if reward == 1.0:
            raise ValueError("no root")
        learn(agent, context, action, reward, **options)

    monkeypatch.setattr(LinearThompson, "observe", refuse)
    with serving(settings) as client:
        ids = [
            each["id"]
            for each in client.post("/decide/batch", json={"requests": [{"context": [1.0, 0, 0]}] * 4}).json()[
                "decisions"
            ]
        ]
        rewards = [{"id": id, "reward": reward} for id, reward in zip(ids, (0.5, 1.0, 2.0, 1.0), strict=True)]
        client.post("/reward/batch", json={"rewards": rewards})
        state = wait_until_learnt(client)
        assert (state["learner"]["position"], state["learner"]["skipped"]) == (4, 2)
    with serving(settings) as client:
        service = client.app.state.service
        assert (service.learner.position, service.agent.observed) == (4, 2)
        assert_same(service.agent, rebuilt(service.log))


def test_a_learner_in_trouble_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path)
    with serving(settings) as client:
        service = client.app.state.service

        def fail(*_: Any) -> Any:
            raise OSError("the database is away")

        with monkeypatch.context() as patch:
            patch.setattr(service.log, "after", fail)
            wait_until(lambda: client.get("/state").json()["learner"]["trouble"] is not None)
            assert "the database is away" in client.get("/state").json()["learner"]["trouble"]
        rewarded(client, 3)
        wait_until(lambda: client.get("/state").json()["learner"]["trouble"] is None)
        assert wait_until_learnt(client)["learner"]["position"] == 3


def test_a_full_disk_of_snapshots_stops_no_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path, snapshot_seconds=0.01)
    with serving(settings) as client:
        service = client.app.state.service

        def fail(*_: Any) -> Any:
            raise OSError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(service.learner._snapshots, "write", fail)
            rewarded(client, 3)
            state = wait_until_learnt(client)
            assert state["learner"]["position"] == 3
            wait_until(lambda: "no space" in (client.get("/state").json()["learner"]["trouble"] or ""))
