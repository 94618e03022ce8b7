"""Parameters whose weights vary together: drawn by the equations of their family, and differentiated by autograd."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayesbackprop import complexity
from bayesbackprop._engine import ops
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.families import Family
from bayesbackprop.noise import Key, Role

_LOG_2PI = math.log(2 * math.pi)


class Joint:
    """A posterior of several parameters together.

    Args:
        parameters: These parameters.
        family: How they vary together.
        joint: The tensor that says how.
    """

    def __init__(self, parameters: Parameters, family: Family, joint: Tensor) -> None:
        self.parameters, self.family, self.joint = parameters, family, joint
        # Its weights have one draw for all examples, so the stream of outputs is free.
        self._stream = parameters.each[0].stream + Role.ACTIVATION

    def draw(self, key: Key) -> tuple[list[Tensor], Tensor]:
        """The weights of each parameter, and log q(w|theta) - log P(w) over all."""
        of, each = self._spread(), self.parameters.each
        eps, z = self._noise(key, of.random)
        ws = self._weights(of, eps, z)
        distance = self.family.distance(of.sigma, of.joint, eps, z)
        log_density = -0.5 * (distance + of.random.sum() * _LOG_2PI) - self._log_root(of)
        costs = [complexity.prior_cost(p.q, p.prior, p.centre, w) for p, w in zip(each, ws, strict=True)]
        return ws, (log_density + torch.stack(costs).sum()).to(self.joint.dtype)

    def draws(self, key: Key, many: int) -> list[Tensor]:
        """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``, without gradients."""
        with torch.no_grad():
            of = self._spread()
            keys = [key._replace(draw=key.draw + number) for number in range(many)]
            each = [self._weights(of, *self._noise(one, of.random)) for one in keys]
            return [torch.stack(ws) for ws in zip(*each, strict=True)]

    def kl(self) -> Tensor:
        """KL[q(w|theta) || P(w)] = -H[q] - E_q[log P(w)], of which the second part needs the variances alone."""
        of = self._spread()
        total = -0.5 * of.random.sum() * (_LOG_2PI + 1) - self._log_root(of)
        for p, deviation in zip(self.parameters.each, self.deviations(), strict=True):
            mu = p.q.mu if p.centre is None else p.q.mu - p.centre
            expected = p.prior.expected_log_density(mu, torch.where(p.q.random, deviation, 1.0))
            total = total - torch.where(p.q.random, expected, 0.0).sum()
        return total.to(self.joint.dtype)

    def deviations(self) -> list[Tensor]:
        """The standard deviation of each weight, 0 of those that are constant."""
        of = self._spread()
        return self._parts(torch.where(of.random, self.family.variance(of.sigma, of.joint).sqrt(), 0.0))

    def _noise(self, key: Key, random: Tensor) -> tuple[Tensor, Tensor]:
        kind = self.joint.dtype, self.joint.device
        eps = [ops.normal(tuple(p.q.mu.shape), key, p.stream, *kind).flatten() for p in self.parameters.each]
        size = self.family.size(self.joint)
        z = ops.normal((size,), key, self._stream, *kind) if size else self.joint.new_empty(0)
        return torch.where(random, torch.cat(eps), 0.0), z

    def _weights(self, of: "_Spread", eps: Tensor, z: Tensor) -> list[Tensor]:
        deviations = self._parts(torch.where(of.random, self.family.deviation(of.sigma, of.joint, eps, z), 0.0))
        return [p.q.mean + deviation for p, deviation in zip(self.parameters.each, deviations, strict=True)]

    def _spread(self) -> "_Spread":
        each = [p.q for p in self.parameters.each]
        random = torch.cat([q.random.flatten() for q in each])
        sigma = torch.where(random, torch.cat([q.sigma.flatten() for q in each]), 1.0)
        log_sigma = torch.where(random, torch.cat([q.log_sigma.flatten() for q in each]), 0.0)
        joint = torch.where(random[:, None], self.joint, 0.0)
        if not self.family.size(joint):  # its columns are of the weights too
            joint = torch.where(random, joint, 0.0)
        return _Spread(random, sigma, log_sigma, joint)

    def _log_root(self, of: "_Spread") -> Tensor:
        return self.family.log_root(of.sigma, of.log_sigma, of.joint)

    def _parts(self, values: Tensor) -> list[Tensor]:
        """Numbers of all weights as those of each parameter."""
        mus = self.parameters.mus
        return [part.view_as(mu) for part, mu in zip(values.split([mu.numel() for mu in mus]), mus, strict=True)]


class _Spread(NamedTuple):
    """How the weights vary. A constant one has sigma = 1 and no noise: it adds nothing to determinant and distance."""

    random: Tensor
    sigma: Tensor
    log_sigma: Tensor
    joint: Tensor
