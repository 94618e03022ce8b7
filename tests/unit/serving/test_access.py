"""Tokens, and who may ask without one."""

import os
from pathlib import Path
from typing import Any

import pytest

from services import CONTEXT, decided, serving, settings_in

from bayesbackprop.serving.access import digest  # isort: skip
from bayesbackprop.serving.settings import TOKEN, read_tokens  # isort: skip

pytestmark = pytest.mark.identities

FULL, OTHER, READS = "full-token-of-many-letters", "another-token-of-many-letters", "reading-token-of-many-letters"


@pytest.fixture
def client(tmp_path: Path) -> Any:
    tokens = {"tokens": (digest(FULL), digest(OTHER)), "read_tokens": (digest(READS),)}
    with serving(settings_in(tmp_path, **tokens)) as made:
        yield made


def ask(client: Any, path: str, token: str | None, kind: str = "Bearer") -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"{kind} {token}"}
    if path in ("/decide", "/reward"):
        answer = client.post(path, json={"context": CONTEXT}, headers=headers)
    else:
        answer = client.get(path, headers=headers)
    return answer.status_code, answer.headers.get("WWW-Authenticate", "")


@pytest.mark.parametrize("path", ["/decide", "/reward", "/state", "/metrics"])
@pytest.mark.parametrize("token", [None, "", "nonsense", FULL[:-1], FULL + "x", digest(FULL)])
def test_without_a_token_there_is_no_access(path: str, token: str | None, client: Any) -> None:
    assert ask(client, path, token) == (401, "Bearer")


def test_another_kind_of_access_is_none(client: Any) -> None:
    assert ask(client, "/state", FULL, "Basic") == (401, "Bearer")
    assert ask(client, "/state", FULL, "bearer") == (200, "")


@pytest.mark.parametrize("token", [FULL, OTHER])
def test_a_token_opens_everything(token: str, client: Any) -> None:
    assert [ask(client, path, token)[0] for path in ("/decide", "/state", "/metrics")] == [200, 200, 200]


def test_a_token_for_reading_opens_state_and_metrics_alone(client: Any) -> None:
    assert [ask(client, path, READS)[0] for path in ("/state", "/metrics", "/decide", "/reward")] == [
        200,
        200,
        403,
        403,
    ]


def test_pages_without_data_are_open(client: Any) -> None:
    assert [ask(client, path, None)[0] for path in ("/", "/health", "/docs", "/openapi.json")] == [200] * 4


def test_without_tokens_this_machine_is_served_by_its_own_name(tmp_path: Path) -> None:
    """A page of another site, whose name points here, sends that name."""
    with serving(settings_in(tmp_path)) as client:
        for host in ("127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:8000", "[::1]"):
            assert client.get("/state", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", ""):
            assert client.get("/state", headers={"Host": host}).status_code == 421
    with serving(settings_in(tmp_path, anyone=True)) as client:
        assert client.get("/state", headers={"Host": "bandit.example"}).status_code == 200


def test_another_site_may_not_ask(client: Any) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = client.options("/decide", headers={**asked, "Authorization": f"Bearer {FULL}"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_form_of_another_site_is_no_request(tmp_path: Path) -> None:
    """Browsers send text of other sites without asking; only JSON must be asked for."""
    with serving(settings_in(tmp_path)) as client:
        answer = client.post("/decide", content=b'{"context": [1, 2, 3]}', headers={"Content-Type": "text/plain"})
        assert answer.status_code == 422
        assert decided(client)["id"]


def test_tokens_come_from_the_environment_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# of the shop\n{OTHER}\n\n{READS}\n")
    monkeypatch.setenv(TOKEN, FULL)
    assert read_tokens(TOKEN, "--token-file", [file]) == (digest(FULL), digest(OTHER), digest(READS))
    monkeypatch.delenv(TOKEN)
    assert read_tokens(TOKEN, "--token-file", []) == ()


@pytest.mark.parametrize("token", ["short", "with spaces in it, which is long", "ünïcödé-ünïcödé-ünïcödé"])
def test_a_bad_token_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ValueError, match="at least 16 printable"):
        read_tokens(TOKEN, "--token-file", [])


def test_workers_get_hashes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    settings = settings_in(tmp_path, tokens=(digest(FULL),))
    settings.to_environment()
    assert FULL not in str(os.environ["BBB_SERVE_SETTINGS"])
    assert type(settings).from_environment() == settings


@pytest.mark.parametrize("text", ["", "\n  \n", "# to come\n"])
def test_a_place_of_tokens_without_any_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names one wants access control, and would serve without it."""
    monkeypatch.setenv(TOKEN, FULL)
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"'--token-file' parameter of bbb serve must .* Got .*tokens with none"):
        read_tokens(TOKEN, "--token-file", [file])
    monkeypatch.setenv(TOKEN, text)
    with pytest.raises(ValueError, match=f"'{TOKEN}' parameter of bbb serve must .* at least one token. Got nothing"):
        read_tokens(TOKEN, "--token-file", [])
