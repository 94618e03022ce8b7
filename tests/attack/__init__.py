"""`make attack`: what breaks under mangled files, kills, bad calls, threads and a full disk.

A part is a module of this package with a function ``run(seed, seconds)`` that yields an :class:`Attempt` for everything
it tried, and stops when its time is over. It runs in a child process with a limit on its memory; a child that dies, or
does not end, is counted.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol, get_args

Outcome = Literal["refused clearly", "equal", "accepted wrong", "crashed", "hung"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# None of these may happen. An exception that is no clear refusal is a crash as well.
BAD: tuple[Outcome, ...] = ("accepted wrong", "crashed", "hung")

PARTS = {name: f"attack.{name}" for name in ("files", "kills", "calls", "threads", "disk")}


class Attempt(NamedTuple):
    """One thing that was tried: on what, what came of it, and what to say of it where it is bad."""

    what: str
    outcome: Outcome
    detail: str = ""


class Part(Protocol):
    """What a module of a part has. ``run`` raises ImportError where a module that it needs is not there."""

    run: Callable[[int, float], Iterator[Attempt]]
