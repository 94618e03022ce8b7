"""Random kills of long commands and loops, each run again until it ends: `kill_runs` has the cases."""

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attack import Attempt, Outcome

KILLS = 3  # of each case before the next one


def run(seed: int, seconds: float) -> Iterator[Attempt]:
    import kill_runs

    until = time.monotonic() + seconds
    with kill_runs.small():
        cases = random.Random(seed).sample([*kill_runs.CASES], len(kill_runs.CASES))
        for number, case in enumerate(itertools.cycle(cases)):
            if time.monotonic() > until:
                return
            with tempfile.TemporaryDirectory() as folder:
                found = kill_runs.survive(case, Path(folder), seed=seed + number, kills=KILLS)
            survived = found.equal if found.problems else found.kills
            yield from (Attempt(case, "equal") for _ in range(survived))
            yield from (Attempt(case, _kind(problem), f"seed {found.seed}: {problem}") for problem in found.problems)


def _kind(problem: str) -> Outcome:
    if "another result" in problem:
        return "accepted wrong"
    return "hung" if "hung" in problem else "crashed"
