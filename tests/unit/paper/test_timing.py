"""The time for one input is measured for each network."""

import pytest
import torch

from bayesbackprop._networks import mlp
from bayesbackprop_paper.timing import single_input

pytestmark = pytest.mark.identities


def test_latency_is_measured_for_each() -> None:
    times = single_input({"a": mlp((3, 2)), "b": mlp((3, 4))}, torch.rand(5, 3), rounds=7)
    assert set(times) == {"a", "b"}
    assert all(0 < time.lower <= time.median <= time.upper for time in times.values())
