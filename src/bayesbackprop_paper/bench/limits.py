"""The least time that a machine could take for a step or a prediction, from what it has to compute and to move.

A machine multiplies matrices at some rate and moves memory at another. Both are measured beside what is compared with
them. Whatever the program, it cannot be quicker than its operations at the one rate, nor than its bytes at the other.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from bayesbackprop_paper.bench.measuring import FLOAT_BYTES
from bayesbackprop_paper.timing import Quartiles

# The side of square matrices whose product is as quick as any.
_SIDE = 1024
_PRODUCT = "matrix product"

# Vectors are no smaller, so that a sum takes longer than to call it; they are in the cache all the same.
_LEAST_BYTES = 2**20

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


def machine(works: Mapping[str, Work]) -> dict[str, Callable[[], object]]:
    """What to time beside these works to learn the rates: a matrix product, and sums of as many bytes as they hold."""
    a, b, product = (torch.rand(_SIDE, _SIDE) for _ in range(3))
    runs: dict[str, Callable[[], object]] = {_PRODUCT: partial(torch.mm, a, b, out=product)}
    for name, work in works.items():
        x, y = (torch.zeros(_held(work) // (2 * FLOAT_BYTES)) for _ in range(2))
        runs[_sum_of(name)] = partial(x.add_, y)
    return runs


def limits(works: Mapping[str, Work], times: Mapping[str, Quartiles]) -> dict[str, Limit]:
    """The limits of these works from the times of :func:`machine`, of which the lower quartiles count."""
    flops = 2 * _SIDE**3 / times[_PRODUCT].lower  # a millisecond
    found: dict[str, Limit] = {}
    for name, work in works.items():
        moved = _MOVED_BY_SUM * _held(work) / times[_sum_of(name)].lower
        found[name] = Limit(max(work.flops / flops, work.moved / moved), flops / 1e6, moved / 1e6)
    return found


def _held(work: Work) -> int:
    return max(int(work.held), _LEAST_BYTES)


def _sum_of(name: str) -> str:
    return f"sum of vectors, {name}"
