"""Services for tests: an application with a client, in this process, and a database of PostgreSQL."""

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("sqlalchemy")

from fastapi.testclient import TestClient

from bayesbackprop.serving import Settings, make_app

CONTEXT = [1.0, 0.5, -1.0]
# Seconds within which something must have happened.
PATIENCE = 60.0


def settings_in(folder: Path, **options: Any) -> Settings:
    return Settings(str(folder / "log.sqlite"), **{"features": 3, "actions": 2, "agent": "linear", **options})


@contextmanager
def serving(settings: Settings, token: str | None = None) -> Iterator[TestClient]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with TestClient(make_app(settings), base_url="http://127.0.0.1", headers=headers) as client:
        yield client


def decided(client: TestClient, context: list[float] = CONTEXT, **options: Any) -> Any:
    answer = client.post("/decide", json={"context": context, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def rewarded(client: TestClient, count: int, seed: int = 0) -> list[tuple[str, float]]:
    """Decide and reward so often; the ids and rewards."""
    requests = [{"context": [(n * 7 + seed) % 5 - 2.0, n % 3 - 1.0, 0.5]} for n in range(count)]
    decisions = client.post("/decide/batch", json={"requests": requests}).json()["decisions"]
    rewards = [(each["id"], float(each["action"]) + n / count) for n, each in enumerate(decisions)]
    answer = client.post("/reward/batch", json={"rewards": [{"id": id, "reward": r} for id, r in rewards]})
    assert answer.status_code == 200
    return rewards


def wait_until(found: Any, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not found():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def wait_until_learnt(client: TestClient) -> Any:
    wait_until(lambda: client.get("/state").json()["learner"]["lag"] == 0)
    return client.get("/state").json()


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """The URL of a database of a server of our own; skips where there is no PostgreSQL."""
    pytest.importorskip("psycopg")
    places = [*Path("/usr/lib/postgresql").glob("*/bin"), Path("/usr/bin"), Path("/usr/local/bin")]
    binaries = next((place for place in places if (place / "initdb").exists()), None)
    if binaries is None:
        pytest.skip("No PostgreSQL on this machine: apt-get install postgresql.")
    run_as: dict[str, Any] = {}
    if os.getuid() == 0:  # it refuses to run as root
        try:
            run_as = {"user": pwd.getpwnam("nobody").pw_uid, "group": pwd.getpwnam("nobody").pw_gid}
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user 'nobody'.")
        os.chmod(folder, 0o777)
    # The name of a socket has at most 107 characters, and the folders of tests have long ones.
    data, place = folder / "data", Path(f"/tmp/bbb-postgres-{os.getpid()}-{time.monotonic_ns()}")
    place.mkdir(mode=0o777)
    os.chmod(place, 0o777)
    if run_as and not _reaches(folder, run_as):
        data = place / "data"
    initialise = [binaries / "initdb", "-D", data, "-A", "trust", "-U", "tester", "--no-sync"]
    process = None
    try:
        subprocess.run(initialise, check=True, capture_output=True, cwd="/", **run_as)
        command = [binaries / "postgres", "-D", data, "-k", place, "-c", "listen_addresses="]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **run_as)
        url = f"postgresql://tester@/postgres?host={place}"
        import psycopg

        def answers() -> bool:
            try:
                psycopg.connect(url).close()
            except psycopg.OperationalError:
                return False
            return True

        wait_until(answers)
        yield url
    finally:
        if process is not None:
            process.terminate()
            process.wait(PATIENCE)
        shutil.rmtree(place, ignore_errors=True)


def _reaches(folder: Path, run_as: dict[str, Any]) -> bool:
    return subprocess.run(["test", "-w", folder], cwd="/", check=False, **run_as).returncode == 0
