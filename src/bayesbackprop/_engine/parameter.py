"""What the kernels must know of a network's parameters."""

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from bayesbackprop._engine.room import Room
from bayesbackprop._engine.stack import Stack
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Laplace, Normal, Prior, ScaleMixture

# The priors that the kernels know, by their number in fused.c.
_KINDS = {Normal: 1, ScaleMixture: 2, Laplace: 3}

# A row of the table in fused.c: n, stream, seven addresses and the prior's kind; then three numbers of the prior.
ROW = struct.Struct("=10q3d")


class Parameter(NamedTuple):
    """A Bayesian parameter: its posterior, its prior, what the prior is centred on, and the stream of its noise."""

    q: WeightPosterior
    prior: Prior
    centre: Tensor | None
    stream: int


class Parameters:
    """The Bayesian parameters of a network by name, and what of them stays the same from call to call.

    ``stack`` is the network, if it is nothing but a stack of layers with these weights.
    """

    def __init__(self, by_name: Mapping[str, Parameter], stack: Stack | None = None) -> None:
        self.stack = stack
        self.by_name = dict(by_name)
        self.each = list(self.by_name.values())
        self.mus = [parameter.q.mu for parameter in self.each]
        self.rhos = [parameter.q.rho for parameter in self.each]
        centres = [parameter.centre for parameter in self.each if parameter.centre is not None]
        self.trained = [*self.mus, *self.rhos]
        self.tensors = [*self.trained, *centres]
        self.room_for_weights, self.room_for_gradients = Room(), Room()
        self._addresses: list[int] = []
        self.fused_priors = all(type(parameter.prior) in _KINDS for parameter in self.each)

    @property
    def state(self) -> tuple[list[int], list[int]]:
        """What tells whether a tensor was changed: the counts of changes that autograd keeps, and where they are."""
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if addresses != self._addresses:
            # Held, so that nothing else comes to be at the same address.
            self._addresses, self._held = addresses, [tensor.untyped_storage() for tensor in self.tensors]
        return [tensor._version for tensor in self.tensors], addresses

    def subset(self, names: list[str]) -> "Parameters":
        """Only those of these names."""
        return Parameters({name: self.by_name[name] for name in names})

    @cached_property
    def table(self) -> bytes:
        """The table of the kernels, with no addresses in it."""
        return b"".join(ROW.pack(p.q.mu.numel(), p.stream, 0, 0, 0, 0, 0, 0, 0, *_describe(p.prior)) for p in self.each)


def _describe(prior: Prior) -> tuple[int, float, float, float]:
    kind = _KINDS.get(type(prior), 0)
    if isinstance(prior, ScaleMixture):
        return kind, prior.pi, prior.sigma1, prior.sigma2
    if isinstance(prior, Normal):
        return kind, prior.sigma, 0.0, 0.0
    return kind, prior.scale if isinstance(prior, Laplace) else 0.0, 0.0, 0.0
