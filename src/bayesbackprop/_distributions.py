"""Distributions of counts and of numbers with heavy tails: torch's own, with what these lack.

Their log-probabilities stay exact where terms cancel (large counts, the Poisson limit of the negative binomial, the
Gaussian limit of Student's t), and they have distribution functions. Both are computed in double precision: in single
precision a count of a million would be a nat off.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, distributions
from torch.distributions.utils import broadcast_all

from bayesbackprop.posterior import softplus

_LOG_2PI = math.log(2 * math.pi)

# From here on three terms of Stirling's series are exact: the next is 1 / (360 r^3).
_STIRLING = 1e4
# Rounds of the continued fraction of the incomplete beta function. It needs about the square root of its larger
# parameter: 1000 for counts around a million.
_ROUNDS = 20_000
# Converged is a number that a round has changed by no more than this, a few times the rounding of a double.
_CONVERGED = 1e-14
# Cells of the table of Student's distribution function: cubics in them are right to 1e-10. The last ones reach
# to infinity, where cubics do not follow powers.
_CELLS, _LAST = 4096, 64
# The square of it is a float, and 1 is nothing beside it.
_FAR = 1e100
# Where a logarithm is trained, the number stays within e^-40 and e^40: beyond, distributions no longer change.
_FURTHEST = 40.0


def within_reach(logarithm: Tensor) -> Tensor:
    """A learnt logarithm, no further from 0 than makes a difference."""
    return logarithm.clamp(-_FURTHEST, _FURTHEST)


def bounded_exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(x), and its tangent where exp(x) is beyond two thirds of the exponents of ``dtype``, so that it stays finite.

    A network that is far off then has a cost whose gradient leads back. Types narrower than float32 have its limit, or
    they would not hold the counts that people have.
    """
    limit = math.log(max(torch.finfo(dtype).max, torch.finfo(torch.float32).max)) * 2 / 3
    inner = x.clamp(max=limit).exp()
    return torch.where(x > limit, math.exp(limit) * (1 + x - limit), inner)


def as_column(target: Tensor, shape: Sequence[int]) -> Tensor:
    """A target ``[B]`` as ``[B, 1]``, where that is the ``shape`` that it should have; else as it is."""
    fits = isinstance(target, Tensor) and len(shape) == 2 and shape[1] == 1 and target.dim() == 1
    return target.unsqueeze(1) if fits else target


# --- log-probabilities -----------------------------------------------------------------------------------------------


def poisson_log_prob(log_rate: Tensor, count: Tensor) -> Tensor:
    """y log(rate) - rate - log(y!)."""
    y, x = count.double(), log_rate.double()
    return (y * x - bounded_exp(x, log_rate.dtype) - torch.lgamma(y + 1)).to(log_rate.dtype)


def negative_binomial_log_prob(log_mean: Tensor, log_dispersion: Tensor, count: Tensor) -> Tensor:
    """log P(y) where the variance is m + dispersion m^2; with r = 1 / dispersion it is

    log Gamma(r + y) / (Gamma(r) y!) + y log(m / (r + m)) - r log(1 + m / r).
    """
    y, x, a = count.double(), log_mean.double(), log_dispersion.double()
    r = torch.exp(-_once(a))
    return (log_rising(r, y) - torch.lgamma(y + 1) + y * x - (r + y) * softplus(x + a)).to(log_mean.dtype)


def student_log_prob(log_df: Tensor, log_scale: Tensor, loc: Tensor, value: Tensor) -> Tensor:
    """log p(y), where z = (y - loc) / scale:

    log Gamma((df + 1) / 2) / Gamma(df / 2) - log(pi df) / 2 - log(scale) - (df + 1) / 2 log(1 + z^2 / df).
    """
    df, log_scale = log_df.double().exp(), log_scale.double()
    u = (value.double() - loc.double()) / (log_scale.exp() * df.sqrt())
    # log(1 + u^2), which is 2 log(u) where u^2 could overflow.
    near, far = u.clamp(-_FAR, _FAR), u.abs().clamp(min=_FAR)
    growth = torch.where(u.abs() < _FAR, near.square().log1p(), 2 * far.log())
    constant = log_rising(df / 2, torch.full_like(df, 0.5)) - 0.5 * _LOG_2PI
    return (constant - log_scale - (df + 1) / 2 * growth).to(loc.dtype)


def log_rising(r: Tensor, y: Tensor) -> Tensor:
    """log(Gamma(r + y) / (Gamma(r) r^y)) in double precision; it goes to 0 as r grows."""
    small, large = r.clamp(max=_STIRLING), r.clamp(min=_STIRLING)
    direct = torch.lgamma(small + y) - torch.lgamma(small) - y * small.log()
    corrections = (1 / (large + y) - 1 / large) / 12
    stirling = (large + y - 0.5) * torch.log1p(y / large) - y + corrections
    return torch.where(r < _STIRLING, direct, stirling)


def _once(values: Tensor) -> Tensor:
    """The same for arithmetic, without the copies that ``expand`` has made: what is one number is computed once."""
    return values[tuple(slice(0, 1) if not stride else slice(None) for stride in values.stride())]


# --- distributions ---------------------------------------------------------------------------------------------------


class IgnoringCategorical(distributions.Categorical):
    """Classes, and an index that stands for none of them: its log-probability is 0."""

    ignore_index: int

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(y)."""
        ignored = value == self.ignore_index
        log_prob: Tensor = super().log_prob(value.masked_fill(ignored, 0))  # type: ignore[no-untyped-call]
        return log_prob.masked_fill(ignored, 0.0)


class Poisson(distributions.Poisson):
    """Counts by the logarithm of their rate."""

    def __init__(self, log_rate: Tensor, validate_args: bool | None = None) -> None:
        self.log_rate = log_rate
        super().__init__(bounded_exp(log_rate, log_rate.dtype), validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(y)."""
        _validate(self, value)
        return poisson_log_prob(self.log_rate, value)

    def ratio(self, count: int) -> Tensor:
        """P(count + 1) / P(count)."""
        return self.rate / (count + 1)

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value), the incomplete gamma function."""
        k = value.double().floor()
        below = torch.special.gammaincc(k.clamp(min=0) + 1, self.rate.double())
        return torch.where(k < 0, 0.0, below)


class NegativeBinomial(distributions.NegativeBinomial):
    """Counts by the logarithms of their mean m and of the dispersion: the variance is m + dispersion m^2."""

    def __init__(self, log_mean: Tensor, log_dispersion: Tensor, validate_args: bool | None = None) -> None:
        self.log_mean, self.log_dispersion = log_mean, log_dispersion.expand_as(log_mean)
        super().__init__(torch.exp(-self.log_dispersion), logits=log_mean + log_dispersion, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """m."""
        return bounded_exp(self.log_mean, self.log_mean.dtype)

    @property
    def variance(self) -> Tensor:
        """m + dispersion m^2."""
        return self.mean * (1 + self.log_dispersion.exp() * self.mean)

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(y)."""
        _validate(self, value)
        return negative_binomial_log_prob(self.log_mean, self.log_dispersion, value)

    def ratio(self, count: int) -> Tensor:
        """P(count + 1) / P(count)."""
        return self.probs * ((_once(self.total_count) + count) / (count + 1))

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value), the incomplete beta function."""
        k, logits = value.double().floor(), self.log_mean.double() + self.log_dispersion.double()
        r = torch.exp(-self.log_dispersion.double())
        below = incomplete_beta(r, k.clamp(min=0) + 1, torch.sigmoid(-logits), torch.sigmoid(logits))
        return torch.where(k < 0, 0.0, below)


class StudentT(distributions.StudentT):
    """Student's t with ``df`` degrees of freedom around ``loc``."""

    def __init__(self, df: Tensor, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        # As torch's own, but for its chi-squared part, to which torch does not hand on whether to look at ``df``.
        self.df, self.loc, self.scale = broadcast_all(df, loc, scale)
        self._chi2 = distributions.Chi2(self.df, validate_args=validate_args)
        distributions.Distribution.__init__(self, self.df.size(), validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y)."""
        _validate(self, value)
        return student_log_prob(self.df.double().log(), self.scale.double().log(), self.loc, value)

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value), the incomplete beta function; of many values from a table, where all have the same ``df``."""
        z = (value.double() - self.loc.double()) / self.scale.double()
        if z.numel() <= _CELLS or self._table is None:
            tail = student_tail(self.df.double(), z)
        else:
            distance = z.abs()
            place = distance / (1 + distance) * _CELLS  # the line in [0, _CELLS)
            near = place < _CELLS - _LAST
            cell = torch.where(near, place, 0.0).long()
            a, b, c, d = self._table[cell].unbind(-1)
            x = place - cell
            tail = ((d * x + c) * x + b) * x + a
            if not bool(near.all()):  # infinity and NaN among them
                far = ~near
                tail[far] = student_tail(self.df.double().flatten()[0], z[far])
        return torch.where(z < 0, tail, 1 - tail)

    @functools.cached_property
    def _table(self) -> Tensor | None:
        """The cubics ``[_CELLS, 4]`` of P(z > distance) by place; None where there are several ``df``."""
        df = self.df.double().flatten()
        if not bool((df == df[0]).all()):
            return None
        place = torch.arange(_CELLS, dtype=torch.float64, device=df.device) / _CELLS
        distance = place / (1 - place)
        zero = torch.zeros_like(place)
        tail = student_tail(df[0], distance)
        density = student_log_prob(df[0].log(), zero, zero, distance).exp()
        slope = -density * (1 + distance).square() / _CELLS  # by place
        step = tail[1:] - tail[:-1]
        c = 3 * step - 2 * slope[:-1] - slope[1:]
        return torch.stack([tail[:-1], slope[:-1], c, slope[:-1] + slope[1:] - 2 * step], -1)


def student_tail(df: Tensor, z: Tensor) -> Tensor:
    """P(t > abs(z)) for Student's t with ``df`` degrees of freedom, in double precision."""
    squares = z.square() / df
    half = torch.full_like(df, 0.5)
    return 0.5 * incomplete_beta(df / 2, half, 1 / (1 + squares), 1 / (1 + 1 / squares))


def _validate(distribution: distributions.Distribution, value: Tensor) -> None:
    if distribution._validate_args:
        distribution._validate_sample(value)


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor, rest: Tensor) -> Tensor:
    """The regularised incomplete beta function I_x(a, b) in double precision, where ``rest`` is 1 - x.

    By its continued fraction, which converges quickly below the mean of the distribution; above, by 1 - I_rest(b, a).
    """
    a, b, x, rest = torch.broadcast_tensors(a, b, x, rest)
    above = rest < (b + 1) / (a + b + 2)
    a, b, x, rest = (
        torch.where(above, b, a),
        torch.where(above, a, b),
        torch.where(above, rest, x),
        torch.where(above, x, rest),
    )
    # x^a (1 - x)^b / (a B(a, b)).
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    log_beta = torch.lgamma(low) - log_rising(high, low) - low * high.log()
    log_x, log_rest = (torch.where(of < 0.5, of.log(), torch.log1p(-other)) for of, other in ((x, rest), (rest, x)))
    front = torch.exp(a * log_x + b * log_rest - a.log() - log_beta)
    c, d = torch.ones_like(x), 1 / (1 - (a + b) * x / (a + 1))
    fraction, converged = d, torch.zeros_like(x, dtype=torch.bool)
    for m in range(1, _ROUNDS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c, d = 1 + term / c, 1 / (1 + term * d)
            fraction = fraction * c * d
        converged |= ~((c * d - 1).abs() > _CONVERGED)  # so that NaN, which never changes, is converged too
        if bool(converged.all()):
            break
    below = front * fraction
    return torch.where(above, 1 - below, below)
