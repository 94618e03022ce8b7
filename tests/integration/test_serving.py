"""``bbb serve`` as processes: killed, ended, and several of them."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT
from services import PATIENCE, postgres

from bayesbackprop.bandits import load  # isort: skip
from bayesbackprop.serving import Log, Settings  # isort: skip
from bayesbackprop.serving.learning import rebuilt  # isort: skip
from bayesbackprop.serving.snapshots import Snapshots  # isort: skip
from bayesbackprop_paper.bench import serving  # isort: skip

pytestmark = pytest.mark.equivalence

KILLS = 3
COMMAND = [sys.executable, "-c", "from bayesbackprop._cli import main; main()", "serve"]


def start(folder: Path, *options: object, **variables: str) -> tuple[Any, int]:
    port = serving.free_port()
    sizes = ("--features", "3", "--actions", "2", "--agent", "linear", "--log", str(folder / "log.sqlite"))
    command = [*COMMAND, *sizes, "--port", str(port), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    return process, port


def wait_until_ready(port: int, process: Any) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, process.stderr.read()
        client = serving.Client(port)
        try:
            if client.get("/health")[0] == 200:
                return
        except (OSError, ValueError):
            time.sleep(0.05)
        finally:
            client.close()
    raise AssertionError("the service did not start")


def wait_until_two_answer(port: int) -> None:
    """Two workers, of which one learns; each connection is given to either of them."""
    until, learners = time.monotonic() + PATIENCE, set[bool]()
    while learners != {True, False}:
        assert time.monotonic() < until, "one of two workers does not answer"
        client = serving.Client(port)
        learner = client.get("/state")[1]["learner"]
        client.close()
        if learner["lag"] == 0:
            learners.add(learner["is_learner"])


@pytest.fixture
def processes() -> Any:
    started: list[Any] = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def test_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    found = serving.survive(tmp_path, KILLS, seed=int.from_bytes(os.urandom(2), "big"), longest=1.0)
    assert found.problems == []
    assert (found.kills, found.lost, found.twice, found.rebuilt) == (KILLS, 0, 0, True)
    assert 0 < found.working <= KILLS  # it cut something off


def test_kills_with_postgres(tmp_path: Path) -> None:
    with postgres(tmp_path) as url:
        found = serving.survive(tmp_path, KILLS, seed=int.from_bytes(os.urandom(2), "big"), longest=1.0, log=url)
    assert found.problems == []
    assert (found.kills, found.lost, found.twice, found.rebuilt) == (KILLS, 0, 0, True)
    assert 0 < found.working <= KILLS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_with_a_snapshot(number: signal.Signals, tmp_path: Path, processes: list[Any]) -> None:
    process, port = start(tmp_path)
    processes.append(process)
    wait_until_ready(port, process)
    client = serving.Client(port)
    for n in range(5):
        decision = client.post("/decide", {"context": [1.0, n, 0.0]})[1]
        assert client.post("/reward", {"id": decision["id"], "reward": n})[0] == 200
    client.close()
    process.send_signal(number)
    assert process.wait(PATIENCE) == 0
    assert "Traceback" not in process.stderr.read()
    check_snapshot(tmp_path)


def check_snapshot(folder: Path) -> None:
    """The newest is the agent of the log as far as it says."""
    settings = Settings(str(folder / "log.sqlite"))
    log = Log(settings.url)
    whole = rebuilt(log)
    (newest, *_) = Snapshots(settings.folder / log.name).found()
    assert newest.position == log.counts().rewarded == whole.observed
    assert serving.same(load(newest.path), whole)
    log.close()


def test_workers_end_with_the_process_that_started_them(tmp_path: Path, processes: list[Any]) -> None:
    """So the same command can start again where it was killed."""
    process, port = start(tmp_path, "--workers", 2)
    processes.append(process)
    wait_until_ready(port, process)
    process.kill()
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if free.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    raise AssertionError("a worker still answers")


def in_workers(folder: Path, does: str) -> dict[str, str]:
    """The environment of a service whose workers do this before anything else."""
    folder.mkdir()
    lines = ("import os, sys, time", "if '--multiprocessing-fork' in sys.orig_argv:", f"    {does}")
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_a_worker_may_take_long_to_start_and_is_replaced_when_it_ends(tmp_path: Path, processes: list[Any]) -> None:
    """As long as a busy machine takes to import torch; and the address is said when it answers, not before.

    The third cannot start, which is no reason to end the second.
    """
    pids = tmp_path / "pids"
    noted = f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); "
    noted += f"open({str(pids)!r}).read().count(' ') == 3 and os._exit(3); time.sleep(8)"
    process, port = start(tmp_path, "--workers", 2, **in_workers(tmp_path / "early", noted))
    processes.append(process)
    assert f"http://127.0.0.1:{port}" in process.stderr.readline()
    wait_until_two_answer(port)  # else none would when the first is killed
    first, second = pids.read_text().split()
    os.kill(int(first), signal.SIGKILL)
    said = process.stderr.readline()
    assert f"The worker {first} was killed by signal 9" in said
    assert "Another one takes its place" in said
    assert "ended with code 3" in process.stderr.readline()
    wait_until_ready(port, process)  # a connection that the kernel had given to one of the dead is reset
    os.kill(int(second), 0)  # fails if it has ended
    until = time.monotonic() + PATIENCE
    while len(pids.read_text().split()) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)  # while one of them starts
    assert process.wait(PATIENCE) == 0
    assert time.monotonic() - began < PATIENCE
    assert pids.read_text().split()[:2] == [first, second]
    assert len(pids.read_text().split()) == 4


def test_a_worker_that_cannot_start_ends_the_service(tmp_path: Path, processes: list[Any]) -> None:
    process, _ = start(tmp_path, "--workers", 2, **in_workers(tmp_path / "early", "os._exit(3)"))
    processes.append(process)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert "ended with code 3" in said
    assert "never answered" in said
    assert "Traceback" not in said


def test_several_workers_are_one_service(tmp_path: Path, processes: list[Any]) -> None:
    process, port = start(tmp_path, "--workers", 2)
    processes.append(process)
    wait_until_ready(port, process)
    for n in range(40):  # each with a connection of its own, so that both workers are asked
        client = serving.Client(port)
        decision = client.post("/decide", {"context": [1.0, n % 3, 0.0]})[1]
        client.close()
        client = serving.Client(port)
        assert client.post("/reward", {"id": decision["id"], "reward": n % 2})[0] == 200
        client.close()
    wait_until_two_answer(port)
    client = serving.Client(port)
    counted = [line for line in client.text("/metrics").splitlines() if line.startswith("bbb_requests_total")]
    client.close()
    assert sum(float(line.split()[-1]) for line in counted if '"/decide"' in line) == 40  # of both together
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    check_snapshot(tmp_path)


def test_changes_of_the_actions_survive_a_kill_and_reach_all_workers(tmp_path: Path, processes: list[Any]) -> None:
    process, port = start(tmp_path)
    processes.append(process)
    wait_until_ready(port, process)
    with serving.Client(port) as client:
        for n in range(5):
            if n == 2:
                assert client.post("/arms", {"count": 1, "request": "new"})[1]["added"] == [2]
            decision = client.post("/decide", {"context": [1.0, n, 0.0]})[1]
            assert client.post("/reward", {"id": decision["id"], "reward": n})[0] == 200
        assert client.delete("/arms/0")[0] == 200
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process, port = start(tmp_path, "--workers", 2)
    processes.append(process)
    wait_until_ready(port, process)
    until, learners = time.monotonic() + PATIENCE, set[bool]()
    while time.monotonic() < until and learners != {True, False}:
        with serving.Client(port) as client:
            assert client.post("/arms", {"count": 1, "request": "new"})[1]["repeated"]
            decision = client.post("/decide", {"context": [1.0, 0.0, 0.0]})[1]
            assert decision["action"] != 0
        with serving.Client(port) as client:
            learner = client.get("/state")[1]["learner"]
        if learner["lag"] == 0 and len(decision["means"]) == 3:
            learners.add(learner["is_learner"])
    assert learners == {True, False}
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    check_snapshot(tmp_path)


def test_the_example_of_the_docs_runs(tmp_path: Path, processes: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    process, port = start(tmp_path)
    processes.append(process)
    wait_until_ready(port, process)
    text = (ROOT / "docs" / "howto_web_service.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(example.replace("127.0.0.1:8000", f"127.0.0.1:{port}"), {})
    assert capsys.readouterr().out.split()[0] in ("0", "1")
    with serving.Client(port) as client:
        assert client.get("/state")[1]["rewards"] == 1
    (command,) = re.findall(r"^curl .*$", text, flags=re.MULTILINE)
    words = shlex.split(command.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    if shutil.which(words[0]) is None:
        pytest.skip("No curl on this machine.")
    answer = json.loads(subprocess.run(words, capture_output=True, check=True, timeout=PATIENCE).stdout)
    assert answer["action"] in (0, 1)


def test_mistakes_are_one_line(tmp_path: Path, processes: list[Any]) -> None:
    process, _ = start(tmp_path, "--host", "0.0.0.0")
    processes.append(process)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert "Error: The '--host' parameter of bbb serve must be an address of this machine alone" in said
    assert "Traceback" not in said
