"""The quick ways to predict give each example the distribution that drawn networks give it."""

from typing import Any

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, Gaussian, plain_kernels
from bayesbackprop._engine.mlp import _ROWS, FullyConnected
from predictions import drawn, nested_net, spread_out
from ztests import assert_mean, assert_z

pytestmark = pytest.mark.statistical

FEW, MANY = 3, _ROWS  # examples: all layers draw outputs, or only the first does


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("examples", [FEW, MANY])
@pytest.mark.parametrize("select", [None, lambda name, _: not name.startswith("3.")], ids=["all", "a layer less"])
def test_each_example_has_the_distribution_of_drawn_networks(bias: bool, examples: int, select: Any) -> None:
    """Mean, variance, and the covariance of the two outputs, which share what comes before them."""
    model = spread_out(nested_net(bias), select=select)
    assert isinstance(model.engine().executors[0], FullyConnected)
    x = torch.randn(FEW, 2, 2).repeat(-(-examples // FEW), 1, 1)[:examples]
    draws = 8000
    quick, slow = (drawn(model, x, draws, estimator)[:, :FEW] for estimator in (None, "shared"))
    error = ((quick.var(0) + slow.var(0)) / draws).sqrt()
    assert_z(((quick.mean(0) - slow.mean(0)) / error).flatten(), "mean")
    centred = [each - each.mean(0) for each in (quick, slow)]
    for name, (a, b) in {
        "variance": [c.square() for c in centred],
        "covariance": [c[..., 0] * c[..., 1] for c in centred],
        "skewness": [c**3 for c in centred],
    }.items():
        error = ((a.var(0) + b.var(0)) / draws).sqrt()
        assert_z(((a.mean(0) - b.mean(0)) / error).flatten(), name)


def test_one_layer_is_the_exact_gaussian() -> None:
    model = Bayesian(nn.Sequential(nn.Linear(3, 2)).double(), Gaussian(0.1), sigma=0.3, seed=1)
    x = torch.randn(FEW, 3).double()
    outputs = drawn(model, x, 20_000, None)
    q = model.posterior
    mean = x @ q["0.weight"].mu.T + q["0.bias"].mu
    variance = x.square() @ q["0.weight"].sigma.square().T + q["0.bias"].sigma.square()
    assert_mean(outputs - mean.detach(), 0.0, "mean")
    assert_mean((outputs - mean.detach()).square() / variance.detach(), 1.0, "variance")


def test_another_estimator_has_the_same_distribution() -> None:
    """For a fully connected network ``local`` gives each input what weight draws give it."""
    torch.manual_seed(1)
    model = Bayesian(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), Gaussian(0.1), sigma=0.3, seed=5)
    x, draws = torch.randn(4, 3), 20_000
    shared = model.predict(x, draws=draws, estimator="shared")
    local = model.predict(x, draws=draws, estimator="local")
    error = (shared.epistemic / draws).sqrt()
    assert_z(((shared.mean - local.mean) / (error * 2**0.5)).flatten(), "mean")
    pair = [p._by_draw(p.components.mean) for p in (shared, local)]
    squares = [(each - each.mean(0)).square() for each in pair]
    assert_mean(squares[0] - squares[1], 0.0, "variance")
    again = model.predict(x, draws=50, estimator="local")
    assert torch.equal(again.mean, model.predict(x, draws=50, estimator="local", memory=10_000).mean)
    with plain_kernels():
        torch.testing.assert_close(again.mean, model.predict(x, draws=50, estimator="local").mean, rtol=1e-4, atol=1e-4)
