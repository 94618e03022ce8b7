"""The latency of networks for one input at a time."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn

from bayesbackprop_paper.bench.measure import Quartiles, interleaved

# Rounds before anything counts.
_WARM_UP = 20


def single_input(nets: Mapping[str, nn.Module], x: Tensor, rounds: int = 500, seed: int = 0) -> dict[str, Quartiles]:
    """The milliseconds of each network for one row of ``x``, another one in each round, in turn with the others.

    Each input is timed by itself: over several at a time, a slow network would be interrupted by other programs within
    a measurement and a quick one not, and on a busy machine that looks like speed.
    """
    runs: dict[str, Callable[[], object]] = {name: partial(_next, net, cycle(x.split(1))) for name, net in nets.items()}
    with torch.inference_mode():
        return interleaved(runs, rounds, _WARM_UP, seed, lambda numbers, _: numbers, "latency")


def _next(net: nn.Module, rows: Iterator[Tensor]) -> object:
    return net(next(rows))
