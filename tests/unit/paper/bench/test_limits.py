"""The limits of a machine: the operations are those that torch counts, and the time is that of the slower rate."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
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
    work, machine = limits.Work(flops, moved, held=2**22), limits.Machine()
    learn(machine, work, flops=2e9, moved=2e6)
    assert machine.limit(work) == pytest.approx((least, 2000.0, 2.0))


def learn(machine: limits.Machine, work: limits.Work, flops: float, moved: float) -> None:
    """Tell it times from which these rates a millisecond follow: 64 sums of 4 MB move half as much again."""
    product, total = machine.runs([work])
    times = {product: 2 * 1024**3 / flops, total: 1.5 * work.held * (2**28 // work.held) / moved}
    machine.learn([work], {name: Quartiles(99.0, 99.0, 99.0, time) for name, time in times.items()})


def test_the_quickest_of_all_that_was_timed_counts_and_large_vectors_say_what_small_ones_can() -> None:
    small, large = (limits.Work(1e6, 1e6, held=held) for held in (2**21, 2**24))
    machine = limits.Machine()
    learn(machine, small, flops=1e9, moved=1e6)
    learn(machine, large, flops=2e9, moved=3e6)  # the small ones were disturbed
    assert machine.limit(small) == pytest.approx((1 / 3, 2000.0, 3.0))
    learn(machine, small, flops=1e9, moved=4e6)
    learn(machine, small, flops=1e9, moved=2e6)
    assert machine.limit(small) == pytest.approx((1 / 4, 2000.0, 4.0))
    assert machine.limit(large) == pytest.approx((1 / 3, 2000.0, 3.0))


def test_what_is_timed_for_the_rates_goes_over_the_bytes_that_are_held() -> None:
    works = [limits.Work(1, 1, held=10), limits.Work(1, 1, held=2**23)]
    product, *sums = limits.Machine().runs(works).values()
    with FlopCounterMode(display=False) as counter:
        product()
    assert counter.get_total_flops() == 2 * 1024**3
    for run, held, times in zip(sums, (2**20, 2**23), (256, 32), strict=True):
        with Additions() as additions:
            run()
        assert additions.counted == [held] * times


class Additions(TorchDispatchMode):
    """Notes the bytes of both tensors of each addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.add_.Tensor
        self.counted.append(sum(each.nbytes for each in args))
        return func(*args, **(kwargs or {}))
