"""Runs a part in children, counts what they say and how they end, and prints one table."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from attack import BAD, OUTCOMES, Attempt, Outcome

TESTS = Path(__file__).parents[1]
MEGABYTES = 8192
# Seconds that a child may take longer than it was told: to start torch, and to finish its last attempt.
GRACE = 120.0
# Children that may die before a part is given up.
DEATHS = 5


@dataclass
class Report:
    """What came of one part: the number of each outcome by what was tried, and what was bad."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    bad: Counter[str] = field(default_factory=Counter)
    missing: str = ""

    def add(self, attempt: Attempt, seed: int) -> None:
        self.counts.setdefault(attempt.what, Counter())[attempt.outcome] += 1
        if attempt.outcome in BAD:
            self.bad[f"{attempt.what}: {attempt.outcome} (seed {seed}): {attempt.detail}"] += 1


def run(name: str, module: str, seed: int, seconds: float, grace: float = GRACE, megabytes: int = MEGABYTES) -> Report:
    """Let a part attack for so long. A child that dies is followed by one with the next seed."""
    report, until = Report(), time.monotonic() + seconds
    for number in range(DEATHS):
        left = max(until - time.monotonic(), 1.0)
        ended, said = _child(report, module, seed + number, left, grace, megabytes)
        if ended == "well":
            break
        report.add(Attempt(name, cast(Outcome, ended), said), seed + number)
        if time.monotonic() > until:
            break
    return report


def _child(report: Report, module: str, seed: int, seconds: float, grace: float, megabytes: int) -> tuple[str, str]:
    """One child: how it ended, and the end of what it said."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "attack.child", module, str(seed), str(seconds), str(megabytes)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    hung = False
    try:
        output, errors = process.communicate(timeout=seconds + grace)
    except subprocess.TimeoutExpired:
        hung = True
        os.killpg(process.pid, signal.SIGKILL)  # its own children with it
        output, errors = process.communicate()
    for line in output.splitlines():
        what, *rest = json.loads(line)
        if what == "not available":
            report.missing = rest[0]
        else:
            report.add(Attempt(what, *rest), seed)
    if hung:
        return "hung", f"no end after {seconds + grace:.0f} s"
    if process.returncode:
        return "crashed", f"exit code {process.returncode}: {errors[-3000:]}"
    return "well", ""


def table(reports: dict[str, Report]) -> str:
    """The table of all parts."""
    head = ["what", "tried", *OUTCOMES]
    rows, total = list[list[str]](), Counter[Outcome]()
    for part, report in reports.items():
        if report.missing:
            rows.append([part, f"not available: {report.missing}"])
        for what, counts in report.counts.items():
            rows.append([f"{part}: {what}", str(counts.total()), *(str(counts[outcome]) for outcome in OUTCOMES)])
            total += counts
    rows.append(["all", str(total.total()), *(str(total[outcome]) for outcome in OUTCOMES)])
    first = max(len(row[0]) for row in [head, *rows])
    widths = [max(len(title), 7) for title in head[1:]]
    lines = []
    for row in [head, *rows]:
        cells = row[1:] if len(row) < len(head) else [f"{cell:>{w}}" for cell, w in zip(row[1:], widths, strict=True)]
        lines.append("  ".join([f"{row[0]:<{first}}", *cells]))
    return "\n".join(lines)
