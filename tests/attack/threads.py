"""Threads that share a model (`model_threads`) or an agent (`bandit_threads`)."""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import model_threads
from attack import Attempt

CALLS = 40  # of each reader before the next one
PATIENCE = 120.0


def run(seed: int, seconds: float) -> Iterator[Attempt]:
    until = time.monotonic() + seconds
    for number in itertools.count():
        for case in model_threads.cases():
            if number and time.monotonic() > until:
                return
            for said in model_threads.attempt(case, CALLS, seed + number):
                yield Attempt(f"model, {case.name}", said.outcome, said.detail)
        if util.find_spec("bandit_threads") and time.monotonic() < until:
            yield from agents()


def agents() -> Iterator[Attempt]:
    """Each kind of agent, in a process of its own: a crash takes the process with it."""
    import bandit_threads

    for kind in bandit_threads.KINDS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(Path(bandit_threads.__file__)), kind, "4", "40", folder]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                yield Attempt(f"agent, {kind}", "hung", f"no end after {PATIENCE:.0f} s")
                continue
        wrong = done.returncode == 1 and "AssertionError" in done.stderr
        outcome = "equal" if done.returncode == 0 else "accepted wrong" if wrong else "crashed"
        yield Attempt(f"agent, {kind}", outcome, f"exit code {done.returncode}: {done.stderr[-2000:]}")
