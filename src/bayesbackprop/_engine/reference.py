"""The equations, plainly: steps 1 and 2 of the paper, the summand of (2), and (3) and (4).

What the kernels are compared with, and what runs where they cannot: other types and devices, or second derivatives.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesbackprop import complexity, noise
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop.noise import Key
from bayesbackprop.posterior import WeightPosterior


def draw(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    """w = mu + log(1 + exp(rho)) * eps of each parameter, and log q(w|theta) - log P(w) over all; differentiable."""
    ws: list[Tensor] = []
    costs: list[Tensor] = []
    for p in parameters.each:
        eps = _eps(p, key)
        ws.append(p.q.weight(eps))
        sampled = None if parameters.closed else complexity.sampled(p.q, p.prior, p.centre, ws[-1], eps)
        cost = complexity.closed(p.q, p.prior, p.centre) if sampled is None else sampled
        costs.append(cost.to(parameters.mus[0].dtype))
    return ws, torch.stack(costs).sum()


def draws(parameters: Parameters, key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``."""
    keys = [key._replace(draw=key.draw + number) for number in range(many)]
    mus = parameters.mus
    if torch.compiler.is_compiling() and len({(mu.dtype, mu.device) for mu in mus}) == 1:
        shapes, streams = [tuple(mu.shape) for mu in mus], [p.stream for p in parameters.each]
        noises = [noise.normals(shapes, each, streams, mus[0].dtype, mus[0].device) for each in keys]
        pairs = zip(parameters.each, zip(*noises, strict=True), strict=True)
        return [torch.stack([p.q.weight(eps) for eps in own]) for p, own in pairs]
    return [torch.stack([p.q.weight(_eps(p, each)) for each in keys]) for p in parameters.each]


def backward(
    parameters: Parameters, ws: Sequence[Tensor], gradients: Sequence[Tensor], complexity_gradient: float | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Delta_mu and Delta_rho of each parameter from df/dw at the weights ``ws``.

    (3), (4) with f = likelihood cost + c (log q - log P): where g = df/dw - c dlog P/dw, and the paths of log q through
    w and mu cancel, Delta_mu = g and Delta_rho = (g (w - mu) - c) sigmoid(rho) / sigma. In closed form the complexity
    has no path through w: its gradients are those of the KL, by autograd.
    """
    if parameters.closed:
        return _backward_closed(parameters, ws, gradients, complexity_gradient)
    to_mu: list[Tensor] = []
    to_rho: list[Tensor] = []
    for p, w, gradient in zip(parameters.each, ws, gradients, strict=True):
        with torch.enable_grad():
            v = (w if p.centre is None else w - p.centre).detach().requires_grad_()
            (slope,) = torch.autograd.grad(p.prior.log_density(v).sum(), v)
        g = gradient - complexity_gradient * slope
        ratio = torch.exp(torch.nn.functional.logsigmoid(p.q.rho) - p.q.log_sigma)
        to_mu.append(torch.where(p.q.random, g, 0.0))
        to_rho.append(torch.where(p.q.random, (g * (w - p.q.mu) - complexity_gradient) * ratio, 0.0))
    return to_mu, to_rho


def _backward_closed(
    parameters: Parameters, ws: Sequence[Tensor], gradients: Sequence[Tensor], complexity_gradient: float | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    to_mu: list[Tensor] = []
    to_rho: list[Tensor] = []
    for p, w, gradient in zip(parameters.each, ws, gradients, strict=True):
        with torch.enable_grad():
            q = WeightPosterior(*(tensor.detach().requires_grad_() for tensor in p.q))
            of_mu, of_rho = torch.autograd.grad(complexity.closed(q, p.prior, p.centre), q)
        ratio = torch.exp(torch.nn.functional.logsigmoid(p.q.rho) - p.q.log_sigma)
        along = gradient * (w - p.q.mu) * ratio
        to_mu.append(torch.where(p.q.random, gradient + complexity_gradient * of_mu, 0.0))
        to_rho.append(torch.where(p.q.random, along + complexity_gradient * of_rho, 0.0))
    return to_mu, to_rho


def variances(parameters: Parameters) -> list[Tensor]:
    """sigma^2 of each parameter."""
    return [p.q.variance for p in parameters.each]


def _eps(p: Parameter, key: Key) -> Tensor:
    mu = p.q.mu
    return noise.normal(tuple(mu.shape), key, p.stream, mu.dtype, mu.device)
