"""A small network with a prior, and what its draws cost."""

import math

import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Gaussian, LogDensity

CAUCHY = LogDensity(lambda w: -torch.log1p(w.square()) - math.log(math.pi), name="Cauchy")


def linear(prior, sigma=0.3, centre=None, **options) -> Bayesian:
    """A small network around which the prior is centred or not; the centre is then away from the mean."""
    net = nn.Linear(3, 2).double()
    if centre == "elsewhere":
        centre = {name: torch.randn_like(mu) for name, mu in net.named_parameters()}
    return Bayesian(net, Gaussian(0.5), prior, sigma=sigma, centre=centre, seed=0, **options)


def sampled_costs(model: Bayesian, draws: int) -> Tensor:
    with torch.no_grad():
        return torch.stack([model.draw(index=index).complexity() for index in range(draws)])
