"""Works for the playground, and the patience that its threads need."""

import math
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("sqlalchemy")

from bayesbackprop.playground.requests import Bandit, Classification, Regression, Settings

# Two groups of points of a function, with a gap between.
POINTS = [(x / 10, math.sin(x / 5)) for x in (*range(-22, -8, 2), *range(8, 23, 2))]
# The name of a session.
NAME = "0123456789abcdef" * 2


def regression(points: Any = POINTS, pace: float | None = None, **settings: Any) -> Regression:
    return Regression(task="regression", points=points, pace=pace, settings=Settings(**settings))


def classification(points: Any, pace: float | None = None, **settings: Any) -> Classification:
    return Classification(task="classification", points=points, pace=pace, settings=Settings(**settings))


def bandit(**options: Any) -> Bandit:
    return Bandit(task="bandit", **options)
