"""Memory and times are measured as they are defined."""

from typing import Any

import pytest
import torch

from bayesbackprop_paper import timing
from bayesbackprop_paper.bench import memory

pytestmark = pytest.mark.identities


def test_memory_counts_what_lives_at_the_same_time_and_what_was_built_before() -> None:
    kept: list[torch.Tensor] = []

    def build() -> Any:
        kept.append(torch.empty(1000))  # 4000 bytes, there during every step
        torch.empty(90_000)  # gone before the first step

        def step() -> None:
            for _ in range(2):
                torch.empty(500)  # 2000 bytes, one after the other

        return step

    assert memory.peak_memory(build) == 6000


def test_runs_with_a_clock_of_their_own_say_how_long_they_took() -> None:
    times = timing.interleaved({"a": lambda: 4.0, "b": lambda: 7.0}, 2, 1, 0, lambda rounds, _: rounds, "", clock=ask)
    assert times == {"a": timing.Quartiles(4.0, 4.0, 4.0, 4.0), "b": timing.Quartiles(7.0, 7.0, 7.0, 7.0)}


def test_quartiles_and_the_least_are_those_of_the_times() -> None:
    assert timing.Quartiles.of([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0, 1.0)


def ask(run: Any) -> float:
    return run()


def test_each_is_timed_as_often_after_the_warm_up_and_the_order_changes() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = timing.interleaved(runs, 20, 3, 0, lambda rounds, title: rounds, "")
    rounds = [tuple(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(rounds) == 23
    assert all(set(each) == set("abc") for each in rounds)
    assert len(set(rounds)) > 1
    assert list(times) == list("abc")
