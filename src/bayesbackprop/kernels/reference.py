"""The plain twin: the paper's steps 1 and 2 and the summand of (2), left to autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from bayesbackprop import complexity, noise
from bayesbackprop.kernels.parameter import Parameter
from bayesbackprop.noise import Key


def sample(parameters: Sequence[Parameter], key: Key) -> tuple[list[Tensor], Tensor]:
    """The weights of each parameter, and log q(w|theta) - log P(w) over all of them."""
    ws: list[Tensor] = []
    costs: list[Tensor] = []
    for p in parameters:
        eps = _eps(p, key)
        ws.append(p.q.weight(eps))
        costs.append(complexity.sampled(p.q, p.prior, p.centre, ws[-1], eps))
    return ws, torch.stack(costs).sum()


def draw_many(parameters: Sequence[Parameter], key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter."""
    device = parameters[0].q.mu.device if parameters else None
    draws = key.draw + torch.arange(many, device=device)
    return [vmap(lambda draw, p=p: p.q.weight(_eps(p, key._replace(draw=draw))))(draws) for p in parameters]


def _eps(p: Parameter, key: Key) -> Tensor:
    mu = p.q.mu
    return noise.normal(tuple(mu.shape), key, p.stream, mu.dtype, mu.device)
