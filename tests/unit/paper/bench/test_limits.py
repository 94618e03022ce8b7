"""The limits of a machine: the operations are those that torch counts, and the time is that of the slower rate."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bayesbackprop_paper.bench import limits
from bayesbackprop_paper.bench.contenders import SGD, fully_connected
from bayesbackprop_paper.bench.measuring import Step, passes
from bayesbackprop_paper.timing import Quartiles

pytestmark = pytest.mark.identities

SIZES = (7, 5, 4, 3)
TASK = fully_connected(SIZES)


def test_the_operations_of_a_step_are_those_that_torch_counts() -> None:
    step = Step(SGD, TASK, *TASK.data(6))
    with FlopCounterMode(display=False) as counter:
        step()
    assert limits.step_work(SIZES, 6, 1).flops == counter.get_total_flops()
    assert limits.step_work(SIZES, 6, 2).flops == counter.get_total_flops()


def test_the_operations_of_passes_are_those_that_torch_counts() -> None:
    x, _ = TASK.data(2)
    with FlopCounterMode(display=False) as counter:
        passes(TASK.net(), x, 9)
    assert limits.passes_work(SIZES, 2, 9).flops == counter.get_total_flops()


def test_the_operations_of_draws_are_those_that_torch_counts() -> None:
    """In the plain equations: each layer has two products, the first of inputs that all draws share."""
    (h, _), posterior = TASK.data(2), [layer.weight for layer in TASK.net() if isinstance(layer, nn.Linear)]
    with FlopCounterMode(display=False) as counter:
        for number, mu in enumerate(posterior):
            mean, variance = h @ mu.T, h.square() @ mu.square().T
            outputs = mean + variance.sqrt() * torch.randn(9 if number == 0 else 1, *mean.shape)
            h = outputs.flatten(0, 1).relu()
    assert h.shape == (18, 3)
    assert limits.draws_work(SIZES, 2, 9).flops == counter.get_total_flops()


def test_bytes_of_a_step_are_of_six_passes_over_the_parameters_and_of_the_activations() -> None:
    weights, activations = TASK.weights, 6 * (5 + 4 + 3)
    plain, ours = (limits.step_work(SIZES, 6, tensors) for tensors in (1, 2))
    assert plain.moved == 4 * (6 * weights + 4 * activations)
    assert ours.moved == 4 * (12 * weights + 4 * activations)
    assert (plain.held, ours.held) == (8 * weights, 16 * weights)  # parameters and gradients


@pytest.mark.parametrize(("flops", "moved", "least"), [(4e9, 1e6, 2.0), (1e9, 6e6, 3.0)])
def test_the_limit_is_the_longer_of_the_times_of_operations_and_bytes(flops: float, moved: float, least: float) -> None:
    works = {"a": limits.Work(flops, moved, held=2**22)}
    product, total = (name for name in limits.machine(works))
    # So that a millisecond is worth 2e9 operations, and 2e6 bytes: a sum of 2^22 moves half as much again.
    times = {product: 2 * 1024**3 / 2e9, total: 1.5 * 2**22 / 2e6}
    (limit,) = limits.limits(works, {name: Quartiles(time, 99.0, 99.0) for name, time in times.items()}).values()
    assert limit == pytest.approx((least, 2000.0, 2.0))


def test_what_is_timed_for_the_rates_touches_the_bytes_that_are_held() -> None:
    works = {"small": limits.Work(1, 1, held=10), "large": limits.Work(1, 1, held=2**23)}
    product, *sums = limits.machine(works).values()
    assert product().shape == (1024, 1024)
    assert [run().nbytes for run in sums] == [2**19, 2**22]  # one of two vectors
    assert all(torch.equal(run(), torch.zeros(run().shape)) for run in sums)
