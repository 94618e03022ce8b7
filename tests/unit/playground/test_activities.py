"""The curve of what happened at each step."""

import pytest

from playgrounds import NAME  # noqa: F401 (skips where the service cannot be imported)

from bayesbackprop.playground.activities import History  # isort: skip

pytestmark = pytest.mark.identities


def test_at_first_it_is_every_step() -> None:
    history = History(2)
    for step in range(1, 100):
        history.add(step, step, -step)
    assert history.steps == list(range(1, 100))
    assert history.columns == [list(range(1, 100)), [-step for step in range(1, 100)]]


def test_then_means_of_stretches_that_stay_few() -> None:
    history = History(1)
    for step in range(1, 10_001):
        history.add(step, float(step))
    (column,) = history.columns
    assert 100 <= len(history.steps) == len(column) < 200
    lengths = {later - earlier for earlier, later in zip(history.steps, history.steps[1:], strict=False)}
    assert lengths == {history.steps[0]}
    (length,) = lengths
    # The mean of the numbers of a stretch that ends at a step.
    assert column == [step - (length - 1) / 2 for step in history.steps]
