"""Counts and heavy tails against scipy and against their own limits, in value, slope and distribution function."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor, distributions

from bayesbackprop._distributions import (
    NegativeBinomial,
    Poisson,
    StudentT,
    bounded_exp,
    incomplete_beta,
    log_rising,
    negative_binomial_log_prob,
    poisson_log_prob,
    student_log_prob,
)
from engine_parameters import DTYPES

pytestmark = pytest.mark.identities


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def spread(low: float, high: float, count: int = 400) -> Tensor:
    """Numbers whose logarithms are uniform."""
    return torch.empty(count, dtype=torch.float64).uniform_(math.log(low), math.log(high)).exp()


def negative_binomial(mean: Tensor, dispersion: Tensor) -> Any:
    """That of scipy."""
    return stats.nbinom((1 / dispersion).numpy(), (1 / (1 + mean * dispersion)).numpy())


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_poisson_is_that_of_scipy() -> None:
    rate = spread(1e-3, 1e5)
    for count in (torch.zeros(400).double(), torch.poisson(rate), 3 * torch.poisson(rate) + 2):
        expected = torch.from_numpy(stats.poisson.logpmf(count.numpy(), rate.numpy()))
        torch.testing.assert_close(Poisson(rate.log()).log_prob(count), expected, rtol=1e-10, atol=1e-9)


def test_negative_binomial_is_that_of_scipy() -> None:
    mean, dispersion = spread(1e-2, 1e4), spread(1e-4, 1e3)
    of_scipy = negative_binomial(mean, dispersion)
    for level in (0.01, 0.5, 0.999):
        count = torch.from_numpy(of_scipy.ppf(level))
        expected = torch.from_numpy(of_scipy.logpmf(count.numpy()))
        found = NegativeBinomial(mean.log(), dispersion.log()).log_prob(count)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_student_is_that_of_scipy() -> None:
    df, scale, loc = spread(0.05, 1e4), spread(0.01, 100), torch.randn(400).double()
    for z in (-30.0, -1.0, 0.0, 0.5, 4.0, 1e6):
        y = loc + z * scale
        expected = torch.from_numpy(stats.t.logpdf(y.numpy(), df.numpy(), loc.numpy(), scale.numpy()))
        torch.testing.assert_close(StudentT(df, loc, scale).log_prob(y), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dispersion", [1e-6, 1e-10, math.exp(-40)])
def test_without_dispersion_it_is_a_poisson(dispersion: float) -> None:
    """log P differs by O(dispersion (m^2 + y^2)); torch's own formula loses all digits here."""
    log_mean, count = spread(0.1, 100).log(), torch.arange(400).double() // 4
    found = negative_binomial_log_prob(log_mean, numbers(math.log(dispersion)), count)
    torch.testing.assert_close(found, poisson_log_prob(log_mean, count), rtol=1e-9, atol=2e4 * dispersion + 1e-9)


@pytest.mark.parametrize("df", [1e6, 1e12, math.exp(40)])
def test_with_many_degrees_of_freedom_it_is_a_gaussian(df: float) -> None:
    y = torch.linspace(-6, 6, 101, dtype=torch.float64)
    found = student_log_prob(numbers(math.log(df)), numbers(math.log(2)), torch.zeros_like(y), y)
    expected = distributions.Normal(numbers(0), numbers(2)).log_prob(y)
    torch.testing.assert_close(found, expected, rtol=0, atol=200 / df + 1e-13)


@pytest.mark.parametrize("r", [1e-3, 0.5, 3.0, 9_999.0, 10_001.0, 1e7])
def test_the_rising_factorial_is_its_product(r: float) -> None:
    """Gamma(r + y) / (Gamma(r) r^y) = prod_j (1 + j / r), to both sides of where Stirling's series takes over."""
    for y in (0, 1, 2, 5, 200):
        expected = sum(math.log1p(j / r) for j in range(y))
        assert log_rising(numbers(r), numbers(y)).item() == pytest.approx(expected, rel=1e-12, abs=1e-10)


def test_large_counts_in_single_precision() -> None:
    """A double's value, rounded: in single precision the terms alone, of ten millions each, are a nat apart."""
    log_rate = torch.tensor([1e6]).log()
    count = torch.tensor([1_000_500])
    expected = stats.poisson.logpmf(1_000_500, math.exp(log_rate.item()))
    assert poisson_log_prob(log_rate, count).item() == pytest.approx(expected, rel=1e-6)
    dispersion = torch.tensor(1e-9).log()
    found = negative_binomial_log_prob(log_rate, dispersion, count).item()
    variance = 1e6 + math.exp(dispersion.item()) * 1e12
    assert found == pytest.approx(
        stats.norm.logpdf(1_000_500, math.exp(log_rate.item()), math.sqrt(variance)), abs=1e-3
    )


# --- slopes ----------------------------------------------------------------------------------------------------------


def test_slopes_are_those_of_the_values() -> None:
    count, value = numbers(0, 1, 7, 40, 3), numbers(-3, 0.1, 0, 2, 50)
    x, y = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    for small, large in ((-1.0, 2.0), (-12.0, 12.0)):  # to both sides of Stirling's series
        number = torch.tensor([small, 0.0, 1.0, 0.5, large], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: poisson_log_prob(x, count), (x,))
        assert torch.autograd.gradcheck(lambda x, a: negative_binomial_log_prob(x, a, count), (x, number))
        assert torch.autograd.gradcheck(
            lambda df, s, loc: student_log_prob(df, s, loc, value), (number, x, y), atol=1e-4
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("far", [-1e6, -1e3, -100.0, 100.0, 1e3, 1e6])
def test_far_outputs_have_finite_values_and_slopes_that_lead_back(far: float, dtype: torch.dtype) -> None:
    x = torch.full((3,), far, dtype=dtype, requires_grad=True)
    count, value = torch.tensor([int(far < 0), 3, 30]), torch.tensor([0.0, 3.0, -30.0], dtype=dtype)
    for log_number in (-40.0, -3.0, 0.0, 3.0, 40.0):
        number = torch.tensor(log_number, dtype=dtype, requires_grad=True)
        zero = torch.zeros((), dtype=dtype, requires_grad=True)
        for log_prob in (
            poisson_log_prob(x, count) + 0 * number,
            negative_binomial_log_prob(x, number, count),
            student_log_prob(number, zero, x, value),
        ):
            slopes = torch.autograd.grad(log_prob.sum(), (x, number))
            assert log_prob.isfinite().all()
            assert all(slope.isfinite().all() for slope in slopes)
            back = slopes[0] * math.copysign(1, -far)
            assert (back >= 0).all()
            assert back.max() > 0


def test_the_bounded_exponential_is_smooth() -> None:
    for dtype in DTYPES:
        limit = math.log(torch.finfo(dtype).max) * 2 / 3
        x = torch.tensor([-5.0, 0.0, 20.0, limit - 1e-3, limit + 1e-3, 2 * limit, 1e6], dtype=dtype, requires_grad=True)
        y = bounded_exp(x, dtype)
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert y.isfinite().all()
        torch.testing.assert_close(y[:4], x[:4].exp())
        torch.testing.assert_close(slope[:4], x[:4].exp())
        assert (slope[4:] == slope[4]).all()
        torch.testing.assert_close(y[4], y[3], rtol=3e-3, atol=0)
    half = torch.tensor([9.0], dtype=torch.float16)
    assert torch.equal(bounded_exp(half, half.dtype), half.exp())  # beyond two thirds of its exponents


# --- distribution functions ------------------------------------------------------------------------------------------


def test_the_incomplete_beta_function_is_that_of_scipy() -> None:
    a, b, x = spread(1e-3, 3e3, 5000), spread(1e-3, 3e3, 5000), torch.rand(5000).double()
    found = incomplete_beta(a, b, x, 1 - x)
    expected = torch.from_numpy(special.betainc(a.numpy(), b.numpy(), x.numpy()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found + incomplete_beta(b, a, 1 - x, x), torch.ones(5000).double())


def test_the_incomplete_beta_function_at_its_ends() -> None:
    ends = numbers(0, 1)
    for a, b in ((0.5, 0.5), (1e-3, 1e3), (1e6, 2.0)):
        assert incomplete_beta(numbers(a), numbers(b), ends, 1 - ends).tolist() == [0, 1]


def test_distribution_functions_are_those_of_scipy() -> None:
    mean, dispersion, df = spread(1e-2, 1e4), spread(1e-6, 1e2), spread(0.1, 1e6)
    scale, loc = spread(0.1, 10), torch.randn(400).double()
    of_scipy = negative_binomial(mean, dispersion)
    for level in (1e-6, 0.3, 0.5, 0.97, 1 - 1e-6):
        count = stats.poisson.ppf(level, mean.numpy())
        found = Poisson(mean.log()).cdf(torch.from_numpy(count))
        torch.testing.assert_close(found, torch.from_numpy(stats.poisson.cdf(count, mean.numpy())), rtol=1e-8, atol=0)
        count = of_scipy.ppf(level)
        found = NegativeBinomial(mean.log(), dispersion.log()).cdf(torch.from_numpy(count))
        torch.testing.assert_close(found, torch.from_numpy(of_scipy.cdf(count)), rtol=1e-7, atol=0)
        y = stats.t.ppf(level, df.numpy(), loc.numpy(), scale.numpy())
        found = StudentT(df, loc, scale).cdf(torch.from_numpy(y))
        torch.testing.assert_close(found, torch.full_like(found, level), rtol=1e-7, atol=0)


def test_a_million_counts_and_the_ends_of_the_line() -> None:
    counts = numbers(-math.inf, -1, -0.5, 0, 0.5, 9e5, 1e6, 1.1e6, 3e6, 1e12)
    found = NegativeBinomial(numbers(1e6).log(), numbers(0.01).log()).cdf(counts)
    expected = stats.nbinom.cdf(np.floor(counts.numpy()), 100, 1 / (1 + 1e4))
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-7, atol=1e-300)
    found = Poisson(numbers(0.0)).cdf(numbers(-math.inf, -1, 0, math.inf))
    assert found.tolist() == pytest.approx([0, 0, math.exp(-1), 1], rel=1e-14)
    assert StudentT(numbers(0.3), numbers(0), numbers(1)).cdf(numbers(-math.inf, 0, math.inf)).tolist() == [0, 0.5, 1]


def test_targets_that_cannot_be_are_refused_by_torchs_own_check() -> None:
    for made, value in (
        (Poisson(numbers(0.0), validate_args=True), -1.0),
        (NegativeBinomial(numbers(0.0), numbers(0.0), validate_args=True), 0.5),
        (StudentT(numbers(1.0), numbers(0.0), numbers(1.0), validate_args=True), math.nan),
    ):
        with pytest.raises(ValueError, match="within the support"):
            made.log_prob(numbers(value))


def test_moments_of_the_negative_binomial() -> None:
    mean, dispersion = spread(0.01, 100), spread(0.01, 100)
    made = NegativeBinomial(mean.log(), dispersion.log())
    torch.testing.assert_close(made.mean, mean)
    torch.testing.assert_close(made.variance, mean + dispersion * mean**2)
    torch.testing.assert_close(made.variance, torch.from_numpy(negative_binomial(mean, dispersion).var()))


@pytest.mark.equivalence
@pytest.mark.parametrize("df", [0.3, 1.1, 2.1, 30.0, 1e8])
def test_many_values_of_student_are_from_a_table(df: float) -> None:
    y = numbers(*(sign * 10.0**power for sign in (-1, 1) for power in range(-9, 9)), 0.0, math.inf, -math.inf, 62.9)
    y = torch.cat([y, torch.randn(20_000, dtype=torch.float64)])
    found = StudentT(numbers(df), torch.zeros_like(y), numbers(1.0)).cdf(y)
    torch.testing.assert_close(found, torch.from_numpy(stats.t(df).cdf(y.numpy())), rtol=0, atol=1e-9)
    mixed = StudentT(torch.linspace(1, 2, len(y), dtype=torch.float64), torch.zeros_like(y), numbers(1.0)).cdf(y)
    expected = torch.from_numpy(stats.t(np.linspace(1, 2, len(y))).cdf(y.numpy()))
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-9)
