"""A small objective, its data, and what a step of it is compared by."""

from typing import Any

import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Cost, FreeEnergy, Gaussian, Normal, ScaleMixture

N, EXAMPLES, SEED = 40, 5, 11

PRIORS = {"sampled": ScaleMixture(), "closed": Normal(0.5)}


def small_free_energy(estimator: Any, complexity: str, net: nn.Module | None = None, **options: Any) -> FreeEnergy:
    torch.manual_seed(4)
    net = net or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    likelihood = Gaussian("learnt")
    model = Bayesian(net, likelihood, PRIORS[complexity], sigma=0.3, estimator=estimator, seed=SEED)
    return FreeEnergy(model, n=N, complexity=complexity, **options).double()


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(EXAMPLES, size, generator=generator, dtype=torch.float64) for size in (3, 2))
    return x, y


def parts(cost: Cost) -> list[Tensor]:
    parts = (cost.total, cost.likelihood, cost.complexity, cost.complexity_weight)
    return [part.detach() for part in parts]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        gradients[name.removeprefix("module.")] = parameter.grad.clone()
    return gradients
