"""The least time that a machine could take for a step or a prediction, from what it has to compute and to move.

A machine multiplies matrices at some rate and moves memory at another. Both are measured beside what is compared with
them. Whatever the program, it cannot be quicker than its operations at the one rate, nor than its bytes at the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from bayesbackprop_paper.bench.measuring import FLOAT_BYTES
from bayesbackprop_paper.timing import Quartiles

# The side of square matrices whose product is as quick as any.
_SIDE = 1024
_PRODUCT = "matrix product"

# Vectors are no smaller, so that a sum takes longer than to call it; they are in the cache all the same. Sums go over
# so many bytes in a run that small vectors are there but for the first time.
_LEAST_BYTES = 2**20
_RUN_BYTES = 2**28

# Bytes moved by a += b for each that a and b hold: both are read, one is written.
_MOVED_BY_SUM = 1.5


class Work(NamedTuple):
    """What has to be done: floating-point operations, bytes read or written, and bytes of the tensors they are of."""

    flops: float
    moved: float
    held: float


class Limit(NamedTuple):
    """The least time in milliseconds, and the rates it follows from: operations and bytes a second, in units of 1e9."""

    milliseconds: float
    gigaflops: float
    gigabytes: float


def step_work(sizes: Sequence[int], batch: int, tensors: int) -> Work:
    """Of a training step with SGD of a network whose every weight has ``tensors`` parameters: 1 in plain ones, or 2.

    There are three products for each layer: its outputs, the gradients of its weights, and those of its inputs, but for
    the first layer. The parameters are read in the forward and in the backward pass, which writes their gradients; SGD
    reads both and writes the parameters. Activations are written and read, and so are their gradients.
    """
    products = [inputs * outputs for inputs, outputs in pairwise(sizes)]
    flops = 2 * batch * (3 * sum(products) - products[0])
    parameters = tensors * _weights(sizes)
    return Work(flops, FLOAT_BYTES * (6 * parameters + 4 * batch * sum(sizes[1:])), FLOAT_BYTES * 2 * parameters)


def passes_work(sizes: Sequence[int], images: int, draws: int) -> Work:
    """Of plain passes, one after the other: each reads all weights."""
    weights = _weights(sizes)
    flops = 2 * images * draws * sum(inputs * outputs for inputs, outputs in pairwise(sizes))
    return Work(flops, FLOAT_BYTES * draws * weights, FLOAT_BYTES * weights)


def draws_work(sizes: Sequence[int], images: int, draws: int) -> Work:
    """Of a prediction that draws outputs: mean and variance of each, by two products, in the first layer once for all.

    Mu and rho are read once.
    """
    first, *others = (inputs * outputs for inputs, outputs in pairwise(sizes))
    weights = 2 * FLOAT_BYTES * _weights(sizes)
    return Work(4 * images * (first + draws * sum(others)), weights, weights)


def _weights(sizes: Sequence[int]) -> int:
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))


class Machine:
    """The rates of this machine, from the shortest times of all that was run to learn them.

    Whatever else the machine does makes these times longer, never shorter. So the more is timed, the better.
    """

    def __init__(self) -> None:
        self._flops = 0.0  # a millisecond
        self._moved: dict[int, float] = {}  # bytes a millisecond, by the bytes that both vectors hold

    def runs(self, works: Iterable[Work]) -> dict[str, Callable[[], object]]:
        """What to time beside these works: a matrix product, and sums of as many bytes as they hold."""
        a, b, product = (torch.rand(_SIDE, _SIDE) for _ in range(3))
        runs: dict[str, Callable[[], object]] = {_PRODUCT: partial(torch.mm, a, b, out=product)}
        for held in map(_vectors, works):
            x, y = (torch.zeros(held // (2 * FLOAT_BYTES)) for _ in range(2))
            runs[_sum_of(held)] = partial(_repeat, partial(x.add_, y), _sums(held))
        return runs

    def learn(self, works: Iterable[Work], times: Mapping[str, Quartiles]) -> None:
        """Take in the times of :meth:`runs`."""
        self._flops = max(self._flops, 2 * _SIDE**3 / times[_PRODUCT].least)
        for held in map(_vectors, works):
            rate = _MOVED_BY_SUM * held * _sums(held) / times[_sum_of(held)].least
            self._moved[held] = max(rate, self._moved.get(held, 0.0))

    def limit(self, work: Work) -> Limit:
        """The least time for ``work``; memory is as quick as for vectors of its size, or of any larger one."""
        moved = max(rate for held, rate in self._moved.items() if held >= _vectors(work))
        return Limit(max(work.flops / self._flops, work.moved / moved), self._flops / 1e6, moved / 1e6)


def _repeat(run: Callable[[], object], number: int) -> None:
    for _ in range(number):
        run()


def _vectors(work: Work) -> int:
    """The bytes of the two vectors to learn from for ``work``."""
    return max(int(work.held), _LEAST_BYTES)


def _sums(held: int) -> int:
    return max(2, _RUN_BYTES // held)


def _sum_of(held: int) -> str:
    return f"sum of vectors of {held} bytes"
