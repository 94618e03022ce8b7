"""``bbb playground``: where it listens, and whether it opens the page."""

import socket
from typing import Any

import pytest

from commands import bbb
from services import wait_until

from bayesbackprop.playground import command  # isort: skip
from bayesbackprop_paper.bench.serving import free_port  # isort: skip

pytestmark = pytest.mark.identities


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have been run, and opened."""
    found: dict[str, Any] = {"places": [], "opened": []}
    monkeypatch.setattr(command, "prepare_process", lambda: None)
    monkeypatch.setattr(command, "warm_up", lambda: None)
    monkeypatch.setattr(command.webbrowser, "open", found["opened"].append)

    def served(_: Any, sockets: list[socket.socket]) -> None:
        found["places"].append(sockets[0].getsockname()[:2])

    monkeypatch.setattr(command.uvicorn.Server, "run", served)
    return found


def test_it_listens_to_this_machine_and_opens_the_page(run: dict[str, Any]) -> None:
    port = free_port()
    done = bbb("playground", "--port", port)
    assert done.exit_code == 0, done.exception
    assert run["places"] == [("127.0.0.1", port)]
    wait_until(lambda: run["opened"] == [f"http://127.0.0.1:{port}"])
    assert f"http://127.0.0.1:{port}" in done.output


def test_it_need_not_open_anything(run: dict[str, Any]) -> None:
    assert bbb("playground", "--no-open", "--port", free_port()).exit_code == 0
    assert run["opened"] == []


def test_a_port_in_use_is_said(run: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = bbb("playground", "--port", taken.getsockname()[1])
    assert "that nobody uses (choose another --port)" in str(done.exception)
    assert run == {"places": [], "opened": []}
