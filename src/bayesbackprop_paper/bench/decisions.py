"""How long decisions take while the agent learns from their rewards, in a thread of its own."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bayesbackprop.bandits import ThompsonSampling

# The mushroom task's width, and two actions: to eat, or not to.
FEATURES, ACTIONS = 117, 2

# Rewards that may wait to be learnt: enough that learning never pauses, few enough that the end is soon.
_BEHIND = 64


@dataclass(frozen=True)
class Row:
    """Milliseconds that a call took: the median, and what 99 in 100 calls stay below."""

    what: str
    calls: int
    median: float
    p99: float
    worst: float
    per_second: float


def decisions(calls: int, updates: int, threads: int, pause: float, seed: int) -> list[Row]:
    """Time decisions alone, a round of learning, and both at once.

    ``threads`` decide ``calls`` times each, ``pause`` seconds after the last answer. One more thread rewards what they
    decided and, so that learning never pauses, gives the agent observations besides.
    """
    torch.set_num_threads(1)
    agent = ThompsonSampling(FEATURES, ACTIONS, updates=updates, seed=seed)
    random = torch.Generator().manual_seed(seed)
    contexts = torch.randint(2, (256, FEATURES), generator=random).float().tolist()
    for number, context in enumerate(contexts[:100]):
        agent.observe(context, number % ACTIONS, number % 7)
    alone = [_timed(partial(agent.decide, context)) for context in _some(contexts, calls)]
    rounds = [_timed(partial(agent.observe, context, 0, 1.0)) for context in _some(contexts, calls // 4)]
    rows = [_row("a decision, nobody learns", alone), _row("a round of learning, nobody decides", rounds)]
    meanwhile, made, ended = list[float](), deque[str](), threading.Event()

    def decide(number: int) -> None:
        for context in _some(contexts[number:], calls):
            meanwhile.append(_timed(lambda c=context: made.append(agent.decide(c).id)))  # type: ignore[misc]
            time.sleep(pause)

    def reward() -> None:
        while not ended.is_set():  # it waits while the learner is behind
            if made:
                agent.reward(made.popleft(), 1.0)
            else:
                agent.observe(contexts[0], 0, 1.0)

    with agent.learning(behind=_BEHIND):
        deciding = [threading.Thread(target=decide, args=(number,)) for number in range(threads)]
        rewarding = threading.Thread(target=reward)
        before, start = agent.observed, time.perf_counter()
        for thread in (*deciding, rewarding):
            thread.start()
        for thread in deciding:
            thread.join()
        seconds, learnt = time.perf_counter() - start, agent.observed - before
        ended.set()
        rewarding.join()
    rows.append(_row(f"a decision, {threads} threads, while it learns", meanwhile, seconds))
    each = 1000 * seconds / max(1, learnt)
    return [*rows, Row("a round of learning meanwhile", learnt, each, each, each, learnt / seconds)]


def _some(contexts: list[list[float]], count: int) -> list[list[float]]:
    return [contexts[number % len(contexts)] for number in range(count)]


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _row(what: str, seconds: list[float], during: float | None = None) -> Row:
    ordered = sorted(seconds)
    median, p99, worst = (1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99, 1.0))
    return Row(what, len(seconds), median, p99, worst, len(seconds) / (during or sum(seconds)))
