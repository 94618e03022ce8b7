"""Every endpoint of the playground, and every refusal."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from playgrounds import NAME, POINTS
from services import wait_until

from fastapi.testclient import TestClient  # isort: skip

from bayesbackprop.playground import Limits, make_app  # isort: skip
from bayesbackprop.playground.app import read_page  # isort: skip

pytestmark = pytest.mark.identities

JSON = {"Content-Type": "application/json"}
SMALL = {"width": 4, "layers": 1, "family": "diagonal"}
WORK = {"task": "regression", "points": POINTS, "settings": SMALL}


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(make_app(Limits(sessions=2)), base_url="http://127.0.0.1") as made:
        yield made


def put(client: TestClient, work: Any, name: str = NAME) -> Any:
    return client.put(f"/sessions/{name}", content=json.dumps(work), headers=JSON)


def seen(client: TestClient, name: str = NAME) -> Any:
    wait_until(lambda: client.get(f"/sessions/{name}").status_code == 200)
    return client.get(f"/sessions/{name}").json()


@pytest.mark.parametrize(
    "work",
    [WORK, {"task": "classification", "points": [[0, 0, 1], [1, 1, 2]], "settings": SMALL}, {"task": "bandit"}],
    ids=["regression", "classification", "bandit"],
)
def test_a_work_is_trained_and_seen(client: TestClient, work: Any) -> None:
    answer = put(client, work)
    assert (answer.status_code, answer.json()) == (200, {"work": 1})
    wait_until(lambda: seen(client)["step"] > 2)
    found = seen(client)
    assert (found["task"], found["work"], found["message"]) == (work["task"], 1, "")
    assert client.get(f"/sessions/{NAME}", params={"after": 10**9}).status_code == 204
    assert client.post(f"/sessions/{NAME}/close").status_code == 204
    assert client.get(f"/sessions/{NAME}").status_code == 404


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ({"task": "nonsense"}, "nonsense"),
        ({}, "task"),
        ([], "the body"),
        ({**WORK, "nonsense": 1}, "nonsense"),
        ({**WORK, "points": [[0.0, float("nan")]]}, "finite"),
        ({**WORK, "points": [[0.0, float("inf")]]}, "finite"),
        ({**WORK, "points": [[0.0, 1e300]]}, "less than or equal to 6"),
        ({**WORK, "points": [[0.0, 10**400]]}, "points"),
        ({**WORK, "points": [[0.0]]}, "points"),
        ({**WORK, "points": [[0.0, 0.0]] * 301}, "at most 300"),
        ({**WORK, "points": None}, "points"),
        ({"task": "classification", "points": [[0, 0, 3]]}, "less than 3"),
        ({"task": "classification", "points": [[0, 0, 0.5]]}, "integer"),
        ({**WORK, "settings": {"width": 10**9}}, "less than or equal to 64"),
        ({**WORK, "settings": {"layers": 0}}, "greater than or equal to 1"),
        ({**WORK, "settings": {"prior_scale": -1}}, "prior_scale"),
        ({**WORK, "settings": {"temperature": float("nan")}}, "temperature"),
        ({**WORK, "settings": {"noise": 0}}, "noise"),
        ({**WORK, "settings": {"family": "nonsense"}}, "family"),
        ({**WORK, "pace": -1}, "pace"),
        ({**WORK, "settings": {"family": "full"}}, "another than 'full' for more than 400 weights"),
        ({**WORK, "settings": {"prior": "laplace"}}, "Conditional"),
        ({"task": "bandit", "epsilon": 2}, "epsilon"),
    ],
)
def test_what_is_wrong_is_said(client: TestClient, work: Any, said: str) -> None:
    answer = put(client, work)
    assert answer.status_code == 422
    assert said in answer.json()["message"]
    assert len(client.app.state.sessions) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"null", b"[" * 90_000])
def test_what_is_no_json_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.put(f"/sessions/{NAME}", content=body, headers=JSON)
    assert answer.status_code in (400, 422)
    assert answer.json()["message"]


def test_what_any_other_page_could_send_is_refused(client: TestClient) -> None:
    """Text needs no leave of ours: a browser sends it from any page."""
    answer = client.put(f"/sessions/{NAME}", content=json.dumps(WORK), headers={"Content-Type": "text/plain"})
    assert answer.status_code == 422


def test_a_large_request_is_refused(client: TestClient) -> None:
    answer = client.put(f"/sessions/{NAME}", content=b" " * 200_000)
    assert (answer.status_code, answer.json()["error"]) == (413, "too_large")


@pytest.mark.parametrize("name", ["a", "A" * 32, "0" * 33, "..%2f" + "0" * 27])
def test_names_are_32_digits(client: TestClient, name: str) -> None:
    assert put(client, WORK, name).status_code in (404, 422)
    assert client.get(f"/sessions/{name}").status_code in (404, 422)


def test_more_pages_than_there_may_be_are_told_so(client: TestClient) -> None:
    for digit in "12":
        assert put(client, WORK, digit * 32).status_code == 200
    answer = put(client, WORK, "3" * 32)
    assert (answer.status_code, answer.json()["error"]) == (503, "too_many_sessions")
    assert put(client, WORK, "1" * 32).status_code == 200


def test_another_name_of_this_machine_is_refused(client: TestClient) -> None:
    """A page from elsewhere that has made its own name point here."""
    assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 421
    with TestClient(make_app(local=False), base_url="http://elsewhere.example") as other:
        assert other.get("/").status_code == 200


def test_the_page_is_whole(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.text == read_page()
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not re.search(r"/\* [a-z]+\.(css|js) \*/", answer.text)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", answer.text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a format


def test_ending_the_app_ends_the_threads() -> None:
    with TestClient(make_app(), base_url="http://127.0.0.1") as client:
        put(client, WORK)
        (session,) = client.app.state.sessions._by_name.values()  # type: ignore[attr-defined]
    assert not session.is_alive()
