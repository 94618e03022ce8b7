"""Actions that are added and retired while the service runs: durable, in the order of the log, for every worker."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import torch

from services import CONTEXT, decided, rewarded, serving, settings_in, wait_until, wait_until_learnt

from bayesbackprop.bandits import Agent, ThompsonSampling, Uniform, load  # isort: skip
from bayesbackprop.bandits import Log as Decided  # isort: skip
from bayesbackprop.serving import Log, Settings  # isort: skip
from bayesbackprop.serving.access import digest  # isort: skip
from bayesbackprop.serving.arms import Arms  # isort: skip
from bayesbackprop.serving.export import export  # isort: skip
from bayesbackprop.serving.learning import rebuilt  # isort: skip
from bayesbackprop.serving.snapshots import Snapshots  # isort: skip

pytestmark = pytest.mark.equivalence


@pytest.fixture(params=["linear", "small"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    path = tmp_path / "small.agent"
    ThompsonSampling(3, 2, hidden=[4], memory=50, updates=1, batch_size=8).save(path)
    return settings_in(tmp_path, agent=str(path) if request.param == "small" else "linear", snapshot_seconds=0.01)


def log_of(settings: Settings) -> Log:
    log = Log(settings.url)
    log.open()
    return log


def assert_same(one: Agent, other: Agent) -> None:
    mine, yours = one.tensors(), other.tensors()
    assert all(torch.equal(mine[name], yours[name]) for name in {**mine, **yours})
    assert (one.actions, one.retired, one.observed) == (other.actions, other.retired, other.observed)


def wait_for_changes(client: Any, count: int) -> None:
    wait_until(lambda: client.app.state.service.learner.changes == count)


def test_a_new_action_is_taken_and_learnt(settings: Settings) -> None:
    with serving(settings) as client:
        rewarded(client, 10)
        answer = client.post("/arms", json={"count": 2})
        assert (answer.status_code, answer.json()) == (
            200,
            {"added": [2, 3], "actions": 4, "retired": [], "repeated": False},
        )
        wait_for_changes(client, 1)
        found = decided(client, mask=[False, False, True, False])
        assert (found["action"], len(found["probabilities"])) == (2, 4)
        assert client.post("/reward", json={"id": found["id"], "reward": 1.0}).status_code == 200
        state = wait_until_learnt(client)
        assert (state["actions"], [arm["rewarded"] for arm in state["arms"]][2:]) == (4, [1, 0])
        assert_same(client.app.state.service.agent, rebuilt(log_of(settings)))


def test_a_retired_action_is_never_taken_again(settings: Settings) -> None:
    with serving(settings) as one, serving(settings) as two:
        waits = decided(one, mask=[True, False])["id"]
        answer = one.delete("/arms/0")
        assert (answer.status_code, answer.json()["retired"]) == (200, [0])
        for client in (one, two):  # whatever their agents know by now
            assert {decided(client)["action"] for _ in range(5)} == {1}
        assert one.delete("/arms/0").json() == answer.json()
        assert one.post("/reward", json={"id": waits, "reward": 1.0}).status_code == 200  # late, and learnt
        refused = two.post("/decide", json={"context": CONTEXT, "mask": [True, False]})
        assert (refused.status_code, "not retired" in refused.json()["message"]) == (422, True)
        assert [arm["retired"] for arm in wait_until_learnt(two)["arms"]] == [True, False]


def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with serving(settings_in(tmp_path)) as client:
        bad = {"count": 0}, {"count": 1001}, {"count": True}, {"features": [[1.0]]}, {"more": 1}
        assert [client.post("/arms", json=body).status_code for body in bad] == [422] * 5
        assert "'features' parameter of /arms" in client.post("/arms", json={"features": [[1.0]]}).json()["message"]
        assert client.delete("/arms/2").json()["error"] == "unknown"
        assert client.delete("/arms/nonsense").status_code == 422
        assert client.delete("/arms/1").status_code == 200
        last = client.delete("/arms/0")
        assert (last.status_code, last.json()["error"]) == (409, "last_arm")
        assert client.app.state.service.log.arms() == Arms(2, 2, frozenset({1}), 1)


def test_the_same_request_adds_once(tmp_path: Path) -> None:
    with serving(settings_in(tmp_path)) as client:
        first = client.post("/arms", json={"request": "summer"}).json()
        assert client.post("/arms", json={"request": "summer"}).json() == {**first, "repeated": True}
        other = client.post("/arms", json={"request": "summer", "count": 2})
        assert (other.status_code, other.json()["error"]) == (409, "conflict")
        assert client.get("/state").json()["actions"] == 3


def test_tokens(tmp_path: Path) -> None:
    full, reads = "a-token-of-many-letters", "another-of-many-letters"
    settings = settings_in(tmp_path, tokens=(digest(full),), read_tokens=(digest(reads),))
    with serving(settings) as client:
        for token, status in (("", 401), (reads, 403), (full, 200)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            assert client.post("/arms", json={}, headers=headers).status_code == status
            assert client.delete("/arms/0", headers=headers).status_code == status


def test_changes_have_their_place_among_the_rewards(settings: Settings) -> None:
    """Learnt late and at once, from snapshots of every stage or from the log alone: always the same agent."""
    with serving(settings) as client:
        rewarded(client, 5)
        wait_until_learnt(client)
        learner = client.app.state.service.learner
        learner.end()  # from here on nothing is learnt
        client.post("/arms", json={})
        rewarded(client, 5, seed=1)
        client.delete("/arms/0")
        client.post("/arms", json={})
        rewarded(client, 5, seed=2)
        assert learner.position == 5
    whole = rebuilt(log_of(settings))
    assert (whole.actions, whole.retired, whole.observed) == (4, (0,), 15)
    for _ in range(2):
        with serving(settings) as client:
            wait_until_learnt(client)
            wait_for_changes(client, 3)
            assert_same(client.app.state.service.agent, whole)
        found = Snapshots(settings.folder / log_of(settings).name).found()
        assert (found[0].position, found[0].changes) == (15, 3)
        assert_same(load(found[0].path), whole)
        for each in found:
            each.path.unlink()


def test_a_change_before_the_first_reward_reaches_all_workers(settings: Settings) -> None:
    with serving(settings) as one, serving(settings) as two:
        two.post("/arms", json={})
        for client in (one, two):
            wait_for_changes(client, 1)
        assert_same(one.app.state.service.agent, two.app.state.service.agent)
        rewarded(one, 8)
        two.delete("/arms/1")
        for client in (one, two):
            wait_until_learnt(client)
            wait_for_changes(client, 2)
        assert_same(one.app.state.service.agent, two.app.state.service.agent)
        assert_same(one.app.state.service.agent, rebuilt(log_of(settings)))


def test_a_snapshot_with_the_changes_of_another_log_is_skipped(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, snapshot_seconds=0.01)
    with serving(settings) as client:
        client.post("/arms", json={})
        wait_for_changes(client, 1)
    (found, *_) = Snapshots(settings.folder / log_of(settings).name).found()
    found.path.rename(found.path.with_name(found.path.name.replace(found.change, "f" * 32)))
    with serving(settings) as client:
        wait_for_changes(client, 1)
        assert len(client.app.state.service.learner._mangled) == 1


def test_masks_of_clients_that_do_not_know_the_new_actions(tmp_path: Path) -> None:
    with serving(settings_in(tmp_path, agent="uniform")) as client:
        client.post("/arms", json={"count": 2})
        wait_for_changes(client, 1)
        assert decided(client, mask=[True, True])["probabilities"] == [0.5, 0.5, 0.0, 0.0]
        assert decided(client, mask=[True, True, True])["probabilities"][3] == 0
        for wrong in ([True], [True] * 5):
            refused = client.post("/decide", json={"context": CONTEXT, "mask": wrong})
            assert (refused.status_code, "4 booleans" in refused.json()["message"]) == (422, True)


def test_a_mask_for_what_the_agent_has_not_learnt_yet_is_to_be_sent_again(tmp_path: Path) -> None:
    with serving(settings_in(tmp_path)) as client:
        client.app.state.service.learner.end()
        client.post("/arms", json={})
        refused = client.post("/decide", json={"context": CONTEXT, "mask": [False, False, True]})
        assert (refused.status_code, refused.json()["error"]) == (503, "not_learnt_yet")
        assert len(decided(client, mask=[True, True, True])["probabilities"]) == 2


def test_features_of_the_actions(tmp_path: Path) -> None:
    """Also the reward of a decision that was made with the features of fewer actions."""
    file, described = tmp_path / "described.agent", [[0.0, 1.0], [1.0, 0.0]]
    ThompsonSampling(3, 2, encoding="input", action_features=described, hidden=[4], memory=10).save(file)
    settings = settings_in(tmp_path, agent=str(file), snapshot_seconds=0.01)
    with serving(settings) as client:
        before = decided(client, features=[[2.0, 1.0], [1.0, 3.0]])
        assert client.post("/arms", json={}).status_code == 422
        assert client.post("/arms", json={"features": [[1.0, 1.0]]}).status_code == 200
        wait_for_changes(client, 1)
        after = decided(client, features=[[2.0, 1.0], [1.0, 3.0], [0.0, 0.0]])
        for each in (before, after):
            client.post("/reward", json={"id": each["id"], "reward": 1.0})
        state = wait_until_learnt(client)
        assert (state["learner"]["position"], state["learner"]["skipped"]) == (2, 0)
    with serving(settings) as client:
        assert_same(client.app.state.service.agent, rebuilt(log_of(settings)))


def test_a_request_that_is_repeated_is_the_first_whatever_the_actions_are_now(tmp_path: Path) -> None:
    file, settings = tmp_path / "described.agent", settings_in(tmp_path, agent=str(tmp_path / "described.agent"))
    ThompsonSampling(3, 2, encoding="input", action_features=[[0.0, 1.0], [1.0, 0.0]], hidden=[4], memory=10).save(file)
    with serving(settings) as client:
        asked = {"features": [[2.0, 1.0], [1.0, 3.0]], "mask": [True, False], "request": "a"}
        first = decided(client, **asked)
        client.post("/arms", json={"features": [[1.0, 1.0]]})
        client.delete("/arms/0")
        wait_for_changes(client, 2)
        assert decided(client, **asked) == {**first, "repeated": True}
        requests = [{"context": CONTEXT}, {"context": CONTEXT, **asked}]
        _, again = client.post("/decide/batch", json={"requests": requests}).json()["decisions"]
        assert again == {**first, "repeated": True}
        other = client.post("/decide", json={"context": CONTEXT, **asked, "mask": [True, True]})
        assert (other.status_code, other.json()["error"]) == (409, "conflict")
        new = client.post("/decide", json={"context": CONTEXT, **asked, "request": "b"})
        assert new.status_code == 422
        assert client.get("/state").json()["decisions"] == 2


def test_the_table_has_the_features_of_requests(tmp_path: Path) -> None:
    file, settings = tmp_path / "described.agent", settings_in(tmp_path, agent=str(tmp_path / "described.agent"))
    ThompsonSampling(3, 2, encoding="input", action_features=[[0.0, 1.0], [1.0, 0.0]], hidden=[4], memory=10).save(file)
    given: list[Any] = [[[2.0, 1.0], [1.0, 3.0]], None, [[2.0, 1.0], [1.0, 3.0], [0.5, 4.0]]]
    with serving(settings) as client:
        for features in given:
            if features is given[2]:
                client.post("/arms", json={"features": [[1.0, 1.0]]})
                wait_for_changes(client, 1)
            id = decided(client, features=features)["id"]
            assert client.post("/reward", json={"id": id, "reward": 1.0}).status_code == 200
        many = client.post("/decide", json={"context": CONTEXT, "features": [[1.0, 1.0]] * 4})
        assert many.status_code == 422
    export(log_of(settings), tmp_path / "log.csv")
    found = Decided.read_csv(tmp_path / "log.csv").requested
    assert found is not None
    assert [None if each is None else each.tolist() for each in found] == [[*given[0], [0.0, 0.0]], None, given[2]]


def test_the_table_says_what_could_be_taken_when(tmp_path: Path) -> None:
    file = tmp_path / "retired.agent"
    agent = Uniform(3, 3)
    agent.retire(2)
    agent.save(file)
    with serving(settings_in(tmp_path, actions=3, agent=str(file))) as client:
        for change in (None, "add", "retire"):
            if change == "add":
                client.post("/arms", json={})
                wait_for_changes(client, 1)
            elif change == "retire":
                client.delete("/arms/0")
            rewarded(client, 1)
    export(log_of(settings_in(tmp_path)), tmp_path / "log.csv")
    found = Decided.read_csv(tmp_path / "log.csv")
    assert found.masks is not None
    assert found.masks.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 1], [0, 1, 0, 1]]
    assert found.probabilities is not None
    assert torch.equal(found.probabilities > 0, found.masks)


def test_a_log_of_an_older_version_gets_the_table_of_changes(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with serving(settings) as client:
        rewarded(client, 3)
    log = log_of(settings)
    with log.engine.begin() as connection:
        connection.execute(sqlalchemy.text("DROP TABLE bbb_changes"))
        assert connection.execute(sqlalchemy.text("SELECT format FROM bbb_service")).scalar_one() == 1
    with serving(settings) as client:
        rewarded(client, 3)
        assert client.post("/arms", json={}).status_code == 200
    with log.engine.begin() as connection:  # which older versions refuse from now on
        assert connection.execute(sqlalchemy.text("SELECT format FROM bbb_service")).scalar_one() == 2
