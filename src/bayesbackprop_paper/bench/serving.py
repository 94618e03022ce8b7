"""``bbb serve`` under load and under kills, on this machine's loopback: what it answers, how soon, and what is lost."""

import contextlib
import http.client
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bayesbackprop.bandits import Agent, ThompsonSampling, load
from bayesbackprop.serving.command import serve
from bayesbackprop.serving.learning import learn, rebuilt
from bayesbackprop.serving.log import Log
from bayesbackprop.serving.settings import Settings
from bayesbackprop.serving.snapshots import Snapshots

# Seconds until a service must answer, a request must be answered, and what is in the log must have been learnt.
_START, _TIMEOUT, _SETTLED = 60.0, 30.0, 300.0
# Of so many kills one is while the service starts.
_EARLY = 5
# Seconds between two attempts of a client whose service is away.
_PAUSE = 0.02

# A fork of a process that has imported all of it starts at once; a kill is for what comes then.
_PROCESSES = multiprocessing.get_context("forkserver")
_IMPORTED = ["torch._dynamo", "bayesbackprop.serving.command", __name__]


@dataclass(frozen=True)
class Load:
    """What clients measured that asked for a decision and sent its reward, again and again, as fast as they could.

    Times are in milliseconds; ``sync`` is what the disk takes for one write that must survive a power failure.
    """

    agent: str
    workers: int
    clients: int
    sync: float
    seconds: float
    requests: int
    requests_per_second: float
    decide_p50: float
    decide_p99: float
    reward_p50: float
    reward_p99: float
    learnt: int
    lag: int
    errors: int


@dataclass
class Kills:
    """What became of a service that was killed again and again while clients went on.

    A kill says something if it cuts something off: ``working`` are those of services that had acknowledged a request.
    The others were killed while they started, or went on from the log.
    """

    seed: int
    kills: int = 0
    working: int = 0
    decisions: int = 0
    rewards: int = 0
    retries: int = 0
    lost: int = 0
    twice: int = 0
    rebuilt: bool = False
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """What was found, for people."""
        told = f"{self.decisions:,} decisions and {self.rewards:,} rewards acknowledged, after {self.retries:,} retries"
        agent = "is" if self.rebuilt else "is NOT"
        lost = f"{self.lost} are lost, {self.twice} are there twice; the agent {agent} the one that learns the log anew"
        kills = f"{self.kills} kills in {self.seconds:.0f} s, {self.working} of them of a service that had answered"
        return f"{kills}: {told}; {lost}."


class Client:
    """A connection to a service, that is made again when it breaks."""

    def __init__(self, port: int) -> None:
        self._port, self._connection = port, http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        self.retries = 0

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and the content of the answer."""
        return self._ask("POST", path, json.dumps(body).encode())

    def get(self, path: str) -> tuple[int, Any]:
        """The status and the content of the answer."""
        return self._ask("GET", path, None)

    def delete(self, path: str) -> tuple[int, Any]:
        """The status and the content of the answer."""
        return self._ask("DELETE", path, None)

    def text(self, path: str) -> str:
        """The content of the answer."""
        self._connection.request("GET", path)
        return self._connection.getresponse().read().decode()

    def insist(self, path: str, body: Any, ends: threading.Event) -> tuple[int, Any] | None:
        """As :meth:`post`, again and again until it is answered; None if it ends before."""
        while not ends.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                status, content = self.post(path, body)
                if status < 500:
                    return status, content
            self.retries += 1
            self._connection.close()
            time.sleep(_PAUSE)
        return None

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        self._connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def running(settings: Settings, port: int) -> Iterator[Any]:
    """A service in a process of its own; at the end it is told to end."""
    _PROCESSES.set_forkserver_preload(_IMPORTED)  # of no effect on one that has started
    process = _PROCESSES.Process(target=_serve, args=(settings, port))
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.terminate()
        process.join(_TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()


def wait_until_ready(port: int, is_alive: Callable[[], bool]) -> None:
    """Wait for a service to answer."""
    until = time.monotonic() + _START
    while time.monotonic() < until and is_alive():
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            with Client(port) as client:
                status, _ = client.get("/health")
            if status == 200:
                return
        time.sleep(_PAUSE)
    raise RuntimeError("The service did not start.")


def _serve(settings: Settings, port: int) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which the service takes for its end
    serve(settings, port=port, level="error")


@contextlib.contextmanager
def command(log: Path, agent: str, features: int, actions: int, port: int, workers: int) -> Iterator[Any]:
    """``bbb serve`` as people start it; at the end it is told to end."""
    options = {"features": features, "actions": actions, "agent": agent, "log": log, "port": port, "workers": workers}
    program = [sys.executable, "-c", "from bayesbackprop._cli import main; main()", "serve"]
    given = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen([*program, *given], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- load ------------------------------------------------------------------------------------------------------------


def measure(folder: Path, agent: str, features: int, actions: int, workers: int, clients: int, seconds: float) -> Load:
    """Let clients ask for so long; the reward of an action depends on the context."""
    port = free_port()
    with command(folder / "log.sqlite", agent, features, actions, port, workers) as process:
        wait_until_ready(port, lambda: process.poll() is None)
        _ask(port, features, 1.0, clients)  # what is imported or compiled at the first request is not counted
        before = _state(port)
        times, errors, took = _ask(port, features, seconds, clients)
        after = _state(port)
    done = sum(map(len, times.values()))
    return Load(
        agent=agent,
        workers=workers,
        clients=clients,
        sync=_sync(folder),
        seconds=round(took, 2),
        requests=done,
        requests_per_second=round(done / took, 1),
        decide_p50=_quantile(times["/decide"], 0.5),
        decide_p99=_quantile(times["/decide"], 0.99),
        reward_p50=_quantile(times["/reward"], 0.5),
        reward_p99=_quantile(times["/reward"], 0.99),
        learnt=after["learner"]["position"] - before["learner"]["position"],
        lag=after["learner"]["lag"],
        errors=errors,
    )


def _sync(folder: Path) -> float:
    """How long the disk takes for one small write that must survive a power failure: the least of a commit."""
    times = []
    with open(folder / "sync", "wb") as file:
        for _ in range(50):
            began = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return _quantile(times, 0.5)


def _state(port: int) -> Any:
    with Client(port) as client:
        return client.get("/state")[1]


def _quantile(seconds: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return round(sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e3, 2) if seconds else math.nan


def _ask(port: int, features: int, seconds: float, clients: int) -> tuple[dict[str, list[float]], int, float]:
    times: dict[str, list[float]] = {"/decide": [], "/reward": []}
    errors: Counter[str] = Counter()
    until = time.perf_counter() + seconds

    def timed(client: Client, path: str, body: Any) -> Any:
        began = time.perf_counter()
        status, content = client.post(path, body)
        times[path].append(time.perf_counter() - began)
        if status != 200:
            errors[path] += 1
        return content

    def ask(number: int) -> None:
        client, chance = Client(port), random.Random(number)
        while time.perf_counter() < until:
            context = [chance.gauss(0, 1) for _ in range(features)]
            decision = timed(client, "/decide", {"context": context})
            reward = context[decision["action"] % features] + chance.gauss(0, 0.1)
            timed(client, "/reward", {"id": decision["id"], "reward": reward})
        client.close()

    began = time.perf_counter()
    _in_threads(ask, clients)
    return times, errors.total(), time.perf_counter() - began


def _in_threads(function: Any, count: int) -> None:
    threads = [threading.Thread(target=function, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- kills -----------------------------------------------------------------------------------------------------------


@dataclass
class _Told:
    """What clients were told: the decision of each request, and the rewards that were acknowledged."""

    decisions: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    acknowledged: dict[str, float] = field(default_factory=dict)
    answers: int = 0
    problems: list[str] = field(default_factory=list)


def small_agent() -> Agent:
    """A neural agent that learns a reward in a few milliseconds."""
    return ThompsonSampling(3, 3, hidden=[8], memory=500, updates=1, batch_size=16, seed=1)


def survive(
    folder: Path, kills: int, seed: int = 0, *, clients: int = 4, longest: float = 1.5, log: str | None = None
) -> Kills:
    """Kill a service so often while clients go on; then judge its log.

    Most are killed within ``longest`` seconds after the first answer, some while they start.
    """
    found, chance, began = Kills(seed), random.Random(seed), time.monotonic()
    base = folder / "base.agent"
    small_agent().save(base)
    settings = Settings(
        log or str(folder / "log.sqlite"), str(folder / "snapshots"), agent=str(base), snapshot_seconds=0.2
    )
    port, told, ends = free_port(), _Told(), threading.Event()
    for _ in range(2):  # the first also starts what others are forked from
        started = time.monotonic()
        with running(settings, port) as process:
            wait_until_ready(port, process.is_alive)
            start = time.monotonic() - started
    asking = threading.Thread(target=lambda: _in_threads(lambda n: _go_on(port, n, seed, told, found, ends), clients))
    asking.start()
    try:
        for number in range(1, kills + 1):
            before = told.answers
            process = _PROCESSES.Process(target=_serve, args=(settings, port))
            process.start()
            if number % _EARLY == 0:
                process.join(chance.uniform(0, start))
            else:
                _wait_for_an_answer(told, before, process)
                process.join(chance.uniform(0, longest))
            if process.exitcode is None:
                found.working += told.answers > before
                os.kill(process.pid or 0, signal.SIGKILL)
                found.kills += 1
            process.join()
            if process.exitcode != -signal.SIGKILL:
                told.problems.append(f"the service ended with {process.exitcode}")
                break
        with running(settings, port) as process:
            wait_until_ready(port, process.is_alive)
            time.sleep(longest)
            ends.set()
            asking.join()
            _wait_until_learnt(port)
    finally:
        ends.set()
        asking.join()
    _judge(settings, told, found)
    found.seconds = round(time.monotonic() - began, 1)
    return found


def _wait_for_an_answer(told: _Told, before: int, process: Any) -> None:
    until = time.monotonic() + _START
    while told.answers == before and process.is_alive():
        if time.monotonic() > until:
            raise RuntimeError("The service started, and answered nobody.")
        time.sleep(_PAUSE / 4)


def _go_on(port: int, number: int, seed: int, told: _Told, found: Kills, ends: threading.Event) -> None:
    """A client that asks again until it has an answer, and sends some rewards twice."""
    client, chance, count = Client(port), random.Random(f"{seed} {number}"), 0
    while not ends.is_set():
        name, context = f"{number}-{count}", [chance.gauss(0, 1) for _ in range(3)]
        count += 1
        answer = client.insist("/decide", {"context": context, "request": name}, ends)
        if answer is None:
            break
        status, decision = answer
        if status != 200:
            told.problems.append(f"decide {name}: {status} {decision}")
            break
        told.decisions[name] = decision
        told.answers += 1  # several threads may lose some; that there was one is what counts
        if chance.random() < 0.1:  # its reward never comes
            continue
        reward = context[decision["action"]] + chance.gauss(0, 0.1)
        told.sent[decision["id"]] = reward
        for attempt in range(1 + (chance.random() < 0.1)):
            answer = client.insist("/reward", {"id": decision["id"], "reward": reward}, ends)
            if answer is None:
                break
            if answer[0] != 200 or (attempt and answer[1]["status"] != "known"):
                told.problems.append(f"reward of {name}: {answer}")
            else:
                told.acknowledged[decision["id"]] = reward
                told.answers += 1
        time.sleep(0.02)  # so that a rewards log of some thousands can be learnt again below
    found.retries += client.retries
    client.close()


def _wait_until_learnt(port: int) -> None:
    until = time.monotonic() + _SETTLED
    while time.monotonic() < until:
        if _state(port)["learner"]["lag"] == 0:
            return
        time.sleep(0.1)


def _judge(settings: Settings, told: _Told, found: Kills) -> None:
    """Compare what clients were told with the log, and the log with the agent."""
    log = Log(settings.url)
    base = log.open()
    rows = {row["id"]: row for row in log.rows(waiting=True)}
    found.problems += told.problems
    found.decisions, found.rewards = len(told.decisions), len(told.acknowledged)
    requests = Counter(row["request"] for row in rows.values())
    found.twice = sum(count - 1 for count in requests.values())
    for name, decision in told.decisions.items():
        row = rows.get(decision["id"])
        same = row is not None and (row["request"], row["action"]) == (name, decision["action"])
        if not same or row is None or row["probabilities"] != decision["probabilities"]:
            found.lost += 1
            found.problems.append(f"the decision {name} is not in the log")
    for id, reward in told.acknowledged.items():
        if id not in rows or rows[id]["reward"] != reward:
            found.lost += 1
            found.problems.append(f"the acknowledged reward of {id} is not in the log")
    known = {id: row["reward"] for id, row in rows.items() if row["reward"] is not None}
    if any(told.sent.get(id) != reward for id, reward in known.items()):
        found.problems.append("the log has a reward that was not sent")
    if log.counts().rewarded != len(known):
        found.problems.append(f"{log.counts().rewarded} rewards are counted, and there are {len(known)}")
    _compare(log, base, settings, found, len(known))
    log.close()


def _compare(log: Log, base: Agent, settings: Settings, found: Kills, rewards: int) -> None:
    """Whether each snapshot is the agent that learns the log from its beginning, each reward once."""
    whole = rebuilt(log)
    found.twice += max(0, whole.observed - rewards)
    snapshots = Snapshots(settings.folder / log.name).found()
    if not snapshots or snapshots[0].position != rewards:
        found.problems.append(f"the last snapshot has learnt {snapshots[0].position if snapshots else 0} of {rewards}")
    agent, position, equal = base, 0, 0
    for snapshot in reversed(snapshots):
        for each in log.after(position, snapshot.position - position):
            learn(agent, each)
        position = snapshot.position
        saved = load(snapshot.path)
        found.twice += max(0, saved.observed - position)
        if same(saved, agent):
            equal += 1
        else:
            found.problems.append(f"the snapshot {snapshot.position} is not the agent of the log")
    found.rebuilt = equal == len(snapshots) > 0 and same(agent, whole)


def same(one: Agent, other: Agent) -> bool:
    """Whether two agents have learnt the same, to the last bit."""
    mine, yours = one.tensors(), other.tensors()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)
