"""The noise has the distribution it should, and no correlations."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from bayesbackprop.noise import Key, Role, normal, signs, stream
from ztests import assert_p_value, assert_z

pytestmark = pytest.mark.statistical

CPU = torch.device("cpu")


def numbers(n: int, seed: int = 0, step: int = 1, draw: int = 0, stream: int = 0) -> Tensor:
    return normal((n,), Key(seed, step, draw), stream, torch.float64, CPU)


def test_moments_and_tails():
    """10^8 numbers of the type that training uses; beyond 5 standard deviations each side should have 29."""
    chunk, chunks = 2**18, 382
    levels = (1, 2, 3, 4, 4.5, 5)
    powers = torch.zeros(6, dtype=torch.float64)
    above, below = [0] * len(levels), [0] * len(levels)
    for step in range(1, chunks + 1):
        x = normal((chunk,), Key(17, step), stream(1, Role.WEIGHT), torch.float32, CPU)
        top, bottom = x[x >= 1], x[x <= -1]
        for k, level in enumerate(levels):
            above[k] += int((top >= level).sum())
            below[k] += int((bottom <= -level).sum())
        power = x = x.double()
        for k in range(6):
            powers[k] += power.sum()
            power = power * x
    n = chunk * chunks
    for k, level in enumerate(levels):
        for count in (above[k], below[k]):
            p = stats.binomtest(count, n, stats.norm.sf(level)).pvalue
            assert_p_value(min(1.0, p * 2 * len(levels)), f"{count} of {n} numbers beyond {level}")
    expected = torch.tensor([0, 1, 0, 3, 0, 15], dtype=torch.float64)
    variances = torch.tensor([1, 2, 15, 96, 945, 10170], dtype=torch.float64)  # E[x^2k] - E[x^k]^2
    assert_z((powers / n - expected) / (variances / n).sqrt(), "moments 1 to 6")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kolmogorov_smirnov(dtype):
    x = normal((2**20,), Key(3, 1), 0, dtype, CPU)
    for quarter in x.reshape(-1, 4, 8).unbind(1):  # cosines and sines of either pair
        assert_p_value(4 * stats.kstest(quarter.flatten().numpy(), "norm").pvalue, "Kolmogorov-Smirnov")


def correlations(x: Tensor, y: Tensor) -> Tensor:
    """Of the numbers and of their squares, standard normal if independent."""
    squares = ((x.square() - 1) * (y.square() - 1)).mean() / 2
    mixed = ((x.square() - 1) * y).mean() / math.sqrt(2)
    return torch.stack([(x * y).mean(), squares, mixed]) * math.sqrt(len(x))


def test_neighbours_are_uncorrelated():
    x = numbers(2**22)
    z = [correlations(x[:-lag], x[lag:]) for lag in (1, 2, 7, 8, 9, 16, 24, 31, 32, 33)]
    assert_z(torch.cat(z), "correlations across neighbours")


@pytest.mark.parametrize(
    "others",
    [
        [{"stream": stream(0, role)} for role in Role if role != Role.WEIGHT],
        [{"stream": stream(parameter, Role.WEIGHT)} for parameter in (1, 2, 2**20)],
        [{"step": step} for step in (0, 2, 3, 2**31)],
        [{"draw": draw} for draw in (1, 2, 2**31)],
        [{"seed": seed} for seed in (1, 2, 2**31, 2**32, 2**62)],
    ],
    ids=["roles", "parameters", "steps", "draws", "seeds"],
)
def test_other_noise_is_uncorrelated(others):
    n = 2**21
    x, z = numbers(n), []
    for other in others:
        y = numbers(n, **other)
        z += [correlations(x, y), correlations(x[32:], y[:-32])]
    assert_z(torch.cat(z), f"correlations with {others}")


def test_signs_are_fair_and_uncorrelated():
    n = 2**22
    s, t, other = (
        signs((n,), Key(4, step), stream(0, role), torch.float64, CPU)
        for step, role in [(1, Role.INPUT_SIGN), (1, Role.OUTPUT_SIGN), (2, Role.INPUT_SIGN)]
    )
    assert set(s.unique().tolist()) == {-1.0, 1.0}
    means = [s, t, s * t, s * other, *(s[:-lag] * s[lag:] for lag in (1, 2, 7, 8, 9, 16, 24, 31, 32, 33))]
    assert_z(torch.stack([x.mean() * math.sqrt(len(x)) for x in means]), "signs")
