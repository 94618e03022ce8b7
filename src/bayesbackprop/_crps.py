"""The continuous ranked probability score of mixtures: the integral of (F(z) - [z >= y])^2 over z.

F is the mean of the distribution functions of K components, so what it costs is their number times that of the points
where F is needed. Tensors are ``[components, elements]``, and y is ``[elements]``.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Numbers to hold at a time for Gaussians: few enough for the caches.
_CHUNK = 2**18
# Cells between quantiles of the mixture. Each has two points of Gauss and Legendre, the ends of their rule for [-1, 1].
_FEWEST_CELLS, _MOST_CELLS, _POINT = 16, 64, 1 / math.sqrt(3)
# Cells that the components have together at least: few draws may lie far apart.
_CELLS_OF_ALL = 1600
# Quantiles of the components for each cell, of each component at least, and of the tails, where the furthest counts.
_FINER, _FEWEST_LEVELS, _TAILS = 4, 5, (0.03, 0.01, 1e-3)

# Numbers after which a probability is computed anew: those that are too small for a float do not grow within them.
_ANEW = 32


def of_gaussians(mean: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Exact, in closed form."""
    elements = max(1, _CHUNK // len(mean))
    chunks = zip(mean.split(elements, 1), scale.split(elements, 1), y.split(elements), strict=True)
    return torch.cat([_of_gaussians(*chunk) for chunk in chunks])


def _of_gaussians(mean: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """E|X - y| - E|X - X'| / 2 for X, X' from a uniform mixture of Gaussians, ``[K, elements]``: a folded normal each.

    Of the pairs (i, j) and (j, i), which are alike, one is computed; of (i, i) the mean is 0 and the variance twice
    that of i.
    """
    draws, variance = len(mean), scale.square()
    pairs = scale.sum(0) * (2 / math.sqrt(math.pi))
    for i in range(draws - 1):
        pairs += 2 * _mean_distance(mean[i + 1 :] - mean[i], (variance[i + 1 :] + variance[i]).sqrt()).sum(0)
    return _mean_distance(mean - y, scale).mean(0) - pairs / (2 * draws**2)


def _mean_distance(mean: Tensor, scale: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, scale^2)."""
    z = mean / scale
    return scale * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square()) + mean * torch.erf(z / math.sqrt(2))


def by_quadrature(
    cdf: Callable[[Tensor], Tensor], quantiles: Callable[[Tensor], Tensor], draws: int, y: Tensor, *, whole: bool
) -> Tensor:
    """The integral over cells whose ends are quantiles of the mixture and y; of a Gaussian it is within 1e-3.

    Of ``whole`` numbers the ends are whole too. Then cells of width 1 and 2, in which F is constant from number to
    number, are exact.

    Args:
        cdf: F at points ``[elements]``.
        quantiles: Quantiles of the components, ``[levels, components, elements]``, or what comes near.
        draws: How many components there are.
        y: The targets.
        whole: Whether the targets are whole numbers.
    """
    cells = min(_MOST_CELLS, max(_FEWEST_CELLS, _CELLS_OF_ALL // draws))
    count = max(_FEWEST_LEVELS, math.ceil(_FINER * cells / draws))
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    inner = quantiles(levels).flatten(0, 1).sort(dim=0).values
    ranks = torch.linspace(0, len(inner) - 1, cells + 1).round().long()
    tails = torch.tensor(_TAILS, dtype=torch.float64)
    below, above = quantiles(tails).amin(1), quantiles(1 - tails).amax(1)
    ends = torch.cat([below, inner[ranks.to(inner.device)], above])
    ends = torch.cat([ends.floor() if whole else ends, y[None]]).sort(dim=0).values
    total = torch.zeros_like(y)
    for low, high in pairwise(ends):
        middle, half = (low + high) / 2, (high - low) / 2
        for side in (-_POINT, _POINT):
            point = middle + side * half
            total += half * (cdf(point) - (point >= y).double()).square()
    return total


def by_summation(probs: Iterable[Tensor], first: int, y: Tensor) -> Tensor:
    """The sum over all whole numbers from ``first`` on that have a probability worth mentioning.

    Args:
        probs: P of each number after the other, of each component.
        first: The first number.
        y: The targets.
    """
    total, below = torch.zeros_like(y), torch.zeros_like(y)
    for number, each in enumerate(probs, first):
        below += each.mean(0)
        total += (below - (number >= y).double()).square()
    return total


def probabilities(counts: Any, numbers: range) -> Iterator[Tensor]:
    """P of whole numbers, one after the other; each from the one before by ``counts.ratio``, if there is one.

    The tensor is the same each time, with other numbers.
    """
    ratio = getattr(counts, "ratio", None)
    for number in numbers:
        if ratio is None or (number - numbers.start) % _ANEW == 0:
            probs: Tensor = counts.log_prob(torch.tensor(float(number), device=counts.mean.device)).double().exp()
        else:
            probs *= ratio(number - 1)
        yield probs
