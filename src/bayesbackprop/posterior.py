"""The variational posterior q(w|theta): a Gaussian of its own for every weight, theta = (mu, rho).

mu is the user's own parameter. rho is ours, one number per weight, and sigma = log(1 + exp(rho)).

A rho below -1000 marks a *constant* weight: sigma is exactly 0, the weight is neither drawn nor trained any more and
costs nothing. Pruned weights and the padding row of an embedding are such.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop._errors import check_positive, invalid

_LOG_2PI = math.log(2 * math.pi)

# Below this, log(1 + exp(rho)) is exp(rho) to within 1e-9 of itself, and its logarithm is rho.
_EXPONENTIAL_BELOW = -20.0
# Below this a weight is constant: exp(rho) is exactly 0 in every type from here on, and float16 can hold the number.
_CONSTANT_BELOW = -1000.0
# Above this, log(1 + exp(rho)) is rho to the last bit of a double.
_LINEAR_ABOVE = 40.0


def softplus(rho: Tensor) -> Tensor:
    """log(1 + exp(rho)), without overflow."""
    return F.softplus(rho, threshold=_LINEAR_ABOVE)


def inverse_softplus(sigma: Tensor) -> Tensor:
    """rho such that log(1 + exp(rho)) = sigma: rho = sigma + log(1 - exp(-sigma))."""
    return sigma + torch.log(-torch.expm1(-sigma))


def constant_rho(dtype: torch.dtype) -> float:
    """The rho of constant weights: so far down that weight decay does not bring it back, but finite, as -inf is not."""
    return max(-1e30, torch.finfo(dtype).min / 2)


def log_softplus(rho: Tensor) -> Tensor:
    """log(log(1 + exp(rho))), with a gradient that lives however negative rho is."""
    inner = softplus(rho.clamp(min=_EXPONENTIAL_BELOW))
    return torch.where(rho < _EXPONENTIAL_BELOW, rho, inner.log())


class WeightPosterior(NamedTuple):
    """The posterior of one parameter: ``mu`` and ``rho``, tensors of the parameter's shape."""

    mu: Tensor
    rho: Tensor

    @property
    def sigma(self) -> Tensor:
        """The standard deviation, sigma = log(1 + exp(rho))."""
        return softplus(self.rho)

    @property
    def log_sigma(self) -> Tensor:
        """log(sigma); of no use for constant weights."""
        return log_softplus(self.rho)

    @property
    def random(self) -> Tensor:
        """Which weights are random; the others are constant."""
        return ~(self.rho < _CONSTANT_BELOW)  # so that a NaN counts as random and is seen

    @property
    def mean(self) -> Tensor:
        """mu, with no gradient for constant weights."""
        return torch.where(self.random, self.mu, self.mu.detach())

    @property
    def variance(self) -> Tensor:
        """sigma^2."""
        return self.sigma.square()

    @property
    def snr(self) -> Tensor:
        """The signal-to-noise ratio |mu| / sigma, by which weights are pruned; 0 for a constant zero."""
        return torch.where((self.mu == 0) & ~self.random, 0.0, self.mu.abs() / self.sigma)

    @property
    def numel(self) -> int:
        """The number of weights."""
        return self.mu.numel()

    def weight(self, eps: Tensor) -> Tensor:
        """w = mu + log(1 + exp(rho)) * eps."""
        return self.mean + self.sigma * eps

    def log_density(self, eps: Tensor) -> Tensor:
        """log q(w|theta) of each weight at w = mu + sigma * eps.

        Written with eps = (w - mu) / sigma: the paths through w and through mu cancel, and so does the subtraction that
        would lose eps when sigma is far below the spacing of floats around mu.
        """
        return -0.5 * eps.square() - self.log_sigma - 0.5 * _LOG_2PI

    def entropy(self) -> Tensor:
        """The entropy of each weight's posterior, log(sigma) + log(2 pi e) / 2."""
        return self.log_sigma + 0.5 * (_LOG_2PI + 1)


class Moments(NamedTuple):
    """The mean and variance of a posterior, computed once for many uses."""

    mu: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Relative:
    """An initial sigma in proportion to |mu|, no smaller than ``floor``.

    Examples:
        >>> Relative(0.1)(torch.tensor([2.0, 0.0]))
        tensor([0.2000, 0.0010])
    """

    fraction: float
    floor: float = 1e-3

    def __post_init__(self) -> None:
        vars(self).update(check_positive("Relative", fraction=self.fraction, floor=self.floor))

    def __call__(self, mu: Tensor) -> Tensor:
        """The initial sigma of each weight."""
        return (self.fraction * mu.detach().abs()).clamp(min=self.floor)


InitialSigma = float | Callable[[Tensor], Tensor]


def initial_rho(mu: Tensor, sigma: InitialSigma) -> Tensor:
    """rho such that log(1 + exp(rho)) = sigma: rho = sigma + log(1 - exp(-sigma))."""
    if not callable(sigma):  # the same for all weights
        number = check_positive("Bayesian", sigma=sigma)["sigma"]
        wanted = torch.tensor(number, dtype=mu.dtype, device="cpu")  # whatever the default device is
        rho = inverse_softplus(wanted.double())
        return torch.full_like(mu, rho.item(), requires_grad=False)
    wanted = sigma(mu)
    if not isinstance(wanted, Tensor):
        raise invalid("sigma", "Bayesian", "a function of mu that gives a tensor of its shape", wanted)
    return inverse_softplus(wanted.double()).to(mu.dtype)


class Mirror(nn.Module):
    """Tensors under given dotted names, so that the rho of ``layer.0.weight`` is itself called ``layer.0.weight``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            node: nn.Module = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, Mirror({}))
                node = node.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                node.register_parameter(leaf, tensor)
            else:
                node.register_buffer(leaf, tensor)
