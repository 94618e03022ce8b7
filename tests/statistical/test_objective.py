"""Gradients of the free energy are unbiased: against the exact free energy of a linear model."""

import math

import pytest
import torch
from torch import distributions, nn

from bayesbackprop import Bayesian, FreeEnergy, Gaussian, Normal
from many_draws import each_step
from ztests import assert_mean

pytestmark = pytest.mark.statistical


@pytest.mark.parametrize(
    ("complexity", "estimator"),
    [("sampled", "shared"), ("sampled", "local"), ("sampled", "flipout"), ("closed", "shared")],
)
def test_gradients_are_unbiased(complexity, estimator):
    """Against the exact free energy of a linear model with Gaussian noise."""
    noise, n = 0.7, 6
    x, y = torch.randn(n, 3).double(), torch.randn(n, 2).double()
    model = Bayesian(nn.Linear(3, 2).double(), Gaussian(noise), Normal(0.8), sigma=0.4, estimator=estimator, seed=4)
    posterior = model.posterior
    thetas = [theta for q in posterior.values() for theta in q]
    weight, bias = posterior["weight"], posterior["bias"]
    squares = (y - x @ weight.mu.T - bias.mu).square() + x.square() @ weight.sigma.square().T + bias.sigma.square()
    exact = (squares / (2 * noise**2) + math.log(noise * math.sqrt(2 * math.pi))).sum()
    for q in posterior.values():
        exact = (
            exact
            + distributions.kl_divergence(
                distributions.Normal(q.mu, q.sigma), distributions.Normal(0.0, torch.tensor(0.8).double())
            ).sum()
        )
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(exact / n, thetas)])

    free_energy = FreeEnergy(model, n=n, complexity=complexity)
    totals, by_name = each_step(free_energy, x, y, 800)
    names = [f"model.{part}.{name}" for name in posterior for part in ("net", "rho")]
    gradients = torch.cat([by_name[name].flatten(1) for name in names], 1).unbind()
    assert_mean(totals, exact.item() / n, "free energy")
    assert_mean(torch.stack(gradients), expected, "gradients")
