"""How the learning rate falls, and which observations are learnt from."""

import pytest

from bayesbackprop.bandits._rates import LEAST, learns, rate


@pytest.mark.parametrize("halving", [1, 7, 200])
def test_as_much_is_learnt_as_by_a_rate_that_falls_on(halving: int) -> None:
    wanted = learnt = 0.0
    for seen in range(60 * halving):
        wanted += 1 / (1 + seen / halving)
        learnt += rate(seen, halving) if learns(seen, halving) else 0.0
        assert learnt == pytest.approx(wanted, abs=2 * LEAST)


@pytest.mark.parametrize("halving", [1, 7, 200])
def test_down_to_the_least_rate_all_observations_are_learnt_from(halving: int) -> None:
    first = [seen for seen in range(60 * halving) if 1 / (1 + seen / halving) >= LEAST]
    assert all(learns(seen, halving) for seen in first)
    assert [rate(seen, halving) for seen in first] == [1 / (1 + seen / halving) for seen in first]
    assert {rate(seen, halving) for seen in range(len(first), 60 * halving)} == {LEAST}
    assert sum(learns(seen, halving) for seen in range(len(first), 60 * halving)) < 25 * halving


def test_a_rate_that_stays_is_learnt_with_always() -> None:
    assert all(learns(seen, None) and rate(seen, None) == 1 for seen in (0, 10, 10**9))
