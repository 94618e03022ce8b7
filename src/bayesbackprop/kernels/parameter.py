"""What the kernels must know of a network's parameters."""

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Laplace, Normal, Prior, ScaleMixture

# A row of the table in fused.c: n, stream, seven addresses and the prior's kind; then three numbers of the prior.
ROW = struct.Struct("=10q3d")


class Parameter(NamedTuple):
    """A Bayesian parameter: its posterior, its prior, what the prior is centred on, and the stream of its noise."""

    q: WeightPosterior
    prior: Prior
    centre: Tensor | None
    stream: int


class Parameters:
    """The Bayesian parameters of a network by name, and what of them stays the same from call to call."""

    def __init__(self, by_name: Mapping[str, Parameter]) -> None:
        self.by_name = dict(by_name)
        self.each = list(self.by_name.values())
        self.mus = [parameter.q.mu for parameter in self.each]
        self.rhos = [parameter.q.rho for parameter in self.each]

    @property
    def versions(self) -> list[int]:
        """A count of the changes of each tensor, as autograd keeps it."""
        return [tensor._version for tensor in (*self.mus, *self.rhos)]

    def subset(self, names: list[str]) -> "Parameters":
        """Only those of these names."""
        return Parameters({name: self.by_name[name] for name in names})

    @cached_property
    def table(self) -> bytes:
        """The table of the kernels, with no addresses in it."""
        return b"".join(ROW.pack(p.q.mu.numel(), p.stream, 0, 0, 0, 0, 0, 0, 0, *_describe(p.prior)) for p in self.each)


def _describe(prior: Prior) -> tuple[int, float, float, float]:
    if isinstance(prior, Normal):
        return 1, prior.sigma, 0.0, 0.0
    if isinstance(prior, ScaleMixture):
        return 2, prior.pi, prior.sigma1, prior.sigma2
    if isinstance(prior, Laplace):
        return 3, prior.scale, 0.0, 0.0
    return 0, 0.0, 0.0, 0.0
