"""Every endpoint, and every refusal."""

from pathlib import Path
from typing import Any

import pytest

from services import CONTEXT, decided, rewarded, serving, settings_in, wait_until_learnt

from bayesbackprop.bandits import ThompsonSampling  # isort: skip
from bayesbackprop.likelihoods import Bernoulli  # isort: skip
from bayesbackprop.serving import Limits  # isort: skip

pytestmark = pytest.mark.identities


@pytest.fixture
def client(tmp_path: Path) -> Any:
    with serving(settings_in(tmp_path)) as made:
        yield made


def test_a_decision_says_what_a_log_needs(client: Any) -> None:
    found = decided(client)
    assert set(found) == {
        *("id", "action", "propensity", "probabilities", "means", "spreads", "explored", "repeated"),
    }
    assert sum(found["probabilities"]) == pytest.approx(1.0)
    assert found["propensity"] == found["probabilities"][found["action"]] > 0
    assert len(found["means"]) == len(found["spreads"]) == 2
    best = max(range(2), key=lambda action: found["means"][action])
    assert found["explored"] == (found["means"][found["action"]] < found["means"][best])


def test_a_mask_is_kept(client: Any) -> None:
    for _ in range(20):
        found = decided(client, mask=[False, True])
        assert (found["action"], found["propensity"], found["probabilities"]) == (1, 1.0, [0.0, 1.0])


def test_a_second_request_of_the_same_name_is_the_first(client: Any) -> None:
    first = decided(client, request="a")
    again = decided(client, request="a")
    assert again == {**first, "repeated": True}
    other = client.post("/decide", json={"context": [0.0, 0.0, 0.0], "request": "a"})
    assert (other.status_code, other.json()["error"]) == (409, "conflict")
    assert client.get("/state").json()["decisions"] == 1


def test_names_of_one_batch_are_known_to_each_other(client: Any) -> None:
    requests = [{"context": CONTEXT, "request": name} for name in "aba"]
    first, _, again = client.post("/decide/batch", json={"requests": requests}).json()["decisions"]
    assert again == {**first, "repeated": True}
    assert client.get("/state").json()["decisions"] == 2


def test_a_batch_with_a_conflict_writes_nothing(client: Any) -> None:
    decided(client, request="a")
    requests = [{"context": CONTEXT}, {"context": [0.0, 0.0, 0.0], "request": "a"}]
    assert client.post("/decide/batch", json={"requests": requests}).status_code == 409
    assert client.get("/state").json()["decisions"] == 1


def test_a_conflict_says_what_differs(client: Any) -> None:
    decided(client, request="a")
    masked = {"context": CONTEXT, "mask": [True, True], "request": "a"}
    said = client.post("/decide", json=masked).json()["message"]
    assert said == "The request 'a' was decided before, with another mask."
    batch = [{**masked, "request": "b"}, {"context": [0.0, 0.0, 0.0], "request": "b"}]
    said = client.post("/decide/batch", json={"requests": batch}).json()["message"]
    assert said == "Two entries of the batch are called 'b', and differ in their context and mask."


def test_a_reward_counts_once(client: Any) -> None:
    id = decided(client)["id"]
    for status in ("accepted", "known", "known"):
        answer = client.post("/reward", json={"id": id, "reward": 1.5})
        assert (answer.status_code, answer.json()) == (200, {"id": id, "status": status})
    other = client.post("/reward", json={"id": id, "reward": 2})
    assert (other.status_code, other.json()["error"]) == (409, "conflict")
    state = wait_until_learnt(client)
    assert (state["rewards"], state["learner"]["position"]) == (1, 1)


def test_an_unknown_decision_has_no_reward(client: Any) -> None:
    answer = client.post("/reward", json={"id": "f" * 32, "reward": 1})
    assert (answer.status_code, answer.json()["error"]) == (404, "unknown")


def test_an_expired_decision_has_no_reward(tmp_path: Path) -> None:
    with serving(settings_in(tmp_path, limits=Limits(expire=1e-3))) as client:
        answer = client.post("/reward", json={"id": decided(client)["id"], "reward": 1})
    assert (answer.status_code, answer.json()["error"]) == (410, "expired")


def test_each_reward_of_a_batch_has_an_answer(client: Any) -> None:
    one, two = decided(client)["id"], decided(client)["id"]
    client.post("/reward", json={"id": one, "reward": 1})
    sent = [(one, 1), (one, 2), (two, 3), (two, 3), (two, 4), ("none", 1)]
    answer = client.post("/reward/batch", json={"rewards": [{"id": id, "reward": r} for id, r in sent]})
    assert answer.status_code == 207
    statuses = [each["status"] for each in answer.json()["results"]]
    assert statuses == ["known", "conflict", "accepted", "known", "conflict", "unknown"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/decide", {}, "context"),
        ("/decide", {"context": CONTEXT[:2]}, "3 numbers"),
        ("/decide", {"context": [*CONTEXT, 0.0]}, "3 numbers"),
        ("/decide", {"context": ["1", 2, 3]}, "context.0"),
        ("/decide", {"context": [True, 2, 3]}, "context.0"),
        ("/decide", {"context": [1e7, 2, 3]}, "context.0"),
        ("/decide", {"context": CONTEXT, "mask": [True]}, "2 booleans"),
        ("/decide", {"context": CONTEXT, "mask": [False, False]}, "at least one"),
        ("/decide", {"context": CONTEXT, "mask": [1, 0]}, "mask.0"),
        ("/decide", {"context": CONTEXT, "features": [[1.0], [2.0]]}, "features"),
        ("/decide", {"context": CONTEXT, "request": ""}, "request"),
        ("/decide", {"context": CONTEXT, "request": "a b"}, "request"),
        ("/decide", {"context": CONTEXT, "request": "a" * 101}, "request"),
        ("/decide", {"context": CONTEXT, "more": 1}, "more"),
        ("/decide/batch", {"requests": []}, "requests"),
        ("/decide/batch", {"requests": [{"context": CONTEXT}, {"context": []}]}, "3 numbers"),
        ("/reward", {"id": "a"}, "reward"),
        ("/reward", {"id": "a", "reward": "1"}, "reward"),
        ("/reward", {"id": "a", "reward": 1e16}, "reward"),
        ("/reward/batch", {"rewards": []}, "rewards"),
    ],
)
def test_what_is_malformed_is_refused_and_changes_nothing(path: str, body: Any, named: str, client: Any) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert named in answer.json()["message"]
    state = client.get("/state").json()
    assert (state["decisions"], state["rewards"]) == (0, 0)


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"context": [NaN, 1, 2]}', b'{"context": [1e999, 1, 2]}', b"\xff", b"[]"]
)
def test_what_is_no_json_is_refused(body: bytes, client: Any) -> None:
    answer = client.post("/decide", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == (400 if body == b"\xff" else 422)  # the first: not even text
    assert answer.json()["error"] == "malformed"


def test_a_body_that_is_no_json_is_said_to_be_none(client: Any) -> None:
    answer = client.post("/decide", content=b"{bad", headers={"Content-Type": "application/json"})
    said = answer.json()["message"]
    assert said.startswith("the body is not JSON: Expecting property name")
    assert said.endswith(", at character 1")


@pytest.mark.parametrize("path", ["/decide", "/decide/batch", "/reward", "/reward/batch", "/arms"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (None, "It is missing."),
        ("application/x-www-form-urlencoded", "Got 'application/x-www-form-urlencoded' instead."),
        ("text/plain; charset=utf-8", "Got 'text/plain; charset=utf-8' instead."),
    ],
)
def test_a_body_of_another_type_is_said_to_be_one(path: str, kind: str | None, says: str, client: Any) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    body = b"7" if kind is None else b'{"context": [1, 2, 3]}'  # some versions of FastAPI take one without for JSON
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code == 422
    assert answer.json() == {
        "error": "malformed",
        "message": f"The 'Content-Type' header must be 'application/json'. {says}",
    }


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/problem+json"])
def test_json_by_other_names_is_json(kind: str, client: Any) -> None:
    for body, status in ((b'{"context": [1, 2, 3]}', 200), (b'{"context": [1, 2, 1e7]}', 422)):
        answer = client.post("/decide", content=body, headers={"Content-Type": kind})
        assert answer.status_code == status
    assert answer.json()["message"] == "context.2: Input should be less than or equal to 1000000"


def test_one_bad_request_does_not_spoil_others_that_wait_with_it(client: Any) -> None:
    """Features, which this agent does not take, are refused by the agent itself, when all are decided together."""
    import threading

    answers: list[int] = []

    def ask(body: Any) -> None:
        answers.append(client.post("/decide", json=body).status_code)

    bodies: list[Any] = [{"context": CONTEXT}, {"context": CONTEXT, "features": [[1.0], [2.0]]}] * 10
    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200] * 10 + [422] * 10
    assert client.get("/state").json()["decisions"] == 10


def test_a_reward_that_the_agent_cannot_learn_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "clicks.agent"
    ThompsonSampling(3, 2, likelihood=Bernoulli(), hidden=[4], memory=10).save(file)
    with serving(settings_in(tmp_path, agent=str(file))) as client:
        id = decided(client)["id"]
        answer = client.post("/reward", json={"id": id, "reward": 0.5})
        assert (answer.status_code, answer.json()["error"]) == (422, "malformed")
        assert client.post("/reward", json={"id": id, "reward": 1}).status_code == 200


def test_errors_name_the_path_that_was_asked(tmp_path: Path) -> None:
    file, described = tmp_path / "described.agent", [[0.0, 1.0], [1.0, 0.0]]
    bernoulli = ThompsonSampling(
        3, 2, encoding="input", action_features=described, likelihood=Bernoulli(), hidden=[4], memory=10
    )
    bernoulli.save(file)
    with serving(settings_in(tmp_path, agent=str(file))) as client:
        asked = client.post("/decide", json={"context": CONTEXT, "features": [[2.0], [1.0]]})
        assert (asked.status_code, asked.json()["error"]) == (422, "malformed")
        assert "'features' parameter of /decide must be 2 numbers for each of 2 actions" in asked.json()["message"]
        told = client.post("/reward", json={"id": decided(client)["id"], "reward": 0.5})
        assert "'reward' parameter of /reward must be 0 or 1" in told.json()["message"]
        assert "ThompsonSampling" not in asked.text + told.text


def test_features_of_the_actions(tmp_path: Path) -> None:
    file, described = tmp_path / "described.agent", [[0.0, 1.0], [1.0, 0.0]]
    ThompsonSampling(3, 2, encoding="input", action_features=described, hidden=[4], memory=10).save(file)
    with serving(settings_in(tmp_path, agent=str(file))) as client:
        requests = [{"context": CONTEXT, "features": [[2.0, 1.0], [1.0, 3.0]]}, {"context": CONTEXT}]
        found = client.post("/decide/batch", json={"requests": requests}).json()["decisions"]
        client.post("/reward/batch", json={"rewards": [{"id": each["id"], "reward": 1} for each in found]})
        state = wait_until_learnt(client)
    assert (state["learner"]["position"], state["learner"]["skipped"]) == (2, 0)


def test_limits(tmp_path: Path) -> None:
    limits = Limits(body=2000, batch=3, waiting=4)
    with serving(settings_in(tmp_path, limits=limits)) as client:
        one = {"context": CONTEXT}
        assert client.post("/decide", json={"context": [0.1] * 1000}).status_code == 413
        assert client.post("/decide", content=(b" " * 500 for _ in range(5))).status_code == 413
        assert client.post("/decide/batch", json={"requests": [one] * 4}).json()["error"] == "too_many"
        assert client.post("/reward/batch", json={"rewards": [{"id": "a", "reward": 1}] * 4}).status_code == 413
        first = client.post("/decide/batch", json={"requests": [one] * 3}).json()["decisions"]
        full = client.post("/decide/batch", json={"requests": [one] * 2})
        assert (full.status_code, full.json()["error"], full.headers["Retry-After"]) == (429, "too_many_waiting", "1")
        assert client.post("/decide", json=one).status_code == 200
        assert client.post("/decide", json=one).status_code == 429
        client.post("/reward", json={"id": first[0]["id"], "reward": 0})
        assert client.post("/decide", json=one).status_code == 200


def test_a_worker_whose_writer_has_ended_says_so(tmp_path: Path) -> None:
    with serving(settings_in(tmp_path)) as client:
        client.app.state.service.writer.end()
        answer = client.post("/decide", json={"context": CONTEXT})
        assert (answer.status_code, answer.json()["error"]) == (503, "overloaded")
        assert client.get("/health").status_code == 503


def test_a_log_that_cannot_be_written_is_said(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.exc import OperationalError

    def full(*_: Any, **__: Any) -> Any:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    log = client.app.state.service.log
    with monkeypatch.context() as patch:
        patch.setattr(log, "write", full)
        answer = client.post("/decide", json={"context": CONTEXT})
        assert (answer.status_code, answer.json()["error"]) == (503, "log_unavailable")
    assert decided(client)["action"] in (0, 1)


def test_the_state_adds_up(client: Any) -> None:
    rewards = dict(rewarded(client, 40))
    decided(client)
    state = wait_until_learnt(client)
    assert (state["agent"], state["features"], state["actions"]) == ("LinearThompson", 3, 2)
    assert (state["decisions"], state["rewards"], state["waiting"], state["lost"]) == (41, 40, 1, 0)
    assert sum(arm["chosen"] for arm in state["arms"]) == 41
    total = sum(arm["rewarded"] * (arm["reward"] or 0) for arm in state["arms"])
    assert total == pytest.approx(sum(rewards.values()))
    assert 0 <= state["exploration_rate"] <= 1
    assert state["learner"] == {
        "position": 40,
        "lag": 0,
        "is_learner": True,
        "skipped": 0,
        "trouble": None,
        "snapshot": state["learner"]["snapshot"],
    }
    regrets = [point["regret"] for point in state["history"]]
    assert regrets == sorted(regrets)
    assert regrets[-1] == pytest.approx(state["regret"])
    assert state["history"][-1]["decision"] == 41
    assert state["decisions_per_second"] == 4.1


def test_the_state_of_nothing(client: Any) -> None:
    state = client.get("/state").json()
    assert (state["decisions"], state["history"], state["exploration_rate"]) == (0, [], None)
    assert [arm["reward"] for arm in state["arms"]] == [None, None]


def test_metrics(client: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    rewarded(client, 5)
    wait_until_learnt(client)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }
    assert found[("bbb_decisions_total",)] == found[("bbb_rewards_total",)] == 5
    assert found[("bbb_learner_lag",)] == found[("bbb_waiting",)] == 0
    assert found[("bbb_requests_total", ("path", "/decide/batch"), ("status", "200"))] == 1
    assert found[("bbb_request_seconds_count", ("path", "/reward/batch"))] == 1


def test_health_and_pages(client: Any) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    page = client.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    described = client.get("/docs")
    assert described.status_code == 200
    assert "default-src 'none'" in described.headers["Content-Security-Policy"]
    assert "//" not in described.text.replace("</", "")  # nothing from elsewhere, where there may be no network
    for path in ("/decide/batch", "/arms/{action}", "The exact probability", "expired: the decision no longer waits"):
        assert path in described.text
    paths = client.get("/openapi.json").json()["paths"]
    posted = {"/decide", "/decide/batch", "/reward", "/reward/batch", "/arms", "/arms/{action}"}
    assert set(paths) == {*posted, "/state", "/metrics", "/health"}
    answer = client.get("/nothing")
    assert (answer.status_code, answer.json()["error"]) == (404, "no_such_page")
    assert client.get("/decide").json()["error"] == "other_method"
