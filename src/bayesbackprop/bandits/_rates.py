"""How the learning rate of an agent falls, and which observations it learns after."""

import math

# The least rate, as a part of the first. Where it would fall below, updates follow fewer and fewer observations
# instead: as much is learnt, for less.
LEAST = 0.1


def falling(seen: float, halving: int | None) -> float:
    """The rate after so many observations, as a part of the first, if it falls without end."""
    return 1 / (1 + seen / (halving or math.inf))


def rate(seen: float, halving: int | None) -> float:
    """The learning rate after so many observations, as a part of the first."""
    return max(LEAST, falling(seen, halving))


def learns(seen: int, halving: int | None) -> bool:
    """Whether updates follow an observation, where so many were before it.

    Where u = LEAST * (1 + seen / halving) is above 1, updates follow one of u observations. By the integral of 1 / u
    there were (halving / LEAST) * log u such observations before, rounded down; this is one if that number grows.
    """
    if halving is None:
        return True
    before, after = (LEAST / falling(n, halving) for n in (seen, seen + 1))
    return before <= 1 or _so_far(before, halving) < _so_far(after, halving)


def _so_far(u: float, halving: int) -> int:
    return math.floor(halving / LEAST * math.log(u))
