"""The environments of the experiments are what they say, and refuse what they cannot be made of."""

import math
from typing import Any

import pytest
import torch

from bayesbackprop_paper.environments import Clicks, Items, Switched, Wheel, delayed, digits, switched
from ztests import assert_z

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("delta", [0, 1, -0.5, 1.5, float("nan"), True, "half", None])
def test_a_wheel_needs_a_radius_within_it(delta: Any) -> None:
    with pytest.raises(ValueError, match=r"'delta' parameter of Wheel must be a float in \(0, 1\)"):
        Wheel(delta)


def test_a_switch_gives_each_action_the_rewards_of_its_neighbour() -> None:
    switched, before, after = Switched(Clicks(3), 4), Clicks(3), Clicks(3)
    for t in range(8):
        switched.t = before.t = after.t = t
        assert torch.equal(switched.context, before.context)
        moved = before.expected if t < 4 else before.expected.roll(1)
        assert torch.equal(switched.expected, moved)
        reward = after.step((t - (t >= 4)) % 10)
        assert switched.step(t % 10) == reward
    assert switched.described()["inside"] == Clicks(3).described()


@pytest.mark.parametrize("make", [Clicks, Items])
def test_clicks_are_yes_or_no_and_as_probable_as_expected(make: type[Clicks | Items]) -> None:
    environment, differences = make(5), []
    for t in range(300):
        environment.t = t
        expected, rewards = environment.expected, environment._look()[2]
        assert bool(((rewards == 0) | (rewards == 1)).all())
        differences.append(((rewards - expected) / (expected * (1 - expected)).sqrt()).double())
    z = torch.stack(differences).sum(0) / math.sqrt(300)
    assert_z(z, "clicks")


def test_the_digits_are_ten_classes_of_64_pixels() -> None:
    environment = digits(2)
    assert (environment.features, environment.actions) == (64, 10)
    assert 0 <= float(environment.context.min()) <= float(environment.context.max()) <= 1
    assert sorted(environment.expected.tolist()) == [0.0] * 9 + [1.0]


def test_late_and_exchanged_digits_are_the_digits() -> None:
    plain, late, moved = digits(4), delayed(4), switched(4)
    assert (plain.delay, late.delay, moved.at) == (0, 100, 1000)
    assert late.described() == {**plain.described(), "delay": 100}
    for t in (0, 999, 1000):
        plain.t = late.t = moved.t = t
        assert torch.equal(plain.context, late.context)
        assert torch.equal(plain.expected, late.expected)
        assert torch.equal(moved.expected, plain.expected.roll(int(t >= 1000)))


def test_a_switch_keeps_the_delay() -> None:
    assert Switched(delayed(1), 3).delay == 100
