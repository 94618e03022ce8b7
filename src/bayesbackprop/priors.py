"""Priors P(w) on a single weight; every weight of a parameter has the same.

A prior is abstract (:class:`Prior`) or final; it is a frozen value without tensors. What it is centred on is not its
business: the network subtracts the centre before it asks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesbackprop._errors import check_callable, check_positive, check_probability, check_text, invalid

_LOG_2PI = math.log(2 * math.pi)


class Prior(ABC):
    """A density on one weight, centred on 0."""

    @abstractmethod
    def log_density(self, w: Tensor) -> Tensor:
        """log P(w), element by element."""

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Weights drawn from the prior, of the shape, type and device of ``like``, where it can be drawn from."""
        raise NotImplementedError(f"{self} cannot be drawn from.")

    def expected_log_density(self, mu: Tensor, sigma: Tensor) -> Tensor:  # noqa: ARG002
        """E[log P(w)] for w ~ N(mu, sigma^2), element by element, where it has a closed form."""
        raise invalid(
            "complexity",
            "FreeEnergy",
            f"'sampled' where the prior is {self}, whose expectation has no closed form (the library's own have one)",
            "closed",
        )


@dataclass(frozen=True)
class Normal(Prior):
    """A Gaussian, P(w) = N(w | 0, sigma^2).

    Examples:
        >>> Normal(0.1).log_density(torch.tensor(0.0))
        tensor(1.3836)
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        vars(self).update(check_positive("Normal", sigma=self.sigma))

    def log_density(self, w: Tensor) -> Tensor:
        return _normal_log_density(w, self.sigma)

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return self.sigma * _normal(like, generator)

    def expected_log_density(self, mu: Tensor, sigma: Tensor) -> Tensor:
        """-((mu^2 + sigma^2) / s^2 + log(2 pi s^2)) / 2."""
        return self.log_density(mu) - 0.5 * (sigma / self.sigma).square()


class Bump(NamedTuple):
    """A sum of Gaussians around 0, sum_j height_j exp(-w^2 / (2 width_j^2))."""

    heights: tuple[float, ...]
    widths: tuple[float, ...]

    @property
    def gaussians(self) -> list[tuple[float, float]]:
        """height * width and width^2 of each, and of one with the area and the spread of all together."""
        each = [(height * width, width**2) for height, width in zip(self.heights, self.widths, strict=True)]
        area = math.fsum(area for area, _ in each)
        return [*each, (area, math.fsum(area * square for area, square in each) / area)]


# Of a sigma in spreads of a bump: from here on its expectation is that of one Gaussian, to 1e-4.
WIDE_FROM = 6

# Gaussians of a bump, as in cpu.c. Eight leave an error of at most 1 % of its height where the posterior is narrower
# than the spike, of 0.2 % where it is as wide, and of 0.05 % where it is three times as wide or wider.
GAUSSIANS = 8


@lru_cache(maxsize=256)
def _bump(log_ratio: float, width: float) -> Bump:
    """h(w) = log(1 + exp(log_ratio - w^2 / (2 width^2))) as a sum of Gaussians, by least squares."""
    half_width = math.sqrt(2 * max(log_ratio, 0.0))  # where h has fallen to log(2), in units of width
    u = np.linspace(0, half_width + 6, 4000)
    widths = np.geomspace(math.sqrt(max(log_ratio, 1.5) / 1.5), 0.82, GAUSSIANS)
    gaussians = np.exp(-0.5 * (u[:, None] / widths) ** 2)
    heights, *_ = np.linalg.lstsq(gaussians, np.logaddexp(0, log_ratio - u**2 / 2), rcond=1e-9)
    return Bump(tuple(heights.tolist()), tuple((width * widths).tolist()))


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """The paper's prior (7), pi N(w | 0, sigma1^2) + (1 - pi) N(w | 0, sigma2^2): a slab and a spike.

    The defaults are the middle of the grid the paper searched. Sampled at a weight that is drawn, its slope is up to
    1 / sigma2: where the posterior is much wider than the spike, the gradient of the complexity is then mostly noise.
    ``FreeEnergy(complexity="closed")`` has its expectation instead.

    Examples:
        >>> ScaleMixture(pi=0.25, sigma1=1.0, sigma2=0.01).log_density(torch.tensor([0.0, 3.0]))
        tensor([ 3.4019, -6.8052])
    """

    pi: float = 0.5
    sigma1: float = math.exp(-1)
    sigma2: float = math.exp(-7)

    def __post_init__(self) -> None:
        vars(self).update(check_probability("ScaleMixture", pi=self.pi))
        vars(self).update(check_positive("ScaleMixture", sigma1=self.sigma1, sigma2=self.sigma2))

    def log_density(self, w: Tensor) -> Tensor:
        if self.pi in (0, 1):
            return _normal_log_density(w, self.sigma1 if self.pi else self.sigma2)
        slab = _normal_log_density(w, self.sigma1) + math.log(self.pi)
        spike = _normal_log_density(w, self.sigma2) + math.log(1 - self.pi)
        narrow, wide = (spike, slab) if self.sigma2 < self.sigma1 else (slab, spike)
        # As torch.logaddexp, whose second derivative is NaN where the components are far apart. Far out the narrow one
        # is nothing; near 0 both are small numbers.
        return wide + F.softplus(narrow - wide, threshold=40)  # above which it is linear to the last bit of a double

    def expected_log_density(self, mu: Tensor, sigma: Tensor) -> Tensor:
        """E[log wide(w)] + E[h(w)], where h = log(1 + narrow / wide) is the :attr:`bump` of the narrow component.

        h is a sum of Gaussians, whose expectations are known. Where sigma is much wider than h, one Gaussian of the
        same area and spread is as good.
        """
        wide, weight = self.wide
        expected = Normal(wide).expected_log_density(mu, sigma) + math.log(weight)
        if not self.bump.heights:
            return expected
        *each, (area, square) = self.bump.gaussians
        is_wide = sigma >= WIDE_FROM * math.sqrt(square)
        narrow = sum((_expected_gaussian(mu, sigma, *one) for one in each), torch.zeros_like(mu))
        return expected + torch.where(is_wide, _expected_gaussian(mu, sigma, area, square), narrow)

    @property
    def wide(self) -> tuple[float, float]:
        """The standard deviation and the weight of the wider component; of the only one where there is one."""
        if self.pi in (0, 1) or self.sigma1 == self.sigma2:
            return (self.sigma1 if self.pi else self.sigma2), 1.0
        return (self.sigma1, self.pi) if self.sigma2 < self.sigma1 else (self.sigma2, 1 - self.pi)

    @property
    def bump(self) -> Bump:
        """log(1 + narrow / wide) as a sum of Gaussians; none where there is one component."""
        wide, weight = self.wide
        if weight == 1:
            return Bump((), ())
        narrow = min(self.sigma1, self.sigma2)
        log_ratio = math.log1p(-weight) - math.log(weight) + math.log(wide) - math.log(narrow)
        return _bump(log_ratio, 1 / math.sqrt(narrow**-2 - wide**-2))

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        slab, normal = _uniform(like, generator) < self.pi, _normal(like, generator)
        return torch.where(slab, self.sigma1 * normal, self.sigma2 * normal)


@dataclass(frozen=True)
class Laplace(Prior):
    """A double exponential, P(w) = exp(-|w| / scale) / (2 scale).

    Examples:
        >>> Laplace(1.0).log_density(torch.tensor([0.5, -1.0]))
        tensor([-1.1931, -1.6931])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        vars(self).update(check_positive("Laplace", scale=self.scale))

    def log_density(self, w: Tensor) -> Tensor:
        return -w.abs() / self.scale - math.log(2 * self.scale)

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        # The difference of two exponential numbers.
        one, other = (-torch.log1p(-_uniform(like, generator)) for _ in range(2))
        return self.scale * (one - other)

    def expected_log_density(self, mu: Tensor, sigma: Tensor) -> Tensor:
        """-E|w| / scale - log(2 scale), with E|w| = sigma sqrt(2/pi) exp(-z^2/2) + mu erf(z/sqrt(2)), z = mu/sigma."""
        # Beyond |z| = 40 the exponential is 0 and erf is 1 in every precision; so far a sigma that underflows is kept.
        z = mu / torch.maximum(sigma, mu.detach().abs() / 40).clamp(min=torch.finfo(mu.dtype).tiny)
        folded = sigma * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square()) + mu * torch.erf(z / math.sqrt(2))
        return -folded / self.scale - math.log(2 * self.scale)


@dataclass(frozen=True)
class LogDensity(Prior):
    """Any prior: ``function`` gives log P(w) element by element, differentiably.

    It is called with some of the weights at a time, in whatever shape. One that mixes weights, depends on their shape
    or has tensors that are trained is called with whole parameters, which takes more time and memory.

    Examples:
        >>> cauchy = LogDensity(lambda w: -torch.log1p(w.square()) - math.log(math.pi), name="Cauchy")
        >>> cauchy
        LogDensity(Cauchy)
    """

    function: Callable[[Tensor], Tensor]
    name: str = "custom"

    def __post_init__(self) -> None:
        check_callable("LogDensity", function=self.function)
        check_text("LogDensity", name=self.name)

    def __repr__(self) -> str:
        return f"LogDensity({self.name})"

    def log_density(self, w: Tensor) -> Tensor:
        density = self.function(w)
        if not isinstance(density, Tensor) or density.shape != w.shape:
            constraint = f"a function whose result has the weights' shape {list(w.shape)}"
            raise invalid("function", repr(self), constraint, density)
        return density


def check_range(prior: Prior, dtype: torch.dtype, weight: str) -> None:
    """Refuse a prior so narrow that its slope overflows in the type of the weights it is for."""
    largest = torch.finfo(dtype).max
    # The slope of a Gaussian has the factor 1 / sigma^2; in float16, which has no kernels, 1 / sigma twice.
    of_gaussian = 1 / largest if dtype is torch.float16 else largest**-0.5
    for name, smallest in (
        ("sigma", of_gaussian),
        ("sigma1", of_gaussian),
        ("sigma2", of_gaussian),
        ("scale", 1 / largest),
    ):
        if type(prior) in _BY_NAME.values() and getattr(prior, name, math.inf) < smallest:
            constraint = f"at least {smallest:.3g} for weights of type {dtype}, as those of '{weight}' are"
            raise invalid(name, type(prior).__name__, constraint, getattr(prior, name))


_BY_NAME: dict[str, type[Prior]] = {kind.__name__: kind for kind in (Normal, ScaleMixture, Laplace)}


def describe(prior: Prior) -> dict[str, object]:
    """A prior as plain data for a file; of a user's own only what it is called."""
    if type(prior) in _BY_NAME.values():
        return {"kind": type(prior).__name__, **asdict(prior)}  # type: ignore[call-overload]
    return {"kind": "own", "name": repr(prior)}


def from_description(description: dict[str, Any]) -> Prior | None:
    """The prior that :func:`describe` described, or None for a user's own."""
    numbers = dict(description)
    kind = numbers.pop("kind")
    return None if kind == "own" else _BY_NAME[kind](**numbers)


def _expected_gaussian(mu: Tensor, sigma: Tensor, area: float, square: float) -> Tensor:
    """E[a exp(-w^2 / (2 s^2))] = a s / v exp(-mu^2 / (2 v^2)), v^2 = s^2 + sigma^2, of area = a s and square = s^2."""
    variance = sigma.square() + square
    return area * variance.rsqrt() * torch.exp(-0.5 * mu.square() / variance)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def _normal_log_density(w: Tensor, sigma: float) -> Tensor:
    return -0.5 * (w / sigma).square() - (math.log(sigma) + 0.5 * _LOG_2PI)
