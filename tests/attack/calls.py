"""Bad calls of the public API: `bad_calls` has the table of them."""

import random
import time
from collections.abc import Iterator

from attack import Attempt, Outcome

OF_VERDICT: dict[str, Outcome] = {
    "clear": "refused clearly",
    "legitimate": "equal",
    "silent": "accepted wrong",
    "obscure": "crashed",
}


def run(seed: int, seconds: float) -> Iterator[Attempt]:
    """All calls in a random order, until the time is over."""
    import bad_calls

    until = time.monotonic() + seconds
    calls = [*bad_calls.calls()]
    random.Random(seed).shuffle(calls)
    for call in calls:
        if time.monotonic() > until:
            return
        found = bad_calls.answer(*call)
        yield Attempt("calls", OF_VERDICT[found.verdict], f"{found.call}: {found.said}")
