"""Bayesian parameters for the tests of the engine, as its operators take them."""

from collections.abc import Sequence

import torch

from bayesbackprop import Laplace, LogDensity, Normal, Prior, ScaleMixture
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop.posterior import WeightPosterior, constant_rho

DTYPES = [torch.float32, torch.float64]
CPU = torch.device("cpu")

# Every prior that the kernels know, with one component of a mixture missing, and with a steep spike.
KNOWN_PRIORS: list[Prior] = [
    Normal(0.3),
    Laplace(0.2),
    ScaleMixture(0.25, 1.0, 0.1),
    ScaleMixture(0.0, 1.0, 0.1),
    ScaleMixture(1.0, 2.0, 0.1),
    ScaleMixture(0.5, 1.0, 0.002),
]
# A prior that only Python knows. The kernels leave log P(w) out of the complexity.
UNKNOWN_PRIOR = LogDensity(lambda w: 0.0 * w, name="flat")

# Which of n weights are constant.
CONSTANTS: dict[str, slice] = {
    "none": slice(0, 0),
    "every third": slice(0, None, 3),
    "the first": slice(0, 1),
    "the last": slice(-1, None),
    "all": slice(0, None),
    "all but the last": slice(0, -1),
    "the second block": slice(256, 512),  # of those that cpu.c holds on the stack at a time
}


def rounding_of_constants(n: int, prior: Prior, dtype: torch.dtype) -> float:
    """What ``n`` weights may add to the complexity in C, where constant ones are counted as if at 0 and subtracted."""
    at_zero = prior.log_density(torch.zeros((), dtype=torch.float64)).abs().item()
    return 4 * n * (2 + at_zero) * torch.finfo(dtype).eps


def parameters_of(
    n: int,
    prior: Prior,
    dtype: torch.dtype,
    *,
    centred: bool = False,
    constants: slice = CONSTANTS["none"],
    streams: Sequence[int] = (20,),
) -> Parameters:
    """One parameter of ``n`` weights, in each of ``streams``; sigma runs from 1e-3 to 3."""
    generator = torch.Generator().manual_seed(n)
    mu, centre = torch.randn(2, n, generator=generator, dtype=torch.float64)
    rho = 10 * torch.rand(n, generator=generator, dtype=torch.float64) - 7
    rho[constants] = constant_rho(dtype)
    q = WeightPosterior(mu.to(dtype).requires_grad_(), rho.to(dtype).requires_grad_())
    each = [Parameter(q, prior, centre.to(dtype) if centred else None, stream) for stream in streams]
    return Parameters({str(stream): parameter for stream, parameter in zip(streams, each, strict=True)})
