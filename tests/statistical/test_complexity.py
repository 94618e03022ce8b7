"""The sampled complexity cost averages to the closed form, or to the integral where there is none."""

import math

import pytest
import torch

from bayesbackprop import Laplace, Normal, ScaleMixture
from complexities import CAUCHY, linear
from many_draws import each_draw
from ztests import assert_mean

pytestmark = pytest.mark.statistical


@pytest.mark.parametrize("sigma", [1e-4, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("centre", [None, "net", "elsewhere"])
@pytest.mark.parametrize("prior", [Normal(0.6), Laplace(0.5)], ids=repr)
def test_sampled_cost_averages_to_the_closed_form(prior, centre, sigma):
    model = linear(prior, sigma, centre)
    costs = each_draw(lambda index: model.draw(index=index).complexity(), 20_000)
    assert_mean(costs, model.complexity_closed().item(), f"{prior}, sigma {sigma}")


@pytest.mark.parametrize("sigma", [1e-3, 0.05, 1.0])
@pytest.mark.parametrize("prior", [ScaleMixture(0.25, 1.0, 0.01), ScaleMixture(), CAUCHY], ids=repr)
def test_sampled_cost_averages_to_the_integral(prior, sigma):
    model = linear(prior, sigma, "elsewhere")
    eps = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    density = torch.exp(-eps.square() / 2) / math.sqrt(2 * math.pi)
    expected = 0.0
    for name, q in model.posterior.items():
        w = (q.mu - model.centre.get_buffer(name)).detach().unsqueeze(-1) + sigma * eps
        log_q = -eps.square() / 2 - math.log(sigma * math.sqrt(2 * math.pi))
        expected += float(torch.trapezoid(density * (log_q - prior.log_density(w)), eps).sum())
    costs = each_draw(lambda index: model.draw(index=index).complexity(), 20_000)
    assert_mean(costs, expected, f"{prior}, sigma {sigma}")
