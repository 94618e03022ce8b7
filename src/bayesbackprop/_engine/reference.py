"""The plain twin: the paper's steps 1 and 2 and the summand of (2), left to autograd."""

import torch
from torch import Tensor
from torch.func import vmap

from bayesbackprop import complexity, noise
from bayesbackprop._engine.parameter import Parameter, Parameters
from bayesbackprop.noise import Key


def sample(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    """The weights of each parameter, and log q(w|theta) - log P(w) over all of them."""
    ws: list[Tensor] = []
    costs: list[Tensor] = []
    for p in parameters.each:
        eps = _eps(p, key)
        ws.append(p.q.weight(eps))
        costs.append(complexity.sampled(p.q, p.prior, p.centre, ws[-1], eps))
    return ws, torch.stack(costs).sum()


def draw_many(parameters: Parameters, key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter."""
    draws = key.draw + torch.arange(many, device=parameters.mus[0].device if parameters.mus else None)
    return [vmap(lambda draw, p=p: p.q.weight(_eps(p, key._replace(draw=draw))))(draws) for p in parameters.each]


def _eps(p: Parameter, key: Key) -> Tensor:
    mu = p.q.mu
    return noise.normal(tuple(mu.shape), key, p.stream, mu.dtype, mu.device)
