"""Threads that share an agent, and what must hold of it afterwards.

``python tests/bandit_threads.py KIND THREADS CALLS FOLDER`` does it in a process of its own, which may crash;
``python tests/bandit_threads.py latency`` measures how long decisions take while another thread learns.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bandit_worlds import ACTIONS, FEATURES, KINDS, SMALL, assert_same, snapshot
from bayesbackprop.bandits import Agent, LinearThompson, ThompsonSampling, Uniform, load
from bayesbackprop.bandits.neural import NeuralAgent

# Seconds after which a thread that is still alive hangs.
PATIENCE = 300.0


class Observation(NamedTuple):
    """What a worker told the agent. All numbers are small integers, whose sums and products are exact in any order."""

    context: tuple[float, ...]
    action: int
    reward: float


def context_of(worker: int, call: int) -> tuple[float, ...]:
    return float(worker), float(call), float(call % 7)


def run_all(workers: Sequence[Callable[[], None]]) -> None:
    """Run each in a thread of its own, all from the same moment on; raises what the first of them raised."""
    errors: list[BaseException] = []
    ready = threading.Barrier(len(workers))

    def guarded(work: Callable[[], None]) -> None:
        try:
            ready.wait(PATIENCE)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def act_and_observe(agent: Agent, worker: int, calls: int, made: list[Observation]) -> None:
    """The loop of a worker; ``made`` takes what it observed."""
    for call in range(calls):
        context = context_of(worker, call)
        action = agent.act(context)
        reward = float((worker + call + action) % 5)
        agent.observe(context, action, reward)
        made.append(Observation(context, action, reward))


def save_often(agent: Agent, path: Path, until: Callable[[], bool], kept: list[Agent]) -> None:
    """Save and load over and over; ``kept`` takes what was loaded."""
    while not until():
        agent.save(path)
        kept.append(load(path))
        agent.tensors()


def share(agent: Agent, threads: int, calls: int, folder: Path) -> tuple[list[Observation], list[Agent]]:
    """Let threads act and observe while two more save, all to the same path; gives the observations and the files."""
    made: list[list[Observation]] = [[] for _ in range(threads)]
    kept: list[list[Agent]] = [[], []]
    ended: list[int] = []

    def work(worker: int) -> None:
        try:
            act_and_observe(agent, worker, calls, made[worker])
        finally:
            ended.append(worker)

    def save(saver: int) -> None:
        save_often(agent, folder / "agent", lambda: len(ended) == threads, kept[saver])

    run_all([*(partial(work, worker) for worker in range(threads)), *(partial(save, saver) for saver in range(2))])
    return [each for some in made for each in some], [each for some in kept for each in some]


# --- what must hold --------------------------------------------------------------------------------------------------


def check(agent: Agent, make: Callable[[], Agent], made: Sequence[Observation], files: Sequence[Agent]) -> None:
    """Nothing was lost, and each file is the agent at some moment; ``make`` makes an agent as it was at first."""
    assert (agent.acted, agent.observed) == (len(made), len(made))
    for file in files:
        assert 0 <= file.observed <= file.acted <= len(made)
    if isinstance(agent, Uniform):  # each decision has a number of its own
        alone = make()
        assert Counter(each.action for each in made) == Counter(alone.act(each.context) for each in made)
    elif isinstance(agent, LinearThompson):
        check_statistics(agent, made, files)
    elif isinstance(agent, NeuralAgent):
        check_rounds(agent, make, made, files)


def check_statistics(agent: LinearThompson, made: Sequence[Observation], files: Sequence[Agent]) -> None:
    """The sufficient statistics are those of the observations, and those of files of as many as there were."""
    found = agent.tensors()
    for action in range(ACTIONS):
        mine = [each for each in made if each.action == action]
        x = torch.tensor([[*each.context, 1.0] for each in mine], dtype=torch.float64).reshape(-1, FEATURES + 1)
        y = torch.tensor([each.reward for each in mine], dtype=torch.float64)
        matrix = agent.precision * torch.eye(FEATURES + 1, dtype=torch.float64) + x.T @ x
        assert torch.equal(found["matrix"][0, action], matrix)
        assert torch.equal(found["moment"][0, action], x.T @ y)
        assert float(found["square"][0, action]) == float(y @ y)
        assert float(found["count"][0, action]) == len(mine)
    for each in (agent, *files):
        tensors = each.tensors()
        assert float(tensors["count"].sum()) == each.observed
        assert torch.equal(tensors["matrix"][..., -1, -1], tensors["count"] + agent.precision)
        assert torch.allclose(tensors["root"] @ tensors["root"].mT, tensors["matrix"])


def check_rounds(
    agent: NeuralAgent, make: Callable[[], Agent], made: Sequence[Observation], files: Sequence[Agent]
) -> None:
    """The memory holds the observations, and one thread that makes them in its order learns the same, bit for bit."""
    assert agent.memory >= len(made), "the memory of this test is large enough for all"
    tensors = agent.tensors()
    parts = (tensors[name][: len(made), 0].tolist() for name in ("contexts", "actions", "rewards"))
    remembered = [Observation(tuple(c), a, r * (agent.scale or 1.0)) for c, a, r in zip(*parts, strict=True)]
    assert Counter(remembered) == Counter(made)
    alone = make()
    for file in sorted((*files, agent), key=lambda each: each.observed):
        for each in remembered[alone.observed : file.observed]:
            alone.observe(*each)
        assert_same({**snapshot(file), "acted": torch.tensor(0)}, snapshot(alone))


def main(kind: str, threads: int, calls: int, folder: Path) -> None:
    """An agent of this kind is shared by threads and saved meanwhile."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    options: dict[str, Any] = {**SMALL, "memory": threads * calls} if kind not in ("uniform", "linear") else {}

    def make() -> Agent:
        return KINDS[kind](seed=1, **options)

    agent = make()
    made, files = share(agent, threads, calls, folder)
    assert len(made) == threads * calls
    check(agent, make, made, files)
    print(f"{kind}: {2 * len(made)} calls of {threads} threads, {len(files)} files")


def latency(decisions: int = 200) -> None:
    """Milliseconds of a round of learning, and of decisions while another thread learns round after round."""
    torch.set_num_threads(1)
    agent, context, ended = ThompsonSampling(117, 2, updates=64), [0.1] * 117, threading.Event()  # 117-100-100-4

    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)

    def learn() -> None:
        while not ended.is_set():
            agent.observe(context, 0, 1.0)

    agent.observe(context, 0, 1.0)
    times = {"round": [timed(lambda: agent.observe(context, 0, 1.0)) for _ in range(20)]}
    times["decision"] = [timed(lambda: agent.act(context)) for _ in range(decisions)]
    thread = threading.Thread(target=learn)
    thread.start()
    times["decision while another thread learns"] = meanwhile = []
    for _ in range(decisions):
        meanwhile.append(timed(lambda: agent.act(context)))
        time.sleep(0.005)
    ended.set()
    thread.join()
    for name, values in times.items():
        print(f"{name}: median {median(values):.2f} ms, worst {max(values):.2f} ms")


if __name__ == "__main__" and sys.argv[1:] == ["latency"]:
    latency()
elif __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
